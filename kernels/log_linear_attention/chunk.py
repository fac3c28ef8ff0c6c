"""Log-linear attention in torch, by a tree of chunk states. The derivation is in README.md.

E is 1 for the gated linear base, whose transitions are numbers, and K for the gated delta rule. L
counts the levels and S = L the nodes of a state.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixtron.kernels.log_linear_attention.fenwick import (
    Chunks,
    bits,
    chunk_tokens,
    level_masks,
    node_of,
    node_start,
    slice_chunks,
)
from mixtron.kernels.recurrence import (
    apply_diagonal,
    apply_matrix,
    compose_chunks,
    decay_between,
    scan_chunks,
    to_value_heads,
)

CHUNK_LENGTH = 64
SEGMENT_CHUNKS = 512
"""Chunks (over batch and heads) whose intermediates exist at once; it bounds the memory."""

Nodes = list[tuple[int, np.ndarray]]
"""Nodes of a position: the bit, and [C] bool, which slots of a chunk lie in it."""


def log_linear_attention_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    lambda_BTJL: Tensor,
    *,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    initial_states_BSJKV: Tensor | None = None,
    initial_position: int = 0,
    chunk_length: int = CHUNK_LENGTH,
) -> Tensor:
    """Arguments and result of `log_linear_attention`, by matrix products; O(T log T).

    The arithmetic is fp64 for fp64 inputs, else fp32. Backward keeps the inputs and the states
    before each segment of chunks, and computes a segment again when it needs it. Never waits for
    the device.
    """
    B, T, _, K = q_BTHK.shape
    J = v_BTJV.shape[2]
    states_BSJKV = initial_states_BSJKV
    if scale is None:
        scale = 1 / math.sqrt(K)
    chunks = chunk_tokens(lengths or [T], initial_position, chunk_length)
    inputs = (q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, beta_BTJ, lambda_BTJL)
    outputs = []
    for segment in _pieces(chunks, 0, len(chunks.index), B * J):
        own = _part(inputs, segment.tokens)
        o_BTJV, states_BSJKV = _recomputed(_segment, *own, states_BSJKV, segment, scale)
        outputs.append(o_BTJV)
    return torch.cat(outputs, dim=1)


def log_linear_segment_map(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    *,
    levels: int,
    lengths: Sequence[int] | None = None,
    initial_position: int = 0,
    chunk_length: int = CHUNK_LENGTH,
) -> tuple[Tensor, Tensor]:
    """What the last document's tokens here do to the states before them.

    Arguments as for `log_linear_attention`.
    Returns:
        transition [B, J, 1, 1] or [B, J, K, K], which every earlier node passes; and the states
        [B, S, J, K, V] of the nodes after the last token, of these tokens alone. Both fp32 (fp64
        for fp64 inputs). `continue_states` puts them behind earlier ones.
    """
    B, T, _, K = k_BTHK.shape
    J, V = v_BTJV.shape[2:]
    dtype = torch.promote_types(k_BTHK.dtype, torch.float32)
    lengths = lengths or [T]
    position = initial_position if len(lengths) == 1 else 0
    chunks = chunk_tokens(lengths[-1:], position, chunk_length)
    inputs = _part((k_BTHK, v_BTJV, log_decay_BTJ, beta_BTJ), slice(T - lengths[-1], T))
    states: dict[int, Tensor] = {}
    apply = _apply(beta_BTJ)
    total = None
    for part, nodes in _nodes(chunks, position + lengths[-1], B * J):
        own = _part(inputs, part.tokens)
        transition_BJKE, writes_MBJKV = _recomputed(_node_map, *own, part, nodes)
        total = transition_BJKE if total is None else apply(transition_BJKE, total)
        states = {b: apply(transition_BJKE, state) for b, state in states.items()}
        for (b, _), write_BJKV in zip(nodes, writes_MBJKV, strict=True):
            states[b] = states[b] + write_BJKV if b in states else write_BJKV
    assert total is not None
    empty_BJKV = torch.zeros(B, J, K, V, dtype=dtype, device=k_BTHK.device)
    return total, torch.stack([states.get(b, empty_BJKV) for b in range(levels)], dim=1)


def continue_states(
    states_BSJKV: Tensor, position: int, tokens: int, segment_map: tuple[Tensor, Tensor]
) -> Tensor:
    """The states [B, S, J, K, V] after a segment of one document's `tokens` from `position`, given
    those before it."""
    transition_BJKE, own_BSJKV = segment_map
    apply = apply_diagonal if transition_BJKE.shape[-1] == 1 else apply_matrix
    merged = list(own_BSJKV.unbind(1))
    for b in bits(position):
        later = node_of(node_start(position, b), position + tokens)
        merged[later] = merged[later] + apply(transition_BJKE, states_BSJKV[:, b])
    return torch.stack(merged, dim=1)


def _recomputed(function, *arguments) -> Any:
    """Keeps the arguments alone, and computes the rest again in backward."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _part(inputs: Sequence[Tensor | None], tokens: slice) -> list[Tensor | None]:
    return [None if x is None else x[:, tokens] for x in inputs]


