"""Times linear and log-linear attention on the GPU beside flash-linear-attention, in one run.

    python -m mixtron.kernels.log_linear_attention.bench [--ops OP...] [--growth] [--sweep OP]

Prints Markdown: forward, forward + backward, and the memory that they need beyond their inputs.
Nothing is checked here: `tests/kernels/test_gpu_linear_attention.py` does that.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels import measure
from mixtron.kernels.delta_rule import delta_rule
from mixtron.kernels.gated_linear_attention import gated_linear_attention
from mixtron.kernels.gated_linear_attention import triton_op as single_op
from mixtron.kernels.log_linear_attention import log_linear_attention, required_levels
from mixtron.kernels.log_linear_attention import triton_delta_op as delta_op
from mixtron.kernels.log_linear_attention import triton_op as tree_op

SHAPES = [(8, 4096, 16, 128, 64), (1, 32768, 32, 128, 64), (1, 131072, 32, 128, 64)]
"""B, T, H, K, V; as many query/key heads as value heads, unless said."""
SWEEPS: dict[str, tuple[Any, dict[str, list[int]]]] = {
    "one_state": (
        single_op,
        {
            "query_warps": [4, 8],
            "key_warps": [4, 8],
            "output_warps": [4, 8],
            "state_warps": [4, 8],
            "state_stages": [1, 2, 3, 4],
            "fewest_programs": [1, 128, 1024],
            "scan_block": [512, 1024, 2048],
            "scan_stages": [2, 4, 6],
        },
    ),
    "log_linear": (
        tree_op,
        {
            "gradient_warps": [4, 8],
            "output_warps": [4, 8],
            "parts_warps": [4, 8],
            "tree_block": [256, 512, 1024],
            "tree_warps": [1, 2, 4],
        },
    ),
    "delta": (
        delta_op,
        {
            "scan_block_v": [32, 64],
            "reverse_block_v": [16, 32, 64],
            "reverse_warps": [4, 8],
            "maps_warps": [4, 8],
            "read_warps": [4, 8],
            "maps_gradient_warps": [4, 8],
            "transition_warps": [4, 8],
            "output_warps": [4, 8],
        },
    ),
}


def make_inputs(B: int, T: int, H: int, K: int, V: int, heads: int) -> dict[str, Tensor]:
    """q, k, v in bf16, log decay and lambda in fp32; q and k have `heads` heads."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    inputs = {
        "q": draw(B, T, heads, K).bfloat16(),
        "k": F.normalize(draw(B, T, heads, K), dim=-1).bfloat16(),
        "v": draw(B, T, H, V).bfloat16(),
        "log_decay": -0.1 * F.softplus(draw(B, T, H)),
        "lambda": F.softplus(draw(B, T, H, required_levels(T))),
        "beta": draw(B, T, H).sigmoid(),
    }
    return {name: x.requires_grad_() for name, x in inputs.items()}


def ours(inputs: dict[str, Tensor], *, tree: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    q, k, v, log_decay, lambda_, _ = inputs.values()
    if tree:
        return (
            lambda: log_linear_attention(q, k, v, log_decay, None, lambda_, backend="triton"),
            [q, k, v, log_decay, lambda_],
        )
    return (
        lambda: gated_linear_attention(q, k, v, log_decay, backend="triton")[0],
        [q, k, v, log_decay],
    )


def ours_delta(inputs: dict[str, Tensor], *, tree: bool) -> tuple[Callable, list[Tensor]]:
    """Log-linear, or the delta rule itself."""
    q, k, v, log_decay, lambda_, beta = inputs.values()
    if tree:
        return (
            lambda: log_linear_attention(q, k, v, log_decay, beta, lambda_, backend="triton"),
            [q, k, v, log_decay, beta, lambda_],
        )
    return (
        lambda: delta_rule(q, k, v, log_decay, beta, step_size="learned", backend="triton")[0],
        [q, k, v, log_decay, beta],
    )


def peer(inputs: dict[str, Tensor], *, tree: bool) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """flash-linear-attention's op. Its log-linear one takes bf16 alone; its single-state one
    refuses Hopper with Triton 3.4 to 3.7, and is timed without the refusal."""
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]
    from fla.ops.log_linear_attn import (  # pyright: ignore[reportMissingImports]
        chunk_log_linear_attn,
    )
    from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore[reportMissingImports]

    chunk_o.TRITON_ABOVE_3_7_1 = True
    q, k, v, log_decay, lambda_, _ = inputs.values()
    if tree:
        low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v, log_decay, lambda_)]
        return lambda: chunk_log_linear_attn(*low)[0], low
    return lambda: chunk_simple_gla(q, k, v, log_decay)[0], [q, k, v, log_decay]


