"""Gated linear attention, chunkwise parallel, in torch. The derivation is in README.md.

E is the number of decays a head has: K (one a key channel) or 1.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixtron.kernels.recurrence import (
    apply_diagonal,
    decay_between,
    document_starts,
    read_state,
    scan_chunks,
    to_value_heads,
)

HEAD_CHUNK_LENGTH = 64
CHANNEL_CHUNK_LENGTH = 16
"""Shorter: with a decay a channel, a chunk's pairs of tokens are compared channel by channel."""
SEGMENT_CHUNKS = 2048
"""Chunks (over batch and heads) whose intermediates exist at once; it bounds the memory."""


def gated_linear_attention_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state_BJKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `gated_linear_attention`, by matrix products.

    The arithmetic is fp64 for fp64 inputs, else fp32. Backward keeps the inputs and one state per
    segment of chunks, and computes a segment again when it needs it. Never waits for the device.
    """
    log_decay_BTJE = _with_resets(log_decay, cu_seqlens)
    state_BJKV = initial_state_BJKV
    if state_BJKV is None:
        state_BJKV = _empty_state(k_BTHK, v_BTJV)
    state_BJKV = state_BJKV.to(torch.promote_types(q_BTHK.dtype, torch.float32))
    if scale is None:
        scale = 1 / math.sqrt(q_BTHK.shape[-1])
    outputs = []
    for segment in _segments(q_BTHK, k_BTHK, v_BTJV, log_decay_BTJE):
        o_BTJV, state_BJKV = _recomputed(_segment, *segment, state_BJKV, scale)
        outputs.append(o_BTJV)
    return torch.cat(outputs, dim=1), state_BJKV


def gated_linear_segment_map(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What a stretch of tokens does to the state before it: S_after = decay * S_before + h.

    Arguments as for `gated_linear_attention`. A rank that holds the stretch sends decay
    [B, J, K, 1] and h [B, J, K, V] (fp32; fp64 for fp64 inputs) to those after it, whatever T is.
    """
    log_decay_BTJE = _with_resets(log_decay, cu_seqlens)
    state_BJKV = _empty_state(k_BTHK, v_BTJV)
    for segment in _segments(k_BTHK, v_BTJV, log_decay_BTJE):
        state_BJKV = _recomputed(_segment_state, *segment, state_BJKV)
    B, J, K, _ = state_BJKV.shape
    decay_BJE = to_value_heads(log_decay_BTJE.to(state_BJKV.dtype), J).sum(1).exp()
    return decay_BJE.expand(B, J, K).unsqueeze(-1), state_BJKV


def _with_resets(log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T, J, 1] or [B, T, H, K]: the log decay, -inf where a document starts, but for token 0,
    which may continue one."""
    log_decay_BTJE = log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay
    if cu_seqlens is None:
        return log_decay_BTJE
    starts_T = document_starts(cu_seqlens, log_decay.shape[1])
    return log_decay_BTJE.masked_fill(starts_T[:, None, None], float("-inf"))


def _empty_state(k_BTHK: Tensor, v_BTJV: Tensor) -> Tensor:
    B, _, _, K = k_BTHK.shape
    dtype = torch.promote_types(k_BTHK.dtype, torch.float32)
    return torch.zeros(B, v_BTJV.shape[2], K, v_BTJV.shape[3], dtype=dtype, device=k_BTHK.device)


def _segments(*inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The inputs along T in pieces of SEGMENT_CHUNKS chunks; the last two are v and log decay."""
    *_, v_BTJV, log_decay_BTJE = inputs
    chunks = max(1, SEGMENT_CHUNKS // (v_BTJV.shape[0] * v_BTJV.shape[2]))
    tokens = _chunk_length(log_decay_BTJE) * chunks
    return zip(*(x.split(tokens, dim=1) for x in inputs), strict=True)


def _recomputed(function, *arguments) -> Any:
    """Keeps the arguments alone, and computes the rest again in backward."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _chunk_length(log_decay_BTJE: Tensor) -> int:
    return HEAD_CHUNK_LENGTH if log_decay_BTJE.shape[-1] == 1 else CHANNEL_CHUNK_LENGTH


def _segment(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJE: Tensor,
    state_BJKV: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The states before the chunks, then the outputs."""
    T = q_BTHK.shape[1]
    q, k, v, log_decay = _chunked(q_BTHK, k_BTHK, v_BTJV, log_decay_BTJE, dtype=state_BJKV.dtype)
    before_BJNKV, state_BJKV = _states(k, v, log_decay, state_BJKV)
    q = scale * q
    from_start_BJNCE = log_decay.cumsum(-2).exp()
    o_BJNCV = read_state(from_start_BJNCE * q, from_start_BJNCE, before_BJNKV)
    o_BJNCV = o_BJNCV + _scores(q, k, log_decay) @ v
    o_BTJV = o_BJNCV.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]
    return o_BTJV.to(v_BTJV.dtype), state_BJKV


def _segment_state(
    k_BTHK: Tensor, v_BTJV: Tensor, log_decay_BTJE: Tensor, state_BJKV: Tensor
) -> Tensor:
    """The state after the segment."""
    k, v, log_decay = _chunked(k_BTHK, v_BTJV, log_decay_BTJE, dtype=state_BJKV.dtype)
    return _states(k, v, log_decay, state_BJKV)[1]


def _chunked(*inputs: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """[B, T, heads, X] each to [B, J, N, C, X]; the last two inputs are v and log decay.

    Zeros (no write, no decay) fill the last chunk.
    """
    *_, v_BTJV, log_decay_BTJE = inputs
    T, J = v_BTJV.shape[1:3]
    C = _chunk_length(log_decay_BTJE)
    result = []
    for x in inputs:
        x_BTJX = F.pad(to_value_heads(x.to(dtype), J), (0, 0, 0, 0, 0, -T % C))
        result.append(x_BTJX.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4).contiguous())
    return result


def _states(
    k_BJNCK: Tensor, v_BJNCV: Tensor, log_decay_BJNCE: Tensor, state_BJKV: Tensor
) -> tuple[Tensor, Tensor]:
    """S before each chunk and after the last."""
    behind_BJNCE = F.pad(log_decay_BJNCE[..., 1:, :], (0, 0, 0, 1))
    to_end_BJNCE = behind_BJNCE.flip(-2).cumsum(-2).flip(-2).exp()
    write_BJNKV = (to_end_BJNCE * k_BJNCK).mT @ v_BJNCV
    decay_BJNE1 = log_decay_BJNCE.sum(-2).exp().unsqueeze(-1)
    return scan_chunks(decay_BJNE1, write_BJNKV, state_BJKV, apply_diagonal)


def _scores(q_BJNCK: Tensor, k_BJNCK: Tensor, log_decay_BJNCE: Tensor) -> Tensor:
    """[B, J, N, C, C]: <q_i, k_j>, each channel decayed from after token j to i; 0 for j > i."""
    between_BJNECC = decay_between(log_decay_BJNCE)
    if between_BJNECC.shape[-3] == 1:
        return between_BJNECC.squeeze(-3) * (q_BJNCK @ k_BJNCK.mT)
    q_BJNKC1, k_BJNK1C = q_BJNCK.mT.unsqueeze(-1), k_BJNCK.mT.unsqueeze(-2)
    return (between_BJNECC * q_BJNKC1 * k_BJNK1C).sum(-3)
