"""Products with weights under sequence parallelism, beside what the ranks send each other.

Between such products a rank holds some rows of the sequence. Before a column-parallel weight all
rows are gathered; behind a row-parallel one what the ranks found is added up, and scattered. A
rank's own rows need not arrive: they are multiplied first. What is scattered is multiplied part by
part, and each part is sent while the next is multiplied. Backward likewise.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mixtron.kernels.factor import weight_gradient

PART_TOKENS = 8192
"""Of each rank, which are multiplied before they are sent."""


def gathered_product(
    x_TBD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, group: Any, *, adds: bool
) -> Tensor:
    """The product with a column-parallel weight, [T ranks, B, N], of the T tokens of every rank.

    Args:
        adds: the weight's gradient is added to its `main_grad`, see `weight_gradient`.
    """
    return _Gathered.apply(x_TBD, weight_ND, bias_N, group, adds)  # type: ignore[return-value]


def scattered_product(x_TBK: Tensor, weight_DK: Tensor, group: Any, *, adds: bool) -> Tensor:
    """The product with a row-parallel weight, summed over ranks: a rank's part, [T / ranks, B, D].

    Args:
        x_TBK: all tokens, a multiple of the ranks.
        adds: the weight's gradient is added to its `main_grad`, see `weight_gradient`.
    """
    return _Scattered.apply(x_TBK, weight_DK, group, adds)  # type: ignore[return-value]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TBD, weight_ND, bias_N, group, adds):
        ctx.save_for_backward(x_TBD, weight_ND)
        ctx.options = group, adds, bias_N is not None
        out, _ = _own_rows_first(x_TBD, weight_ND.t(), group)
        return out if bias_N is None else out.add_(bias_N)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        x_TBD, weight_ND = ctx.saved_tensors
        group, adds, has_bias = ctx.options
        whole, arriving = _gather(x_TBD, group)
        dwhole, dx_TBD = dout.matmul(weight_ND), torch.empty_like(x_TBD)
        arriving.wait()
        sent: Any = dist.reduce_scatter_tensor(dx_TBD, dwhole, group=group, async_op=True)
        dweight = weight_gradient(weight_ND, dout, whole, adds=adds)
        dbias = dout.sum((0, 1)) if has_bias else None
        sent.wait()
        return dx_TBD, dweight, dbias, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TBK, weight_DK, group, adds):
        ctx.save_for_backward(x_TBK, weight_DK)
        ctx.options = group, adds
        ranks, matrix = group.size(), weight_DK.t()
        T, B, K = x_TBK.shape
        x_RTBK = x_TBK.view(ranks, T // ranks, B, K)
        out = x_TBK.new_empty(T // ranks, B, matrix.shape[1])
        parts = zip(x_RTBK.split(PART_TOKENS, dim=1), out.split(PART_TOKENS), strict=True)
        sent = []
        for part_RTBK, mine in parts:
            found = out.new_empty(ranks, *mine.shape)
            for x, of_rank in zip(part_RTBK, found, strict=True):
                torch.mm(x.flatten(0, 1), matrix, out=of_rank.flatten(0, 1))
            rows = found.flatten(0, 1)
            sent.append(dist.reduce_scatter_tensor(mine, rows, group=group, async_op=True))
        for work in sent:
            work.wait()
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        x_TBK, weight_DK = ctx.saved_tensors
        group, adds = ctx.options
        dx_TBK, whole = _own_rows_first(dout.contiguous(), weight_DK, group)
        return dx_TBK, weight_gradient(weight_DK, whole, x_TBK, adds=adds), None, None


def _own_rows_first(x_TBD: Tensor, matrix_DN: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The product of all ranks' tokens, and these."""
    whole, arriving = _gather(x_TBD, group)
    out = x_TBD.new_empty(*whole.shape[:-1], matrix_DN.shape[1])
    rows, found = whole.flatten(0, 1), out.flatten(0, 1)
    count, x = x_TBD.shape[0] * x_TBD.shape[1], x_TBD.flatten(0, 1)
    start = group.rank() * count
    torch.mm(x, matrix_DN, out=found[start : start + count])
    arriving.wait()
    for others in (slice(0, start), slice(start + count, None)):
        if len(rows[others]):
            torch.mm(rows[others], matrix_DN, out=found[others])
    return out, whole


def _gather(x_TBD: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Where the tokens of all ranks are once they have arrived, and what waits for that."""
    T, B, D = x_TBD.shape
    whole = x_TBD.new_empty(T * group.size(), B, D)
    return whole, dist.all_gather_into_tensor(whole, x_TBD, group=group, async_op=True)