Rows = Iterator[list[object]]


def timed(shape: tuple[int, ...], name: str, op: Callable, tree: bool, heads: int) -> list[object]:
    """A row: what, then forward ms, forward + backward ms, and MiB; or the error."""
    B, T, H, K, V = shape
    label = [f"{B} x {T} x {H}", name]
    try:
        forward, both, mib = measure.forward_and_backward(
            *op(make_inputs(B, T, H, K, V, heads), tree=tree)
        )
    except Exception as error:
        return [*label, repr(error)[:80]]
    return [*label, forward, both, round(mib)]


OPS: dict[str, tuple[str, Callable, bool, bool]] = {
    "one_state": ("one state, Triton", ours, False, False),
    "log_linear": ("log-linear, Triton", ours, True, False),
    "log_linear_1": ("log-linear, Triton, 1 q/k head", ours, True, True),
    "fla_one_state": ("fla simple_gla", peer, False, False),
    "delta_rule": ("delta rule, Triton", ours_delta, False, False),
    "log_linear_delta": ("log-linear delta rule, Triton", ours_delta, True, False),
    "fla_log_linear": ("fla log-linear, all bf16, 1 q/k head", peer, True, True),
}
"""A row's name, the op, whether it has a tree, and one query/key head alone. The peer's log-linear
op is last: it compiles for minutes."""


def comparison(names: Sequence[str]) -> Rows:
    for key in names:
        name, op, tree, one_head = OPS[key]
        for shape in SHAPES[:2] if op is peer and tree else SHAPES:
            yield timed(shape, name, op, tree, 1 if one_head else shape[2])


def growth() -> Rows:
    """From 4k to 256k tokens, as many in all."""
    for name, op, tree in (
        ("one state", ours, False),
        ("log-linear", ours, True),
        ("log-linear delta rule", ours_delta, True),
    ):
        for T in [2**n for n in range(12, 19)]:
            yield timed((2**18 // T, T, 16, 128, 64), name, op, tree, 16)


def sweep(name: str) -> Rows:
    """One option of an op's launches after another."""
    module, fields = SWEEPS[name]
    plan, op = module.PLAN, ours_delta if name == "delta" else ours
    for field, values in fields.items():
        for value in values:
            module.PLAN = dataclasses.replace(plan, **{field: value})
            label = f"{name}, {field} {value}"
            yield timed(SHAPES[1], label, op, name != "one_state", SHAPES[1][2])
    module.PLAN = plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--sweep", choices=SWEEPS)
    parser.add_argument("--ops", nargs="+", choices=OPS)
    options = parser.parse_args()
    print(measure.versions(), "K 128, V 64", sep=", ")
    others = options.growth or options.sweep
    rows = chain(
        comparison(options.ops or ([] if others else list(OPS))),
        growth() if options.growth else (),
        sweep(options.sweep) if options.sweep else (),
    )
    heads = ["B x T x H", "op", "forward ms", "forward + backward ms", "extra MiB"]
    print(measure.table(heads, []))
    for row in rows:
        print(measure.table(heads, [row]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
