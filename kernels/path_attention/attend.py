"""Attention from a block of queries at a time to all keys before it, and its gradient by hand.

Between blocks a key is carried by its block's maps, as the decode step carries its cache. Whatever
is held at once is linear in T: the carried keys, and one block's rows of logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.path_attention.blocks import (
    KeyBlocks,
    QueryBlocks,
    carries_to_end,
    sums_behind,
)


@dataclass
class Layout:
    """Where queries and keys lie. Key blocks are `past` earlier ones, then the queries' own."""

    past: int
    """Blocks of past keys: carried to the left edge of the first query block; their maps are I."""
    lags: int
    """A query block attends at most this many key blocks before its own."""
    document_S: Tensor
    """[S] of every key's document."""
    block_length: int

    def before(self, n: int) -> tuple[int, int]:
        """The key blocks that query block n attends, its own left out."""
        last = self.past + n
        return max(0, last - self.lags), last

    def unseen(self, n: int) -> Tensor:
        """[(last + 1 - first) C, 1] bool: of the keys of those blocks, and of its own, which lie in
        documents before query block n. They are selected away, not weighed with 0: they may be inf.
        """
        first, last = self.before(n)
        document_S = self.document_S[first * self.block_length : (last + 1) * self.block_length]
        return (document_S < document_S[-self.block_length])[:, None]


@dataclass
class Gradients:
    """Of what `attend` reads; None where the input is."""

    q_BGRNCK: Tensor
    k_BGNCK: Tensor
    v_BGSV: Tensor
    logits_BGRNCC: Tensor
    map_BGNKK: Tensor | None
    gate_until_BGRNC: Tensor | None
    gate_after_BGRNC: Tensor | None
    gate_total_BGRN: Tensor | None


