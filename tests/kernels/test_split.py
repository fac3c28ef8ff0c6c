"""Parts of a tensor, whose gradients come side by side: as torch's split, wherever they lie."""

import gc
import weakref

import torch

from mixtron.kernels.split import place_of, split, viewed


class _Double(torch.autograd.Function):
    """2 x, whose gradient is written where it belongs."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return 2 * x

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return torch.mul(dy, 2, out=ctx.place()), None


def test_gradients_are_those_of_torchs_split():
    weights = torch.randn(3, 2, 9)
    x = torch.randn(3, 2, 9, requires_grad=True)
    for asking in (0, 1, 2):
        first, second, third = split(x, [4, 2, 3])
        assert place_of(first.transpose(0, 1)) is None
        heads, place = viewed(first, lambda part: part.unflatten(-1, (2, 2)))
        done = [2 * heads, 2 * second, 2 * third]
        if asking > 0:
            done[0] = _Double.apply(heads, place)
        if asking > 1:
            done[2] = _Double.apply(third, place_of(third))
        joined = torch.cat([done[0].flatten(-2), done[1], done[2]], dim=-1)
        (gradient,) = torch.autograd.grad((joined * weights).sum(), x)
        assert torch.equal(joined, 2 * x)
        assert torch.equal(gradient, 2 * weights)


def test_what_an_op_wrote_is_not_copied(monkeypatch):
    x = torch.randn(3, 1, 5, requires_grad=True)
    first, second = split(x, [3, 2])
    rows, place = viewed(first, lambda part: part.transpose(0, 1))
    assert place is not None
    loss = _Double.apply(rows, place).sum() + second.sum()
    written, copied, copy = place(), [], torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda x, y: copied.append(tuple(x.shape)) or copy(x, y)
    )
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.data_ptr() == written.data_ptr()
    assert gradient.squeeze(1).tolist() == [[2, 2, 2, 1, 1]] * 3
    assert copied == [(3, 1, 2)]


def test_parts_are_freed_with_their_last_use():
    gc.disable()
    try:
        first, _ = split(torch.randn(3, 5, requires_grad=True), [3, 2])
        found = weakref.ref(first)
        del first, _
        assert found() is None
    finally:
        gc.enable()
