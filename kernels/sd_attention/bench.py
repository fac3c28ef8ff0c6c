"""Times S-D attention on the GPU beside its peers, in one run.

python -m mixtron.kernels.sd_attention.bench            the table of README.md
python -m mixtron.kernels.sd_attention.bench --sweep    tile sizes, warps and stages
"""

# Arguments are passed on as lists.
# pyright: reportCallIssue=false, reportArgumentType=false

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixtron.kernels.measure import forward_and_backward, table, time_ms, versions
from mixtron.kernels.sd_attention import sd_attention, triton_op
from mixtron.kernels.windowed_attention.permutation import document_bounds

B, T, H = 8, 4096, 16
WIDTHS = (64, 128)
SWEEP = [
    triton_op.Launch(*sizes)
    for sizes in (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 8, 2),
        (64, 32, 4, 3),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 4, 3),
        (128, 128, 8, 2),
    )
]
COMPILERS = 12


def random_inputs(width: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v [B T, H, width] bf16 and d [B T, H] fp32, with gradients; cu_seqlens."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = [
        torch.randn(B * T, H, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    ]
    d_TH = torch.rand(B * T, H, generator=generator, device="cuda")
    cu = torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda")
    return [x.requires_grad_() for x in (*rows, d_TH)], cu


def compare(width: int) -> list[list]:
    inputs, cu = random_inputs(width)
    options = {"scale": width**-0.5}

    def ours(backend):
        return sd_attention(*inputs, [T] * B, cu, backend=backend, **options)

    heads_first = [x.detach().view(B, T, H, width).transpose(1, 2) for x in inputs[:3]]
    heads_first = [x.contiguous().requires_grad_() for x in heads_first]

    def plain(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=True)

    forms = {
        "S-D, Triton": (partial(ours, "triton"), inputs),
        "S-D, on torch's FlashAttention-2": (partial(ours, "blockwise"), inputs),
        "attention, SDPA FlashAttention-2": (
            partial(plain, SDPBackend.FLASH_ATTENTION),
            heads_first,
        ),
        "attention, SDPA cuDNN": (partial(plain, SDPBackend.CUDNN_ATTENTION), heads_first),
    }
    found = [
        [f"({B}, {T:,}, {H}, {width})", name, *forward_and_backward(*form)]
        for name, form in forms.items()
    ]
    flash = found[2]
    return [[*row, row[2] / flash[2], row[3] / flash[3]] for row in found]


def sweep(width: int) -> list[list]:
    """Each kernel alone, over the sizes of tiles, warps and stages."""
    inputs, cu = random_inputs(width)
    inputs = [x.detach() for x in inputs]
    start_T, end_T = (x.int() for x in document_bounds(cu, B * T))
    scale = width**-0.5
    launch = triton_op.launches(inputs[0], inputs[2]).forward
    o, lse = triton_op.attend(*inputs, start_T, scale, launch)
    runs = [
        (kernel, launch, run)
        for launch in SWEEP
        for kernel, run in (
            ("forward", partial(triton_op.attend, *inputs, start_T, scale, launch)),
            (
                "gradients",
                partial(triton_op.gradients, *inputs, o, o, lse, start_T, end_T, scale, launch),
            ),
        )
    ]

    def attempt(run, measure):
        try:
            return measure(run)
        except Exception as error:  # a configuration that does not fit is a result of the sweep
            return type(error).__name__

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda entry: attempt(entry[2], lambda run: run()), runs))
    torch.cuda.synchronize()
    return [
        [width, kernel, launch.own, launch.others, launch.warps, launch.stages,
         attempt(run, partial(time_ms, repeats=6))]
        for kernel, launch, run in runs
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    wanted = parser.parse_args()
    print(versions())
    if wanted.sweep:
        for width in WIDTHS:
            found = sweep(width)
            found.sort(key=lambda row: (row[:2], row[-1] if isinstance(row[-1], float) else 1e9))
            heads = ("width", "kernel", "own", "others", "warps", "stages", "ms")
            print(table(heads, found), flush=True)
        return
    heads = ("B, T, H, width", "form", "forward ms", "forward + backward ms", "extra MiB")
    heads += ("forward over FA2", "both over FA2")
    for width in WIDTHS:
        print(table(heads, compare(width)), flush=True)


if __name__ == "__main__":
    main()