def attend(
    queries: QueryBlocks, keys: KeyBlocks, v_BGSV: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Output [B, G, R, N, C, V] and log-sum-exp [B, G, R, N, C] of every query.

    Args:
        keys: of the past blocks and of the queries' own, M in all, S = M C.
    """
    C = layout.block_length
    k_BGSK = keys.k_BGNCK.flatten(2, 3).clone()
    gate_BGRS = None
    if keys.gate_after_BGRNC is not None:
        gate_BGRS = keys.gate_after_BGRNC.flatten(3).clone()
    outputs, sums = [], []
    for n in range(queries.q_BGRNCK.shape[3]):
        first, last = layout.before(n)
        seen, both = slice(first * C, last * C), slice(first * C, (last + 1) * C)
        logits_BGRCS = _logits(
            queries, n, k_BGSK[:, :, seen], _part(gate_BGRS, seen), layout.document_S, seen
        )
        lse_BGRC1 = logits_BGRCS.logsumexp(-1, keepdim=True)
        weights_BGRCS = (logits_BGRCS - lse_BGRC1).exp_()
        known_v_BGSV = v_BGSV[:, :, both].masked_fill(layout.unseen(n), 0)
        outputs.append(_over_group(weights_BGRCS, known_v_BGSV))
        sums.append(lse_BGRC1.squeeze(-1))
        if keys.map_BGNKK is not None:
            # A key that no later query attends needs no carrying.
            k_BGSK[:, :, seen] = k_BGSK[:, :, seen] @ keys.map_BGNKK[:, :, last].mT
        if gate_BGRS is not None:
            assert keys.gate_total_BGRN is not None
            gate_BGRS[..., seen] += keys.gate_total_BGRN[..., last, None]
    return torch.stack(outputs, dim=3), torch.stack(sums, dim=3)


def attend_backward(
    queries: QueryBlocks,
    keys: KeyBlocks,
    v_BGSV: Tensor,
    layout: Layout,
    lse_BGRNC: Tensor,
    do_BGRNCV: Tensor,
    dlse_BGRNC: Tensor,
) -> Gradients:
    """The gradients of `attend`, from the last query block to the first (README.md).

    The carried keys of a block are computed anew from the maps: these may be singular, so that
    carrying cannot be undone, and keeping every step would take T^2 / C memory.
    """
    C, N = layout.block_length, queries.q_BGRNCK.shape[3]
    found = _zeros(queries, keys, v_BGSV)
    # Of the maps that carry each key block to the left edge of the query block above.
    dcarry_BGNKK = None if found.map_BGNKK is None else torch.zeros_like(found.map_BGNKK)
    for n in reversed(range(N)):
        first, last = layout.before(n)
        seen, both = slice(first * C, last * C), slice(first * C, (last + 1) * C)
        unseen_S1 = layout.unseen(n)
        unseen_NC1 = unseen_S1[:-C].unflatten(0, (-1, C))
        carry_BGNKK = _carries(keys, layout, n)
        if carry_BGNKK is not None:
            carry_BGNKK = carry_BGNKK.masked_fill(unseen_NC1[:, -1:], 0)
        k_BGNCK = keys.k_BGNCK[:, :, first:last].masked_fill(unseen_NC1, 0)
        k_BGSK = _carried(k_BGNCK, carry_BGNKK)
        logits_BGRCS = _logits(
            queries, n, k_BGSK, _carried_gates(keys, layout, n), layout.document_S, seen
        )
        weights_BGRCS = logits_BGRCS.sub_(lse_BGRNC[..., n, :, None]).exp_()
        do_BGRCV = do_BGRNCV[..., n, :, :]
        known_v_BGSV = v_BGSV[:, :, both].masked_fill(unseen_S1, 0)
        dlogits_BGRCS = _over_group(do_BGRCV, known_v_BGSV.mT)
        found.v_BGSV[:, :, both] += weights_BGRCS.flatten(2, 3).mT @ do_BGRCV.flatten(2, 3)
        delta_BGRC1 = (weights_BGRCS * dlogits_BGRCS).sum(-1, keepdim=True)
        delta_BGRC1 -= dlse_BGRNC[..., n, :, None]
        dlogits_BGRCS = dlogits_BGRCS.sub_(delta_BGRC1).mul_(weights_BGRCS)
        found.logits_BGRNCC[..., n, :, :] = dlogits_BGRCS[..., -C:]
        doff_BGRCS = dlogits_BGRCS[..., :-C]
        found.q_BGRNCK[..., n, :, :] = _over_group(doff_BGRCS, k_BGSK)
        dk_BGSK = doff_BGRCS.flatten(2, 3).mT @ queries.q_BGRNCK[..., n, :, :].flatten(2, 3)
        dk_BGNCK = dk_BGSK.unflatten(2, (-1, C))
        if carry_BGNKK is None:
            found.k_BGNCK[:, :, first:last] += dk_BGNCK
        else:
            assert dcarry_BGNKK is not None
            assert found.map_BGNKK is not None
            assert keys.map_BGNKK is not None
            found.k_BGNCK[:, :, first:last] += dk_BGNCK @ carry_BGNKK
            above_BGNKK = dcarry_BGNKK[:, :, first:last]
            found.map_BGNKK[:, :, last] = (above_BGNKK @ carry_BGNKK.mT).sum(2)
            dcarry_BGNKK[:, :, first:last] = (
                keys.map_BGNKK[:, :, last, None].mT @ above_BGNKK + dk_BGNCK.mT @ k_BGNCK
            )
        if found.gate_after_BGRNC is not None:
            assert found.gate_until_BGRNC is not None
            assert found.gate_total_BGRN is not None
            after_BGRNC = found.gate_after_BGRNC[..., first:last, :]
            found.gate_total_BGRN[..., last] = after_BGRNC.sum((-1, -2))
            after_BGRNC += doff_BGRCS.sum(-2).unflatten(-1, (-1, C))
            found.gate_until_BGRNC[..., n, :] = doff_BGRCS.sum(-1)
    return found


def _logits(
    queries: QueryBlocks,
    n: int,
    k_BGSK: Tensor,
    gate_BGRS: Tensor | None,
    document_S: Tensor,
    seen: slice,
) -> Tensor:
    """[B, G, R, C, seen + C] of query block n: the keys seen before it, then its own."""
    C = queries.q_BGRNCK.shape[-2]
    logits_BGRCS = _over_group(queries.q_BGRNCK[..., n, :, :], k_BGSK.mT)
    if gate_BGRS is not None:
        assert queries.gate_until_BGRNC is not None
        logits_BGRCS += queries.gate_until_BGRNC[..., n, :, None] + gate_BGRS[..., None, :]
    logits_BGRCS = torch.cat([logits_BGRCS, queries.logits_BGRNCC[..., n, :, :]], dim=-1)
    key_document_S = document_S[seen.start : seen.stop + C]
    allowed_CS = document_S[seen.stop : seen.stop + C, None] == key_document_S
    return logits_BGRCS.masked_fill_(~allowed_CS.tril(seen.stop - seen.start), float("-inf"))


def _carries(keys: KeyBlocks, layout: Layout, n: int) -> Tensor | None:
    """[B, G, last - first, K, K]: what carries each key block to query block n's left edge."""
    if keys.map_BGNKK is None:
        return None
    first, last = layout.before(n)
    # A key block's own map is behind its keys already. All past blocks are carried by one product.
    start = max(first, layout.past - 1)
    carry_BGNKK = carries_to_end(keys.map_BGNKK[:, :, start + 1 : last])[:, :, : last - start]
    earlier = start - first
    return torch.cat([carry_BGNKK[:, :, :1].expand(-1, -1, earlier, -1, -1), carry_BGNKK], dim=2)


def _carried(k_BGNCK: Tensor, carry_BGNKK: Tensor | None) -> Tensor:
    k_BGNCK = k_BGNCK if carry_BGNKK is None else k_BGNCK @ carry_BGNKK.mT
    return k_BGNCK.flatten(2, 3)


def _carried_gates(keys: KeyBlocks, layout: Layout, n: int) -> Tensor | None:
    """[B, G, R, seen]: sums of the gates behind each key, to query block n's left edge."""
    if keys.gate_after_BGRNC is None:
        return None
    assert keys.gate_total_BGRN is not None
    first, last = layout.before(n)
    total_BGRN = keys.gate_total_BGRN[..., first:last]
    between_BGRN = sums_behind(total_BGRN)
    return (keys.gate_after_BGRNC[..., first:last, :] + between_BGRN[..., None]).flatten(3)


def _over_group(x_BGRCE: Tensor, y_BGEF: Tensor) -> Tensor:
    """[B, G, R, C, F]: one product for all query heads that share a key/value head."""
    return (x_BGRCE.flatten(2, 3) @ y_BGEF).unflatten(2, x_BGRCE.shape[2:4])


def _part(gate_BGRS: Tensor | None, seen: slice) -> Tensor | None:
    return None if gate_BGRS is None else gate_BGRS[..., seen]


def _zeros(queries: QueryBlocks, keys: KeyBlocks, v_BGSV: Tensor) -> Gradients:
    def like(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.zeros_like(x)

    return Gradients(
        torch.zeros_like(queries.q_BGRNCK),
        torch.zeros_like(keys.k_BGNCK),
        torch.zeros_like(v_BGSV),
        torch.zeros_like(queries.logits_BGRNCC),
        like(keys.map_BGNKK),
        like(queries.gate_until_BGRNC),
        like(keys.gate_after_BGRNC),
        like(keys.gate_total_BGRN),
    )
