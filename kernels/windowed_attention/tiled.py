"""Windowed attention tile by tile in torch, forward and backward, as a kernel will do it.

Rows are gathered through the plan's indices: there are no permuted copies of q, k and v. Time and
memory are O(T window). Each query is in one tile and each key is in one tile, so gradients are
written once, without atomics, in an order that does not change.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mixtron.kernels.windowed_attention.plan import TileLists, Tiles, WindowPlan

GROUP_SCORES = 1 << 24
"""Scores computed at once, in elements."""


class TiledAttention(torch.autograd.Function):
    """(q, k, v, plan, scale) to o. Keeps its inputs, o and the log-sum-exp [T, H] for backward."""

    @staticmethod
    def forward(ctx, q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, plan: WindowPlan, scale: float):
        dtype = torch.promote_types(q_THK.dtype, torch.float32)
        T, H, _ = q_THK.shape
        G = k_TGK.shape[1]
        # The last row takes what belongs to empty slots.
        o_THV = q_THK.new_zeros(T + 1, H, v_TGV.shape[2])
        lse_TH = q_THK.new_zeros(T + 1, H, dtype=dtype)
        for tile_P, tile_PM, listed_PM in _groups(
            plan.keys_of_queries, H, plan.queries.tile, plan.keys.tile
        ):
            query_row, key_row = _rows(plan.queries, tile_P), _rows(plan.keys, tile_PM)
            allowed_PQS = _allowed(plan, tile_P[:, None], tile_PM) & listed_PM[:, None]
            q, k, v = (
                _by_head(x, row, G, dtype)
                for x, row in ((q_THK, query_row), (k_TGK, key_row), (v_TGV, key_row))
            )
            logits = _masked(scale * q @ k.mT, allowed_PQS)
            lse = logits.logsumexp(-1, keepdim=True)
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # empty slots: no weights, not NaN
            o_THV[query_row] = _by_row((logits - lse).exp() @ v, plan.queries.tile).to(o_THV.dtype)
            lse_TH[query_row] = _by_row(lse, plan.queries.tile).squeeze(-1)
        o_THV, lse_TH = o_THV[:T], lse_TH[:T]
        ctx.save_for_backward(q_THK, k_TGK, v_TGV, o_THV, lse_TH)
        ctx.plan, ctx.scale = plan, scale
        return o_THV

    @staticmethod
    def backward(ctx, *grads):
        (do_THV,) = grads
        q_THK, k_TGK, v_TGV, o_THV, lse_TH = ctx.saved_tensors
        delta_TH = (do_THV.to(lse_TH.dtype) * o_THV).sum(-1)
        queries = (q_THK, do_THV, lse_TH[..., None], delta_TH[..., None])
        dq_THK = _query_gradient(*queries, k_TGK, v_TGV, ctx.plan, ctx.scale)
        dk_TGK, dv_TGV = _key_gradients(*queries, k_TGK, v_TGV, ctx.plan, ctx.scale)
        return dq_THK, dk_TGK, dv_TGV, None, None


def _query_gradient(
    q_THK, do_THV, lse_TH1, delta_TH1, k_TGK, v_TGV, plan: WindowPlan, scale: float
) -> Tensor:
    """ds = p (do . v - delta), dq = scale ds k."""
    dtype, (T, H, K), G = lse_TH1.dtype, q_THK.shape, k_TGK.shape[1]
    dq_THK = q_THK.new_zeros(T + 1, H, K)
    for tile_P, tile_PM, listed_PM in _groups(
        plan.keys_of_queries, H, plan.queries.tile, plan.keys.tile
    ):
        query_row, key_row = _rows(plan.queries, tile_P), _rows(plan.keys, tile_PM)
        allowed_PQS = _allowed(plan, tile_P[:, None], tile_PM) & listed_PM[:, None]
        q, do, lse, delta = (
            _by_head(x, query_row, G, dtype) for x in (q_THK, do_THV, lse_TH1, delta_TH1)
        )
        k, v = (_by_head(x, key_row, G, dtype) for x in (k_TGK, v_TGV))
        weights = (_masked(scale * q @ k.mT, allowed_PQS) - lse).exp()
        ds = weights * (do @ v.mT - delta)
        dq_THK[query_row] = _by_row(scale * ds @ k, plan.queries.tile).to(dq_THK.dtype)
    return dq_THK[:T]


def _key_gradients(
    q_THK, do_THV, lse_TH1, delta_TH1, k_TGK, v_TGV, plan: WindowPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """dv = p^T do and dk = scale ds^T q, summed over the heads that share k and v."""
    dtype, H, (S, G, K) = lse_TH1.dtype, q_THK.shape[1], k_TGK.shape
    dk_TGK, dv_TGV = k_TGK.new_zeros(S + 1, G, K), v_TGV.new_zeros(S + 1, G, v_TGV.shape[2])
    for tile_P, tile_PM, listed_PM in _groups(
        plan.queries_of_keys, H, plan.keys.tile, plan.queries.tile
    ):
        key_row, query_row = _rows(plan.keys, tile_P), _rows(plan.queries, tile_PM)
        allowed_PQS = _allowed(plan, tile_PM, tile_P[:, None]) & listed_PM[:, :, None]
        q, do, lse, delta = (
            _by_head(x, query_row, G, dtype) for x in (q_THK, do_THV, lse_TH1, delta_TH1)
        )
        k, v = (_by_head(x, key_row, G, dtype) for x in (k_TGK, v_TGV))
        weights = (_masked(scale * q @ k.mT, allowed_PQS) - lse).exp()
        ds = weights * (do @ v.mT - delta)
        dk_TGK[key_row] = _by_row(scale * ds.mT @ q, plan.keys.tile).to(dk_TGK.dtype)
        dv_TGV[key_row] = _by_row(weights.mT @ do, plan.keys.tile).to(dv_TGV.dtype)
    return dk_TGK[:S], dv_TGV[:S]


def _groups(
    lists: TileLists, heads: int, own_tile: int, other_tile: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """P tiles at a time with the lists of M tiles that they meet, and which entries count.

    [P], [P, M] and [P, M C] bool, C slots in each of the others' tiles. On a CPU tiles with lists
    of about one length go together, and nothing beyond is computed; on a GPU reading the lengths
    would wait for the device, so all of the fixed-size lists is computed, and masked.
    """
    count_N, most = lists.count_N, lists.tiles_NM.shape[1]
    on_cpu = count_N.device.type == "cpu"
    tile_N = count_N.argsort(descending=True, stable=True)
    counts = count_N[tile_N].tolist() if on_cpu else [most] * len(tile_N)
    first = 0
    while first < len(counts) and counts[first] > 0:
        width = counts[first]
        last = first + max(1, GROUP_SCORES // (heads * own_tile * other_tile * width))
        tile_P = tile_N[first:last]
        entry_M = torch.arange(width, device=count_N.device)
        listed_PM = (entry_M < count_N[tile_P][:, None]).repeat_interleave(other_tile, dim=1)
        yield tile_P, lists.tiles_NM[tile_P, :width].long(), listed_PM
        first = last


def _rows(tiles: Tiles, tile: Tensor) -> Tensor:
    """[P] or [P, M] tiles to [P, C] or [P, M C] rows."""
    return tiles.row_NC[tile].flatten(1).long()


def _allowed(plan: WindowPlan, query_tile_PM: Tensor, key_tile_PM: Tensor) -> Tensor:
    """[P, Q, S] bool: which of the queries in Q attends which of the keys in S."""
    queries, keys = plan.queries, plan.keys
    slot_PQ1, token_PQ1, start_PQ1 = (
        x[query_tile_PM].flatten(1)[:, :, None]
        for x in (queries.slot_NC, queries.token_NC, queries.start_NC)
    )
    slot_P1S, token_P1S = (
        x[key_tile_PM].flatten(1)[:, None] for x in (keys.slot_NC, keys.token_NC)
    )
    distance_PQS = slot_P1S - slot_PQ1
    return (
        (distance_PQS >= -plan.before)
        & (distance_PQS <= plan.after)
        & (token_P1S <= token_PQ1)
        & (token_P1S >= start_PQ1)
    )


def _masked(logits: Tensor, allowed_PQS: Tensor) -> Tensor:
    """[P, G, R Q, S]: the R heads that share k and v lie beside each other, Q rows each."""
    Q = allowed_PQS.shape[1]
    logits_PGRQS = logits.unflatten(2, (-1, Q))
    return logits_PGRQS.masked_fill(~allowed_PQS[:, None, None], -torch.inf).flatten(2, 3)


def _by_head(x_THX: Tensor, row_PQ: Tensor, G: int, dtype: torch.dtype) -> Tensor:
    """Gathers rows: [T, H, X] to [P, G, R Q, X], R heads to each of the G."""
    # An empty slot's row is one beyond the last; what is read in its stead is masked.
    x_PQHX = x_THX[row_PQ.clamp(max=len(x_THX) - 1)].to(dtype)
    return x_PQHX.unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_row(y_PGQX: Tensor, Q: int) -> Tensor:
    """Back: [P, G, R Q, X] to [P, Q, H, X]."""
    return y_PGQX.unflatten(2, (-1, Q)).permute(0, 3, 1, 2, 4).flatten(2, 3)
