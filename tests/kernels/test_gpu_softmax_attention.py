"""Softmax attention's forms on a GPU in bf16 against the definition in fp64."""

import pytest
import torch

from mixtron.kernels.softmax_attention import softmax_attention, softmax_attention_reference
from tests.helpers.numerics import assert_close_calibrated

pytestmark = pytest.mark.gpu
H, G, K = 4, 2, 128
LENGTHS = {"packed": [1, 130, 63, 1, 205, 120], "rows": [256, 256], "one": [515]}


def results(lengths, form, dtype, device):
    """The output and every gradient of sum(output * fixed noise); k and v lie in wider rows."""
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(sum(lengths), (H + 2 * G) * K, generator=generator).bfloat16()
    joined = joined.to(device, dtype).requires_grad_()
    q_THK, k_TGK, v_TGK = (
        part.unflatten(-1, (-1, K)) for part in joined.split([H * K, G * K, G * K], dim=-1)
    )
    o_THK = form(q_THK, k_TGK, v_TGK)
    noise = torch.randn(o_THK.shape, generator=generator).to(o_THK)
    [gradient] = torch.autograd.grad((o_THK * noise).sum(), [joined])
    return {"o": o_THK.detach().cpu(), "gradient": gradient.cpu()}


@pytest.mark.parametrize("backend", ["torch", "cudnn", "triton"])
@pytest.mark.parametrize("name", LENGTHS)
def test_bf16_is_calibrated(backend, name):
    """cu_seqlens is padded as a batch pads it."""
    lengths = LENGTHS[name]
    ends = torch.tensor([0, *lengths, *[0] * (64 - len(lengths))]).cumsum(0).int().cuda()

    def form(q, k, v):
        return softmax_attention(q, k, v, lengths, ends, scale=K**-0.5, backend=backend)

    def reference(q, k, v):
        return softmax_attention_reference(q, k, v, lengths, scale=K**-0.5)

    found = results(lengths, form, torch.bfloat16, "cuda")
    exact = results(lengths, reference, torch.float64, "cpu")
    rounded = results(lengths, reference, torch.bfloat16, "cpu")
    for part in exact:
        assert_close_calibrated(found[part], exact[part], rounded[part], part)
