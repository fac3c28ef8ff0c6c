"""Times the convolution: `python -m mixtron.kernels.short_convolution.bench [--sweep]`."""

import itertools
import sys
from functools import partial

import torch
from torch import Tensor

from mixtron.kernels.measure import forward_and_backward, table, time_ms, versions
from mixtron.kernels.short_convolution import short_convolution
from mixtron.kernels.short_convolution.triton_op import Launch, convolve, gradients
from mixtron.kernels.triton_tools import Form

TOKENS, CHANNELS, JOINED, WIDTH = 32768, 3072, 4112, 4
"""The convolution of q, k and v, a slice of the fused projection's output."""


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    joined = torch.randn(TOKENS, 1, JOINED, device="cuda", dtype=torch.bfloat16)
    weight_EW = torch.randn(CHANNELS, WIDTH, device="cuda", dtype=torch.bfloat16)
    position_T = torch.arange(4096, device="cuda").repeat(TOKENS // 4096)
    return joined[..., :CHANNELS].requires_grad_(), weight_EW.requires_grad_(), position_T


def compare() -> None:
    x_TBE, weight_EW, position_T = make_inputs()
    rows = []
    forms: tuple[Form, ...] = ("torch", "triton")
    for backend in forms:

        def form(backend: Form = backend):
            return short_convolution(x_TBE, weight_EW, position_T, silu=True, backend=backend)

        rows.append((f"{backend} form", *forward_and_backward(form, (x_TBE, weight_EW))))
    try:
        from fla.modules.convolution import causal_conv1d  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        cu_seqlens = torch.arange(0, TOKENS + 1, 4096, device="cuda")
        x_BTE = x_TBE.detach().transpose(0, 1).contiguous().requires_grad_()

        def peer():
            y = causal_conv1d(x_BTE, weight_EW, activation="silu", cu_seqlens=cu_seqlens)
            return y[0] if isinstance(y, tuple) else y

        rows.append(("fla's causal_conv1d", *forward_and_backward(peer, (x_BTE, weight_EW))))
    print(f"{versions()}; {TOKENS:,} tokens x {CHANNELS} channels, width {WIDTH}, SiLU, bf16\n")
    print(table(("form", "fwd ms", "fwd+bwd ms", "extra MiB"), rows))


def sweep() -> None:
    """Tiles and strips of the kernels, fastest first."""
    x_TBE, weight_EW, position_T = (x.detach() for x in make_inputs())
    dy_TBE = torch.randn((TOKENS, 1, CHANNELS), device="cuda").bfloat16()
    inputs, part = (x_TBE, weight_EW, position_T), ((CHANNELS,), True)
    rows = []
    for block_t, block_e, warps in itertools.product((16, 32), (64, 128), (2, 4)):
        launch = Launch(block_t, block_e, warps)
        run = partial(convolve, *inputs, *part, launch)
        rows.append(("fwd", block_t, block_e, warps, time_ms(run, 2, 5)))
    for block_e, warps in ((64, 1), (128, 1), (256, 1), (256, 2)):
        for strips in (128, 256, 512, 1024):
            launch = Launch(1, block_e, warps)
            run = partial(gradients, *inputs, (dy_TBE,), *part, launch, strips)
            rows.append((f"bwd of {strips} strips", 1, block_e, warps, time_ms(run, 2, 5)))
    rows.sort(key=lambda row: (row[0][:3], row[-1]))
    print(table(("kernel", "tokens", "channels", "warps", "ms"), rows))


if __name__ == "__main__":
    sweep() if "--sweep" in sys.argv else compare()
