"""The chunked loss against the definition; Triton's form is in test_fused_triton.py."""

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from tests.helpers.numerics import assert_close_calibrated

T, D, V, USED = 37, 8, 20, 17


def make_inputs(dtype=torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((T, D), (V, D))
    ]
    return tensors, torch.randint(0, USED, (T,), generator=generator)


SHARE_T = torch.randn(T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def reference(hidden_TD, weight_VD, label_T):
    loss_T = linear_cross_entropy_reference(hidden_TD, weight_VD, label_T, used=USED)
    return (loss_T * SHARE_T.to(loss_T.dtype)).sum()


def results(loss, inputs):
    return [loss.detach(), *torch.autograd.grad(0.7 * loss, inputs)]


@pytest.mark.parametrize("chunk_tokens", [1, 16, 37, 128, None])
def test_equals_the_definition(chunk_tokens):
    inputs, label_T = make_inputs()
    options = {"used": USED, "chunk_tokens": chunk_tokens}
    found = linear_cross_entropy(*inputs, label_T, SHARE_T, **options)
    exact = reference(*inputs, label_T)
    for x, y in zip(results(found, inputs), results(exact, inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_the_reference_is_torchs_loss():
    inputs, label_T = make_inputs()
    logits_TV = inputs[0] @ inputs[1][:USED].t()
    found = linear_cross_entropy_reference(*inputs, label_T, used=USED)
    torch.testing.assert_close(found, F.cross_entropy(logits_TV, label_T, reduction="none"))


def test_bf16_is_calibrated():
    inputs, label_T = make_inputs(torch.bfloat16)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    found = linear_cross_entropy(*inputs, label_T, SHARE_T, used=USED, chunk_tokens=16)
    exact, low = reference(*exact_inputs, label_T), reference(*inputs, label_T)
    for x, precise, rounded in zip(
        results(found, inputs), results(exact, exact_inputs), results(low, inputs), strict=True
    ):
        assert_close_calibrated(x, precise, rounded)


def test_slices_of_the_vocabulary_join():
    """Two slices of 10 entries, the second with padding, are the whole; dh is the slices' sum."""
    inputs, label_T = make_inputs()
    hidden_TD, weight_VD = inputs
    whole = results(linear_cross_entropy(*inputs, label_T, SHARE_T, used=USED), inputs)
    slices = [(weight_VD[:10], label_T, 10), (weight_VD[10:], label_T - 10, USED - 10)]
    said = []

    def say(lse_T, label_logit_T):
        said.append((lse_T, label_logit_T))
        return lse_T, label_logit_T

    def join(lse_T, label_logit_T):
        lses, logits = zip(*said, strict=True)
        return torch.stack(lses).logsumexp(0), sum(logits)

    for weight, label, used in slices:
        linear_cross_entropy(hidden_TD, weight, label, SHARE_T, used=used, combine=say)
    losses = [
        linear_cross_entropy(hidden_TD, weight, label, SHARE_T, used=used, combine=join)
        for weight, label, used in slices
    ]
    for loss in losses:
        torch.testing.assert_close(loss.detach(), whole[0])
    dhidden, dweight = results(losses[0] + losses[1], inputs)[1:]
    torch.testing.assert_close(dhidden, whole[1])
    torch.testing.assert_close(dweight, whole[2])


def test_gradients_are_kept_and_no_logits():
    inputs, label_T = make_inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        linear_cross_entropy(*inputs, label_T, SHARE_T, used=USED)
        assert sorted(x.numel() for x in kept) == sorted([T * D, V * D])
        with torch.no_grad():
            linear_cross_entropy(*inputs, label_T, SHARE_T, used=USED)
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("hidden", "label", "used"), [((T, D + 1), T, USED), ((T, D), T + 1, USED), ((T, D), T, V + 1)]
)
def test_shapes_that_do_not_fit(hidden, label, used):
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(
            torch.zeros(hidden),
            torch.zeros(V, D),
            torch.zeros(label, dtype=torch.int64),
            SHARE_T,
            used=used,
        )
