"""Strictly causal attention with its log-sum-exp, block by block of queries, on any device.

Memory is linear in T: the scores of one block of queries exist at a time. E is the width of
queries and keys; shapes and meaning are those of `flash.py`, which does the same on GPUs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 128
"""Queries whose scores exist at once."""


def forward(
    q_THE: Tensor, k_THE: Tensor, v_THV: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Each token attends those before it in its document, not itself.

    Returns:
        o [T, H, V] and log-sum-exp z [T, H], fp32 (fp64 for fp64 inputs). Where nothing comes
        before: o = 0, z = -inf.
    """
    q_HTE, k_HTE, v_HTV = _heads_first(q_THE, k_THE, v_THV)
    o_HTV = torch.zeros_like(v_HTV)
    z_HT = torch.full_like(v_HTV[..., 0], float("-inf"))
    for rows, keys in _blocks(lengths):
        logits_HTS = _logits(q_HTE, k_HTE, rows, keys, scale)
        z_HT[:, rows] = logits_HTS.logsumexp(-1)
        weights_HTS = (logits_HTS - z_HT[:, rows, None]).exp()
        o_HTV[:, rows] = weights_HTS @ v_HTV[:, keys]
    return o_HTV.transpose(0, 1), z_HT.t()


def backward(
    do_THV: Tensor,
    q_THE: Tensor,
    k_THE: Tensor,
    v_THV: Tensor,
    delta_TH: Tensor,
    z_TH: Tensor,
    lengths: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v where the weights are exp(scores - z) and delta = <do, output>.

    z and delta may be those of a softmax over more than these scores.
    """
    do_HTV, q_HTE, k_HTE, v_HTV = _heads_first(do_THV, q_THE, k_THE, v_THV)
    delta_HT1, z_HT1 = delta_TH.t()[..., None], z_TH.t()[..., None]
    dq_HTE, dk_HTE, dv_HTV = (torch.zeros_like(x) for x in (q_HTE, k_HTE, v_HTV))
    for rows, keys in _blocks(lengths):
        logits_HTS = _logits(q_HTE, k_HTE, rows, keys, scale)
        weights_HTS = (logits_HTS - z_HT1[:, rows]).exp()
        dweights_HTS = do_HTV[:, rows] @ v_HTV[:, keys].mT
        dlogits_HTS = scale * weights_HTS * (dweights_HTS - delta_HT1[:, rows])
        dq_HTE[:, rows] = dlogits_HTS @ k_HTE[:, keys]
        dk_HTE[:, keys] += dlogits_HTS.mT @ q_HTE[:, rows]
        dv_HTV[:, keys] += weights_HTS.mT @ do_HTV[:, rows]
    dq, dk, dv = (x.transpose(0, 1) for x in (dq_HTE, dk_HTE, dv_HTV))
    return dq, dk, dv


def _heads_first(*inputs: Tensor) -> list[Tensor]:
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    return [x.to(dtype).transpose(0, 1).contiguous() for x in inputs]


def _blocks(lengths: list[int]) -> Iterator[tuple[slice, slice]]:
    """Queries of one document, and the tokens that some of them attend."""
    first = 0
    for length in lengths:
        end = first + length
        for start in range(first + 1, end, BLOCK):
            stop = min(start + BLOCK, end)
            yield slice(start, stop), slice(first, stop - 1)
        first = end


def _logits(q_HTE: Tensor, k_HTE: Tensor, rows: slice, keys: slice, scale: float) -> Tensor:
    """Scores of a block, -inf from the query's own token on."""
    query_T = torch.arange(rows.start, rows.stop, device=q_HTE.device)
    key_S = torch.arange(keys.start, keys.stop, device=q_HTE.device)
    logits_HTS = scale * (q_HTE[:, rows] @ k_HTE[:, keys].mT)
    return logits_HTS.masked_fill(key_S >= query_T[:, None], float("-inf"))
