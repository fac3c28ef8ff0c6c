"""S-D attention's Triton form on a GPU in bf16 against its fp64 definition on the CPU."""

import pytest
import torch

from mixtron.kernels.sd_attention import (
    sd_attention,
    sd_attention_reference,
    sd_attention_step,
)
from tests.kernels.test_gpu import compare, run
from tests.kernels.test_gpu_windowed_attention import LENGTHS, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (64, 128)])
@pytest.mark.parametrize("lengths", [LENGTHS, [777], [128, 128, 256]], ids=str)
def test_sd_attention_triton(lengths, widths):
    generator = torch.Generator().manual_seed(0)
    tokens, (K, V) = sum(lengths), widths
    inputs = {
        name: torch.randn(tokens, 4, width, generator=generator, dtype=torch.float64).bfloat16()
        for name, width in (("q", K), ("k", K), ("v", V))
    }
    inputs["d"] = (2 * torch.randn(tokens, 4, generator=generator)).exp()
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0), tokens], dtype=torch.int32).cuda()

    def reference(q, k, v, d):
        return sd_attention_reference(q, k, v, d.to(v.dtype), lengths, scale=K**-0.5)

    def kernel(q, k, v, d):
        poison()
        return sd_attention(q, k, v, d, lengths, cu, scale=K**-0.5, backend="triton")

    found = run(kernel, inputs, torch.bfloat16, "cuda", ("d",))
    again = run(kernel, inputs, torch.bfloat16, "cuda", ("d",))
    assert all(torch.equal(found[name], again[name]) for name in found)
    compare(
        found,
        run(reference, inputs, torch.float64, "cpu", ("d",)),
        run(reference, inputs, torch.bfloat16, "cpu", ("d",)),
    )


def test_decode_step():
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 8, 64), (3, 8, 64), (3, 8), (3, 500, 8, 128), (3, 500, 8, 64))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[2] = inputs[2].exp()
    age_BS = torch.tensor([[499], [250], [0]]) - torch.arange(500)

    def step(backend, dtype, device):
        q, k, d, keys, values = (x.bfloat16().to(device, dtype) for x in inputs)
        options = {"scale": 0.125, "backend": backend}
        o = sd_attention_step(q, k, d, keys, values, age_BS.to(device), **options)
        return {"output": o}

    compare(
        step("triton", torch.bfloat16, "cuda"),
        step("blockwise", torch.float64, "cpu"),
        step("blockwise", torch.bfloat16, "cpu"),
    )
