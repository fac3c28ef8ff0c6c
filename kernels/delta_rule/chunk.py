"""The delta rule, chunkwise parallel, in torch. The derivation is in README.md."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.recurrence import (
    apply_matrix,
    compose_chunks,
    decay_between,
    document_starts,
    read_state,
    scan_chunks,
    to_value_heads,
)

CHUNK_LENGTH = 64
SEGMENT_CHUNKS = 2048
"""Chunks (over batch and heads) whose intermediates exist at once; it bounds the memory."""


def delta_rule_chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor | None,
    eta_BTJ: Tensor,
    *,
    step_size: StepSize,
    eps: float = 1e-6,
    scale: float | None = None,
    initial_state_BJKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_length: int = CHUNK_LENGTH,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `delta_rule`, by triangular solves and matrix products.

    The arithmetic is fp64 for fp64 inputs, else fp32. Backward keeps the inputs and one state per
    segment of chunks, and computes a segment again when it needs it. Never waits for the device.
    """
    B, K = q_BTHK.shape[0], q_BTHK.shape[3]
    J, V = v_BTJV.shape[2:]
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    log_decay_BTJ = _with_resets(log_decay_BTJ, eta_BTJ, cu_seqlens)
    if initial_state_BJKV is None:
        state_BJKV = torch.zeros(B, J, K, V, dtype=dtype, device=q_BTHK.device)
    else:
        state_BJKV = initial_state_BJKV.to(dtype)
    if scale is None:
        scale = 1 / math.sqrt(K)
    segment_tokens = chunk_length * max(1, SEGMENT_CHUNKS // (B * J))
    inputs = (q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ)
    outputs = []
    for segment in zip(*(x.split(segment_tokens, dim=1) for x in inputs), strict=True):
        o_BTJV, state_BJKV = checkpoint(  # type: ignore[misc]
            _segment,
            *segment,
            state_BJKV,
            step_size,
            eps,
            scale,
            chunk_length,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(o_BTJV)
    return torch.cat(outputs, dim=1), state_BJKV


def segment_map_chunk(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor | None,
    eta_BTJ: Tensor,
    *,
    step_size: StepSize,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    chunk_length: int = CHUNK_LENGTH,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `delta_rule_segment_map`."""
    B, J = k_BTHK.shape[0], v_BTJV.shape[2]
    log_decay_BTJ = _with_resets(log_decay_BTJ, eta_BTJ, cu_seqlens)
    segment_tokens = chunk_length * max(1, SEGMENT_CHUNKS // (B * J))
    inputs = (k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ)
    total_BJKK = total_BJKV = None
    for segment in zip(*(x.split(segment_tokens, dim=1) for x in inputs), strict=True):
        M_BJKK, h_BJKV = checkpoint(  # type: ignore[misc]
            _segment_map,
            *segment,
            step_size,
            eps,
            chunk_length,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        if total_BJKK is None or total_BJKV is None:
            total_BJKK, total_BJKV = M_BJKK, h_BJKV
        else:
            total_BJKK, total_BJKV = (
                apply_matrix(M_BJKK, total_BJKK),
                apply_matrix(M_BJKK, total_BJKV) + h_BJKV,
            )
    assert total_BJKK is not None
    assert total_BJKV is not None
    return total_BJKK, total_BJKV


def _with_resets(
    log_decay_BTJ: Tensor | None, eta_BTJ: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """The log decay, -inf where a document starts, but for token 0, which may continue one."""
    if log_decay_BTJ is None:
        log_decay_BTJ = torch.zeros_like(eta_BTJ)
    if cu_seqlens is None:
        return log_decay_BTJ
    starts_T = document_starts(cu_seqlens, eta_BTJ.shape[1])
    return log_decay_BTJ.masked_fill(starts_T[:, None], float("-inf"))


@dataclass(frozen=True)
class ChunkMaps:
    """Every chunk as an affine map of the state before it, S_after = transition S + write, and what
    the outputs need of it. All in the arithmetic dtype; k is rescaled."""

    k_BJNCK: Tensor
    between_BJNCC: Tensor
    """exp of the log decay from after token j to token i; 0 for j > i."""
    from_start_BJNC1: Tensor
    """exp of the log decay from the chunk's start to token i."""
    u_BJNCV: Tensor
    w_BJNCK: Tensor
    """Token i writes k_i (u_i - S^T w_i)^T, with S the state before the chunk."""
    transition_BJNKK: Tensor
    write_BJNKV: Tensor


def _chunk_maps(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    eta_BTJ: Tensor,
    dtype: torch.dtype,
    step_size: StepSize,
    eps: float,
    chunk_length: int,
) -> ChunkMaps:
    """The triangular solves: all that does not depend on the state or on q."""
    K, V = k_BTHK.shape[3], v_BTJV.shape[3]
    k_BTJK = to_value_heads(k_BTHK.to(dtype), v_BTJV.shape[2])
    eta_BTJ1 = eta_BTJ.to(dtype).unsqueeze(-1)
    r_BTJ1 = _rescaling(k_BTJK, eta_BTJ1, step_size, eps)
    k, v, eta_BJNC1, log_decay_BJNC1 = (
        _chunked(x, chunk_length)
        for x in (
            r_BTJ1 * k_BTJK,
            r_BTJ1 * v_BTJV.to(dtype),
            eta_BTJ1,
            log_decay_BTJ.to(dtype).unsqueeze(-1),
        )
    )
    from_start_BJNC1 = log_decay_BJNC1.cumsum(-2).exp()
    between_BJNCC = decay_between(log_decay_BJNC1).squeeze(-3)
    to_end_BJNC1 = between_BJNCC[..., -1:, :].mT

    interaction_BJNCC = (eta_BJNC1 * between_BJNCC * (k @ k.mT)).tril(-1)
    writes_BJNCE = torch.linalg.solve_triangular(
        interaction_BJNCC,
        eta_BJNC1 * torch.cat([v, from_start_BJNC1 * k], dim=-1),
        upper=False,
        unitriangular=True,
    )
    u_BJNCV, w_BJNCK = writes_BJNCE.split([V, K], dim=-1)
    # Selects, not products with 0: what overflows in another document stays there.
    w_BJNCK = w_BJNCK.masked_fill(from_start_BJNC1 == 0, 0)

    k_end_BJNKC = (to_end_BJNC1 * k).mT
    identity_KK = torch.eye(K, dtype=dtype, device=k.device)
    transition_BJNKK = from_start_BJNC1[..., -1:, :] * identity_KK - k_end_BJNKC @ w_BJNCK
    return ChunkMaps(
        k,
        between_BJNCC,
        from_start_BJNC1,
        u_BJNCV,
        w_BJNCK,
        transition_BJNKK,
        k_end_BJNKC @ u_BJNCV,
    )


def _segment(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    eta_BTJ: Tensor,
    state_BJKV: Tensor,
    step_size: StepSize,
    eps: float,
    scale: float,
    chunk_length: int,
) -> tuple[Tensor, Tensor]:
    """The chunks' maps, a scan over them, then the outputs."""
    dtype, T = state_BJKV.dtype, q_BTHK.shape[1]
    maps = _chunk_maps(k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ, dtype, step_size, eps, chunk_length)
    before_BJNKV, state_BJKV = scan_chunks(
        maps.transition_BJNKK, maps.write_BJNKV, state_BJKV, apply_matrix
    )
    q = _chunked(scale * to_value_heads(q_BTHK.to(dtype), v_BTJV.shape[2]), chunk_length)
    scores_BJNCC = maps.between_BJNCC * (q @ maps.k_BJNCK.mT)
    scores_BJNCC = scores_BJNCC.masked_fill(maps.between_BJNCC == 0, 0)
    read_BJNCK = maps.from_start_BJNC1 * q - scores_BJNCC @ maps.w_BJNCK
    o_BJNCV = read_state(read_BJNCK, maps.from_start_BJNC1, before_BJNKV)
    o_BJNCV = o_BJNCV + scores_BJNCC @ maps.u_BJNCV
    o_BTJV = o_BJNCV.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]
    return o_BTJV.to(v_BTJV.dtype), state_BJKV


def _segment_map(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    eta_BTJ: Tensor,
    step_size: StepSize,
    eps: float,
    chunk_length: int,
) -> tuple[Tensor, Tensor]:
    """The chunks' maps composed into one."""
    dtype = torch.promote_types(k_BTHK.dtype, torch.float32)
    maps = _chunk_maps(k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ, dtype, step_size, eps, chunk_length)
    return compose_chunks(maps.transition_BJNKK, maps.write_BJNKV, apply_matrix)


def _rescaling(k_BTJK: Tensor, eta_BTJ1: Tensor, step_size: StepSize, eps: float) -> Tensor:
    """r [B, T, J, 1] such that the raw step is eta r^2."""
    norm2_BTJ1 = k_BTJK.square().sum(-1, keepdim=True)
    match step_size:
        case "kaczmarz":
            return (norm2_BTJ1 + eps).rsqrt()
        case "longhorn":
            return (1 + eta_BTJ1 * norm2_BTJ1).rsqrt()
        case "learned":
            return torch.ones_like(eta_BTJ1)


def _chunked(x_BTJE: Tensor, chunk_length: int) -> Tensor:
    """[B, T, J, E] to [B, J, N, C, E]; zeros (no write, no decay) fill the last chunk."""
    padding = -x_BTJE.shape[1] % chunk_length
    x_BTJE = F.pad(x_BTJE, (0, 0, 0, 0, 0, padding))
    return x_BTJE.unflatten(1, (-1, chunk_length)).permute(0, 3, 1, 2, 4).contiguous()
