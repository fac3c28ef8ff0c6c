"""The delta rule on a GPU: gives the kernels to autograd."""

# Triton takes constants for integers.
# pyright: reportArgumentType=false

import math

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.delta_rule.triton_launch import (
    CHUNK_LENGTH,
    FILLED,
    Inputs,
    Options,
    gradients,
    piece_maps,
    prepare,
    reverse_scan,
    scan,
)
from mixtron.kernels.recurrence import compose_chunks, document_numbers
from mixtron.kernels.triton_tools import check_takes

MOST_PIECES = 8
"""In so many pieces at most a sequence of few heads is cut, which are scanned side by side. Their
maps, which come first, cost up to two scans of a piece."""


def delta_rule_triton(
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
    rows: int = 1,
    unit_queries: bool = False,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `delta_rule`, for bf16 on a GPU; K and V of 64 or 128.

    Raises:
        ValueError: a dtype, device or width that it cannot take.
    """
    check_takes(q_BTHK, v_BTJV, "q_BTHK")
    if scale is None:
        scale = 1 / math.sqrt(q_BTHK.shape[-1])
    options = Options(step_size, eps, scale, unit_queries)
    inputs = [q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ]
    initial = initial_state_BJKV
    if rows > 1:
        # Nothing passes from row to row: one program each instead of one for all. By views whose
        # gradient is a view too; that of x[0] is a copy in zeros.
        inputs = [None if x is None else x.reshape(rows, -1, *x.shape[2:]) for x in inputs]
        initial = None if initial is None else F.pad(initial, (0,) * 7 + (rows - 1,))
    o_BTJV, state_BJKV = _DeltaRule.apply(*inputs, initial, cu_seqlens, options)  # type: ignore[misc]
    if rows > 1:
        o_BTJV, state_BJKV = o_BTJV.flatten(0, 1).unsqueeze(0), state_BJKV[-1:]
    return o_BTJV, state_BJKV


def segment_map_triton(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor | None,
    eta_BTJ: Tensor,
    *,
    step_size: StepSize,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `delta_rule_segment_map`, where `delta_rule_triton` can run.

    The states' columns do not know of each other: from the state [0 | I] and the values [v | 0] the
    scan ends with [h | M]. Pieces of the sequence are scanned side by side, then composed.
    """
    check_takes(k_BTHK, v_BTJV, "k_BTHK")
    (B, T), K, (J, V) = k_BTHK.shape[:2], k_BTHK.shape[3], v_BTJV.shape[2:]
    pieces = _pieces(T, B * J * (K + V) // 64)
    inputs = (k_BTHK.detach(), k_BTHK, F.pad(v_BTJV, (0, K)), log_decay_BTJ, eta_BTJ)
    # [B, T] to [B pieces, T / pieces].
    rows = (None if x is None else x.unflatten(1, (pieces, -1)).flatten(0, 1) for x in inputs)
    identity_KK = torch.eye(K, dtype=torch.float32, device=k_BTHK.device)
    initial = F.pad(identity_KK, (V, 0)).expand(B * pieces, J, K, V + K)
    options = Options(step_size, eps, 1.0)
    _, maps = _DeltaRule.apply(*rows, initial, cu_seqlens, options)  # type: ignore[misc]
    maps_BJNKE = maps.unflatten(0, (B, pieces)).transpose(1, 2)
    write_BJNKV, transition_BJNKK = maps_BJNKE.split([V, K], dim=-1)
    return compose_chunks(transition_BJNKK, write_BJNKV, torch.matmul)


def _pieces(T: int, programs: int) -> int:
    """In how many whole numbers of chunks a scan is cut that has so many programs of 64 columns:
    in one if these fill a GPU, else so that programs of 128 do."""
    pieces = 1
    while (
        programs < FILLED
        and T % (2 * pieces * CHUNK_LENGTH) == 0
        and pieces * programs <= FILLED
        and 2 * pieces <= MOST_PIECES
    ):
        pieces *= 2
    return pieces


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, eta, initial, cu_seqlens, options):
        (B, T), (J, V) = q.shape[:2], v.shape[2:]
        document_T = None
        if cu_seqlens is not None:
            document_T = document_numbers(cu_seqlens, B * T)
        pieces = _pieces(T, B * J * V // 64)
        q, k, v, log_decay, eta = (_cut(x, pieces) for x in (q, k, v, log_decay, eta))
        prepared = prepare(q, k, log_decay, eta, document_T, options)
        maps, states_before = None, initial
        if pieces > 1:
            maps = piece_maps(k, v, prepared, initial, pieces).unflatten(0, (-1, pieces))
            states_before = _states_before(maps, initial)
        training = any(ctx.needs_input_grad)
        o, final, U, states = scan(q, k, v, prepared, states_before, training)
        if training:
            outputs = (o if options.unit_queries else None, U, states, maps)
            ctx.save_for_backward(q, k, log_decay, eta, document_T, *prepared, *outputs)
            ctx.options, ctx.pieces = options, pieces
            ctx.has_initial = initial is not None
        assert o is not None
        return o.view(B, T, J, V), final[pieces - 1 :: pieces]

    @staticmethod
    def backward(ctx, do, dfinal):  # type: ignore[override]
        q, k, log_decay, eta, document_T, *prepared, o, U, states, maps = ctx.saved_tensors
        pieces = ctx.pieces
        do = _cut(do, pieces)
        if pieces > 1:
            alone_BNJKV = _gradients_alone(q, k, do, prepared, dfinal, pieces)
            dfinal = _gradients_after(maps, alone_BNJKV, dfinal)
        inputs = Inputs(q, k, log_decay, eta, document_T, prepared, o, U, states, do)
        found, dinitial = gradients(inputs, dfinal, ctx.options)
        found = (None if x is None else _join(x, pieces) for x in found)
        dinitial = dinitial[::pieces] if ctx.has_initial else None
        return *found, dinitial, None, None


def _cut(x_BTE: Tensor | None, pieces: int) -> Tensor | None:
    """[B, T, ...] to [B pieces, T / pieces, ...], contiguous."""
    return None if x_BTE is None else x_BTE.contiguous().unflatten(1, (pieces, -1)).flatten(0, 1)


def _join(x_BTE: Tensor, pieces: int) -> Tensor:
    """The way back."""
    return x_BTE.unflatten(0, (-1, pieces)).flatten(1, 2)


def _states_before(maps_BNJKE: Tensor, initial_BJKV: Tensor | None) -> Tensor:
    """The state before each piece, [B N, J, K, V], one after another: N is small."""
    K = maps_BNJKE.shape[3]
    after_BJKV = maps_BNJKE[:, 0, ..., :-K]
    states = [torch.zeros_like(after_BJKV) if initial_BJKV is None else initial_BJKV, after_BJKV]
    for map_BJKE in maps_BNJKE.unbind(1)[1:-1]:
        states.append(map_BJKE[..., -K:] @ states[-1] + map_BJKE[..., :-K])
    return torch.stack(states, dim=1).flatten(0, 1)


def _gradients_alone(q, k, do, prepared, dfinal_BJKV: Tensor, pieces: int) -> Tensor:
    """What each piece's own outputs make of the gradient of the state before it, [B, N, J, K, V];
    of the last also what comes from the final state. Not the first's."""
    after_BNJKV = dfinal_BJKV.new_zeros(len(dfinal_BJKV), pieces, *dfinal_BJKV.shape[1:])
    after_BNJKV[:, -1] = dfinal_BJKV
    chunks = triton.cdiv(k.shape[1], CHUNK_LENGTH)
    after = after_BNJKV.flatten(0, 1)
    _, alone = reverse_scan(q, k, do, prepared, after, None, 0, chunks, pieces)
    return alone.unflatten(0, (-1, pieces))


def _gradients_after(maps_BNJKE: Tensor, alone_BNJKV: Tensor, dfinal_BJKV: Tensor) -> Tensor:
    """The gradient of the state after each piece, [B N, J, K, V], from the end."""
    K = maps_BNJKE.shape[3]
    gradients = [dfinal_BJKV, alone_BNJKV[:, -1]]
    for n in range(maps_BNJKE.shape[1] - 2, 0, -1):
        M_BJKK = maps_BNJKE[:, n, ..., -K:]
        gradients.append(M_BJKK.mT @ gradients[-1] + alone_BNJKV[:, n])
    return torch.stack(gradients[::-1], dim=1).flatten(0, 1)
