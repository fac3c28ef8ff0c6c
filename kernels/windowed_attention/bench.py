"""Times windowed attention on the GPU beside its peers, in one run.

python -m mixtron.kernels.windowed_attention.bench            the table of README.md
python -m mixtron.kernels.windowed_attention.bench --sweep    tile sizes, warps and stages
python -m mixtron.kernels.windowed_attention.bench --curve    forward over T
python -m mixtron.kernels.windowed_attention.bench --decode   one token
"""

# Arguments are passed on as lists.
# pyright: reportCallIssue=false, reportArgumentType=false

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mixtron.kernels.measure import forward_and_backward, table, time_ms, versions
from mixtron.kernels.windowed_attention import (
    WindowPlan,
    document_permutation,
    document_permutations,
    plan_windows,
    triton_op,
    window_reach,
    windowed_attention,
    windowed_attention_step,
)

SWEEP = (
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 4, 4),
    (128, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (64, 128, 4, 2),
    (64, 128, 8, 2),
    (128, 128, 8, 2),
)
"""Slots in a tile of queries and of keys, warps, stages."""
COMPILERS = 12
LAYERS = 24
"""Whose permutations are drawn together, as in a model's step."""


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int
    K: int
    window: int

    def __str__(self) -> str:
        return f"({self.B}, {self.T:,}, {self.H}, {self.K}, {self.window:,})"


SHAPES = (Shape(8, 4096, 16, 64, 256), Shape(1, 32768, 16, 128, 1024))


def random_rows(shape: Shape, count: int) -> list[Tensor]:
    """[B T, H, K] each, bf16, with gradients."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    size = (shape.B * shape.T, shape.H, shape.K)
    return [
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(count)
    ]


def orders(shape: Shape) -> tuple[Tensor, range, Tensor]:
    """A permutation inside each of B sequences, the plain order, and cu_seqlens."""
    tokens = shape.B * shape.T
    cu = torch.arange(0, tokens + 1, shape.T, dtype=torch.int32, device="cuda")
    drawn = document_permutation(cu, tokens, seed=0, step=0, layer=1)
    return drawn, range(tokens), cu


def plans(shape: Shape, **tiles: int) -> dict[str, WindowPlan]:
    drawn, plain, cu = orders(shape)
    return {
        "SA": plan_windows(
            drawn, cu, window=shape.window, window_side="two", backend="triton", **tiles
        ),
        "SWA": plan_windows(
            plain, cu, window=shape.window, window_side="one", backend="triton", **tiles
        ),
    }


def peers(shape: Shape, rows: list[Tensor]) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """What is timed beside, with the inputs whose gradients it makes. Masks are made before."""
    drawn, _, _ = orders(shape)
    order_BT = (
        drawn.view(shape.B, shape.T) - torch.arange(shape.B, device="cuda")[:, None] * shape.T
    )
    slot_BT = order_BT.argsort(1)
    before, after = window_reach(shape.window, "two")
    flex: Any = torch.compile(flex_attention, dynamic=False)

    def random_window(b, h, i, j):
        near = (j - i >= -before) & (j - i <= after)
        return near & (order_BT[b, j] <= order_BT[b, i])

    def plain_window(b, h, i, j):
        return (j <= i) & (i - j < shape.window)

    sizes = {"H": None, "Q_LEN": shape.T, "KV_LEN": shape.T, "device": "cuda"}
    random_mask = create_block_mask(random_window, B=shape.B, **sizes)
    plain_mask = create_block_mask(plain_window, B=None, **sizes)
    heads_first = [
        x.detach().view(shape.B, shape.T, shape.H, shape.K).transpose(1, 2).contiguous()
        for x in rows
    ]
    for x in heads_first:
        x.requires_grad_()

    def gathered() -> Tensor:
        """Tokens to slots, attention over a window of slots, and back."""
        sequence_B1 = torch.arange(shape.B, device="cuda")[:, None]
        slots = [
            x.view(shape.B, shape.T, shape.H, shape.K)[sequence_B1, order_BT].transpose(1, 2)
            for x in rows
        ]
        o_BHTK = flex(*slots, block_mask=random_mask)
        return o_BHTK.transpose(1, 2)[sequence_B1, slot_BT]

    def full() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*heads_first, is_causal=True)

    return {
        "gather + FlexAttention + gather": (gathered, rows),
        "FlexAttention, SWA": (lambda: flex(*heads_first, block_mask=plain_mask), heads_first),
        "SDPA FlashAttention-2, full": (full, heads_first),
    }


def compare(shape: Shape) -> list[list]:
    """A line a form, and last the parts of the plan, which all layers of a plain order share."""
    rows = random_rows(shape, 3)
    forms = {
        f"ours, {name}": (lambda plan=plan: windowed_attention(*rows, plan, backend="triton"), rows)
        for name, plan in plans(shape).items()
    }
    found = []
    for name, (forward, inputs) in (forms | peers(shape, rows)).items():
        found.append([str(shape), name, *forward_and_backward(forward, inputs)])
        print(*found[-1], flush=True)
    sa_ms, swa_ms = found[0][3], found[1][3]
    found = [[*row, row[3] / sa_ms, row[3] / swa_ms] for row in found]
    drawn, _, cu = orders(shape)
    options = {"seed": 0, "step": 0, "layers": range(1, LAYERS + 1), "backend": "triton"}
    permutation_ms = time_ms(lambda: document_permutations(cu, len(drawn), **options)) / LAYERS
    plan_ms = time_ms(
        lambda: plan_windows(drawn, cu, window=shape.window, window_side="two", backend="triton")
    )
    found.append([str(shape), f"the permutation, one of {LAYERS} together", permutation_ms])
    found.append([str(shape), "its tiles and their lists", plan_ms])
    return found


def curve() -> list[list]:
    """Forward at 65,536 tokens in all (more where one sequence is longer), window 256."""
    found = []
    for log2 in range(10, 19):
        T = 1 << log2
        shape = Shape(max(1, 65_536 >> log2), T, 16, 64, 256)
        rows = [x.detach() for x in random_rows(shape, 3)]
        q, k, v = (x.view(shape.B, T, 16, 64).transpose(1, 2).contiguous() for x in rows)
        plan = plans(shape)["SA"]

        def full(q=q, k=k, v=v):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

        ours_ms = time_ms(partial(windowed_attention, *rows, plan, backend="triton"))
        full_ms = time_ms(full, warm_up=1, repeats=3)
        found.append([shape.B, T, ours_ms, full_ms, full_ms / ours_ms])
    return found


def decode() -> list[list]:
    """One token of B sequences whose caches hold 32,768 tokens, over a window of 1,024."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    found = []
    for B in (1, 32, 256):
        S, W, H, K = 32_768, 1024, 8, 64
        sizes = ((B, H, K), (B, S, H, K), (B, S, H, K))
        tensors = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        row_BW = torch.randint(0, S, (B, W), generator=generator, device="cuda")
        attended_BW = row_BW >= S // 2
        ms = [
            time_ms(partial(windowed_attention_step, *tensors, row_BW, attended_BW, backend=form))
            for form in ("triton", "tiled")
        ]
        found.append([B, *ms, ms[1] / ms[0]])
    return found