def _apply(beta: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """How transitions act: numbers, or matrices where the delta rule erases."""
    return apply_diagonal if beta is None else apply_matrix


def _on(device: torch.device, x: np.ndarray) -> Tensor:
    """On the device without waiting for it."""
    return torch.tensor(x).to(device, non_blocking=True)


def _chunked(x_BTJX: Tensor, chunks: Chunks, value_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, T, heads, X] to [B, J, N, C, X]; empty slots hold zeros: no write, no decay."""
    x_BTJX = x_BTJX.index_select(1, _on(x_BTJX.device, chunks.token_of_slot)).to(dtype)
    empty_T11 = _on(x_BTJX.device, ~chunks.filled)[:, None, None]
    x_BTJX = to_value_heads(x_BTJX.masked_fill(empty_T11, 0), value_heads)
    return x_BTJX.unflatten(1, (len(chunks.index), -1)).permute(0, 3, 1, 2, 4).contiguous()


def _chunk_maps(
    q: Tensor | None, k: Tensor, log_decay: Tensor, beta: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Each chunk as a linear map of its values v and the state S before it.

    Args: chunked, [B, J, N, C, X].
    Returns:
        scores [B, J, N, C, C] and read [B, J, N, C, K]: o = scores v + read S with every lambda 1
        (None without q); absorb [B, J, N, K, C] and transition [B, J, N, E, E]: the state after
        the chunk is absorb v + transition S.
    """
    between = decay_between(log_decay).squeeze(-3)
    from_start = log_decay.cumsum(-2).exp()
    absorb = (between[..., -1:, :].mT * k).mT
    transition = from_start[..., -1:, :]
    solved = erased = None
    if beta is not None:
        solved = torch.linalg.solve_triangular(
            (beta * between * (k @ k.mT)).tril(-1),
            torch.diag_embed(beta.squeeze(-1)),
            upper=False,
            unitriangular=True,
        )
        erased = from_start * k
        absorb = absorb @ solved
        identity_KK = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        transition = transition * identity_KK - absorb @ erased
    if q is None:
        return None, None, absorb, transition
    scores, read = between * (q @ k.mT), from_start * q
    if solved is not None:
        scores = scores @ solved
        read = read - scores @ erased
    return scores, read, absorb, transition


def _segment(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    lambda_BTJL: Tensor,
    states_BSJKV: Tensor | None,
    chunks: Chunks,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The outputs, and the states before the chunk that follows the last."""
    dtype, (B, _, J, V) = torch.promote_types(q_BTHK.dtype, torch.float32), v_BTJV.shape
    if states_BSJKV is None:
        shape = (B, lambda_BTJL.shape[-1], J, q_BTHK.shape[-1], V)
        states_BSJKV = torch.zeros(shape, dtype=dtype, device=q_BTHK.device)
    states_BSJKV = states_BSJKV.to(dtype)
    q, k, v, log_decay, lambda_ = (
        _chunked(x, chunks, J, dtype)
        for x in (q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ.unsqueeze(-1), lambda_BTJL)
    )
    beta = None
    if beta_BTJ is not None:
        beta = _chunked(beta_BTJ.unsqueeze(-1), chunks, J, dtype)
    scores, read, absorb, transition = _chunk_maps(scale * q, k, log_decay, beta)
    assert scores is not None
    assert read is not None
    C, apply = scores.shape[-1], _apply(beta_BTJ)
    masks = _on(q.device, level_masks(C)[: lambda_.shape[-1]]).to(dtype)
    weights = torch.einsum("bjncl,lcd->bjncd", lambda_[..., : len(masks)], masks)
    o = (weights * scores) @ v

    # The nodes before the first chunk that are smaller than a chunk lie in that chunk.
    o_first, carried = _read_small_nodes(
        read[:, :, 0], lambda_[:, :, 0], states_BSJKV, chunks.position, C
    )
    rest = len(chunks.index) - 1
    o = o + F.pad(o_first.unsqueeze(2), (0, 0, 0, 0, 0, rest))
    carried = apply(transition[:, :, 0], carried)
    write = absorb @ v + F.pad(carried.unsqueeze(2), (0, 0, 0, 0, 0, rest))

    small = C.bit_length() - 1
    after = [torch.zeros_like(carried)] * states_BSJKV.shape[1]
    for b, before_BJNKV, after_BJKV in _tree(
        transition, write, states_BSJKV[:, small:], chunks, apply
    ):
        level = small + b + 1
        o = o + (lambda_[..., level : level + 1] * read) @ before_BJNKV
        after[small + b] = after_BJKV
    o = o.permute(0, 2, 3, 1, 4).flatten(1, 2)
    o = o.index_select(1, _on(o.device, chunks.slot_of_token))
    return o.to(v_BTJV.dtype), torch.stack(after, dim=1)


def first_chunk_states(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    lambda_BTJL: Tensor,
    states_BSJKV: Tensor,
    position: int,
    chunk_length: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Of the nodes before `position` that lie in its own chunk: what that chunk's tokens, which
    these are, read of them [B, T, J, V], and their sum after it [B, J, K, V]."""
    dtype, J = torch.promote_types(q_BTHK.dtype, torch.float32), log_decay_BTJ.shape[2]
    chunks = chunk_tokens([q_BTHK.shape[1]], position, chunk_length)
    inputs = (q_BTHK, k_BTHK, log_decay_BTJ.unsqueeze(-1), lambda_BTJL)
    q, k, log_decay, lambda_ = (_chunked(x, chunks, J, dtype) for x in inputs)
    beta = None if beta_BTJ is None else _chunked(beta_BTJ.unsqueeze(-1), chunks, J, dtype)
    _, read, _, transition = _chunk_maps(scale * q, k, log_decay, beta)
    assert read is not None
    o_BJCV, carried_BJKV = _read_small_nodes(
        read[:, :, 0], lambda_[:, :, 0], states_BSJKV.to(dtype), position, chunk_length
    )
    o_BTJV = o_BJCV.transpose(1, 2).index_select(1, _on(q.device, chunks.slot_of_token))
    return o_BTJV, _apply(beta_BTJ)(transition[:, :, 0], carried_BJKV)


def _read_small_nodes(
    read_BJCK: Tensor, lambda_BJCL: Tensor, states_BSJKV: Tensor, position: int, chunk_length: int
) -> tuple[Tensor, Tensor]:
    """What the chunk that holds `position` reads of the nodes before it in the same chunk, and
    these nodes' sum."""
    slot, small = position % chunk_length, chunk_length.bit_length() - 1
    small = min(small, states_BSJKV.shape[1])
    masks = np.zeros((small, lambda_BJCL.shape[-1], chunk_length), dtype=bool)
    for b in bits(slot):
        for i in range(slot, chunk_length):
            level = (i ^ node_start(slot, b)).bit_length()
            if level < masks.shape[1]:
                masks[b, level, i] = True
    masks_SLC = _on(read_BJCK.device, masks).to(read_BJCK.dtype)
    weights_SBJC = torch.einsum("bjcl,slc->sbjc", lambda_BJCL, masks_SLC)
    # Bits that the position does not have are cleared.
    cleared = np.array([not slot >> b & 1 for b in range(small)], dtype=bool)
    cleared_S1111 = _on(read_BJCK.device, cleared)[:, None, None, None, None]
    nodes_SBJKV = states_BSJKV[:, :small].transpose(0, 1).masked_fill(cleared_S1111, 0)
    o_BJCV = (weights_SBJC.unsqueeze(-1) * (read_BJCK @ nodes_SBJKV)).sum(0)
    return o_BJCV, nodes_SBJKV.sum(0)


def _tree(
    transition_BJNKE: Tensor,
    write_BJNKV: Tensor,
    states_BSJKV: Tensor,
    chunks: Chunks,
    apply: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Bottom up, for each bit of the chunk numbers: the states of the nodes of 2^bit chunks before
    every chunk [B, J, N, K, V], where the chunk's number has the bit, else zeros; and after the
    last.

    Where a number n + 1 ends in a set bit and zeros below, the nodes of n's lower bits and chunk n
    are merged into one; that node passes the chunks after it as long as their numbers keep the bit.
    """
    index, following = chunks.index, chunks.following
    smaller_BJNKV = torch.zeros_like(write_BJNKV)
    nothing_BJKV = smaller_BJNKV[:, :, 0]
    for b in range(int(max(index.max(), following.max())).bit_length()):
        kept = (index >> b) & (following >> b) & 1 == 1
        ends = (following == index + 1) & (following & -following == 1 << b)
        dropped_N11, inside_N11 = (_on(write_BJNKV.device, ~x)[:, None, None] for x in (kept, ends))
        node_BJNKV = write_BJNKV + apply(transition_BJNKE, smaller_BJNKV)
        initial_BJKV = states_BSJKV[:, b] if index[0] >> b & 1 else nothing_BJKV
        before_BJNKV, after_BJKV = scan_chunks(
            transition_BJNKE.masked_fill(dropped_N11, 0),
            node_BJNKV.masked_fill(inside_N11, 0),
            initial_BJKV,
            apply,
        )
        smaller_BJNKV = smaller_BJNKV + before_BJNKV
        yield b, before_BJNKV, after_BJKV


def _nodes(chunks: Chunks, end: int, rows: int) -> Iterator[tuple[Chunks, Nodes]]:
    """The chunks up to the position `end`, in runs of one of its nodes (and within the memory's
    limit), each with its nodes. Only a last chunk that is not full holds several."""
    C = len(chunks.filled) // len(chunks.index)
    tail = end % C
    whole = [node_of(i * C, end) if (i + 1) * C <= end else None for i in chunks.index.tolist()]
    first = 0
    for b, run in groupby(whole):
        count = len(list(run))
        nodes = [(b, np.ones(C, dtype=bool))]
        if b is None:
            holder = np.array([node_of(i, tail) if i < tail else -1 for i in range(C)])
            nodes = [(small, holder == small) for small in bits(tail)]
        for part in _pieces(chunks, first, count, rows):
            yield part, nodes  # pyright: ignore[reportReturnType]
        first += count


def _pieces(chunks: Chunks, first: int, count: int, rows: int) -> Iterator[Chunks]:
    """`count` chunks from `first` on, at most SEGMENT_CHUNKS over all rows at a time."""
    limit = max(1, SEGMENT_CHUNKS // rows)
    for begin in range(first, first + count, limit):
        yield slice_chunks(chunks, begin, min(begin + limit, first + count))


def _node_map(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    chunks: Chunks,
    nodes: Nodes,
) -> tuple[Tensor, Tensor]:
    """All chunks as one map: transition [B, J, E, E], and what each node's tokens write
    [M, B, J, K, V]."""
    dtype, J = torch.promote_types(k_BTHK.dtype, torch.float32), v_BTJV.shape[2]
    k, v, log_decay = (
        _chunked(x, chunks, J, dtype) for x in (k_BTHK, v_BTJV, log_decay_BTJ.unsqueeze(-1))
    )
    beta = None
    if beta_BTJ is not None:
        beta = _chunked(beta_BTJ.unsqueeze(-1), chunks, J, dtype)
    _, _, absorb, transition = _chunk_maps(None, k, log_decay, beta)
    slots_MC = _on(v.device, np.stack([slots for _, slots in nodes]))
    own = v.masked_fill(~slots_MC[:, None, None, None, :, None], 0)
    return compose_chunks(transition, absorb @ own, _apply(beta_BTJ))
