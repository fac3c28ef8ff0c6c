"""S-D attention's Triton form on a GPU in bf16 against its fp64 definition on the CPU."""

import pytest
import torch

from mixtron.kernels.sd_attention import sd_attention, sd_attention_reference
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
