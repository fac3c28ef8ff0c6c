"""Ways for a mixer to work on a sequence that is split over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Sends block i of dimension 0 to rank i; its own transpose, so backward is the same."""

    @staticmethod
    def forward(ctx, blocks, group):
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _AllToAll.apply(grad, ctx.group), None


def sequence_to_heads(x_THK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T/cp, H, K] of this rank's tokens to [T, H/cp, K] of this rank's heads."""
    size = group.size()
    tokens, heads, dim = x_THK.shape
    blocks = x_THK.view(tokens, size, heads // size, dim).transpose(0, 1).contiguous()
    return _AllToAll.apply(blocks, group).reshape(size * tokens, heads // size, dim)  # type: ignore[union-attr]


def heads_to_sequence(x_THK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H/cp, K] of this rank's heads back to [T/cp, H, K] of this rank's tokens."""
    size = group.size()
    total, heads, dim = x_THK.shape
    blocks = _AllToAll.apply(x_THK.reshape(size, total // size, heads, dim), group)
    return blocks.transpose(0, 1).reshape(total // size, size * heads, dim)  # type: ignore[union-attr]