def sweep(shape: Shape) -> list[list]:
    """Each kernel alone, over the sizes of tiles, warps and stages."""
    q, k, v = (x.detach() for x in random_rows(shape, 3))
    by_tiles = {(a, b): plans(shape, query_tile=a, key_tile=b) for a, b in {c[:2] for c in SWEEP}}
    scale = shape.K**-0.5
    o, lse = triton_op.attend(q, k, v, by_tiles[64, 64]["SA"], scale, triton_op.Launch(4, 2))

    def runs(candidate) -> list[tuple[str, str, Callable]]:
        query_tile, key_tile, warps, stages = candidate
        launch = triton_op.Launch(warps, stages)
        made = []
        for name, plan in by_tiles[query_tile, key_tile].items():
            forward, dq, dkv = triton_op.attend, triton_op.query_gradient, triton_op.key_gradients
            options = (plan, scale, launch)
            made += [
                (name, "forward", partial(forward, q, k, v, *options)),
                (name, "dq", partial(dq, q, k, v, o, o, lse, *options)),
                (name, "dk, dv", partial(dkv, q, k, v, o, lse, lse, *options)),
            ]
        return made

    def attempt(run, measure):
        try:
            return measure(run)
        except Exception as error:  # a configuration that does not fit is a result of the sweep
            return type(error).__name__

    with ThreadPoolExecutor(COMPILERS) as pool:
        first = [run for c in SWEEP for _, _, run in runs(c)[:3]]
        list(pool.map(lambda run: attempt(run, lambda r: r()), first))
    torch.cuda.synchronize()
    return [
        [str(shape), name, kernel, *candidate, attempt(run, time_ms)]
        for candidate in SWEEP
        for name, kernel, run in runs(candidate)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--decode", action="store_true")
    wanted = parser.parse_args()
    print(versions())
    if wanted.sweep:
        found = [row for shape in SHAPES for row in sweep(shape)]
        found.sort(key=lambda row: (row[:3], row[-1] if isinstance(row[-1], float) else 1e9))
        heads = (
            "B, T, H, K, window",
            "order",
            "kernel",
            "queries",
            "keys",
            "warps",
            "stages",
            "ms",
        )
        print(table(heads, found))
        return
    if wanted.curve:
        heads = ("sequences", "T", "SA ms", "SDPA FlashAttention-2 ms", "ratio")
        print(table(heads, curve()))
        return
    if wanted.decode:
        print(table(("sequences", "triton ms", "torch ms", "ratio"), decode()))
        return
    heads = ("B, T, H, K, window", "form", "forward ms", "forward + backward ms", "extra MiB")
    heads += ("over our SA", "over our SWA")
    for shape in SHAPES:
        print(table(heads, compare(shape)), flush=True)


if __name__ == "__main__":
    main()
