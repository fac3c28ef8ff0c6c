"""The delta rule on a GPU: launches the kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.delta_rule.triton_backward import reverse_scan_kernel
from mixtron.kernels.delta_rule.triton_forward import prepare_kernel, scan_kernel
from mixtron.kernels.delta_rule.triton_gradient import gradient_kernel, pairs_kernel
from mixtron.kernels.delta_rule.triton_plan import launch_plan
from mixtron.kernels.launching import Launched
from mixtron.kernels.recurrence import compose_chunks, document_numbers
from mixtron.kernels.triton_tools import check_takes, product_dtype

launch_prepare, launch_scan = Launched(prepare_kernel), Launched(scan_kernel)
launch_reverse_scan, launch_pairs = Launched(reverse_scan_kernel), Launched(pairs_kernel)
launch_gradient = Launched(gradient_kernel)
CHUNK_LENGTH = 64
PROGRAMS = 256
"""That keep a GPU busy: two on each multiprocessor."""
FEWEST_PIECES, MOST_PIECES = 4, 8
"""A sequence of few heads is cut in pieces that are scanned side by side, once their maps have
given the state before each. The maps cost about two scans of a piece, so fewer pieces save nothing;
states are handed on one after another, so more save little."""
STATE_EVERY = 2
"""A state, and its gradient, is kept of every second chunk; the one between is computed again."""


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
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `delta_rule`, for bf16 on a GPU; K and V of 64 or 128.

    Raises:
        ValueError: a dtype, device or width that it cannot take.
    """
    check_takes(q_BTHK, v_BTJV, "q_BTHK")
    if scale is None:
        scale = 1 / math.sqrt(q_BTHK.shape[-1])
    options = Options(step_size, eps, scale)
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
    """In how many whole numbers of chunks a scan of so many programs is cut to fill a GPU."""
    pieces = 1
    while (
        T % (2 * pieces * CHUNK_LENGTH) == 0
        and 2 * pieces * programs <= PROGRAMS
        and 2 * pieces <= MOST_PIECES
    ):
        pieces *= 2
    return pieces


@dataclass(frozen=True)
class Options:
    step_size: StepSize
    eps: float
    scale: float


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, eta, initial, cu_seqlens, options):
        (B, T), (J, V) = q.shape[:2], v.shape[2:]
        document_T = None
        if cu_seqlens is not None:
            document_T = document_numbers(cu_seqlens, B * T)
        pieces = _pieces(T, B * J * V // 64)
        if pieces < FEWEST_PIECES:
            pieces = 1
        q, k, v, log_decay, eta = (_cut(x, pieces) for x in (q, k, v, log_decay, eta))
        prepared = prepare(q, k, log_decay, eta, document_T, options)
        maps, states_before = None, initial
        if pieces > 1:
            maps = _maps(k, v, prepared, pieces)
            states_before = _states_before(maps, initial)
        training = any(ctx.needs_input_grad)
        o, final, U, states = scan(q, k, v, prepared, states_before, training)
        if training:
            ctx.save_for_backward(q, k, U, log_decay, eta, document_T, *prepared, states, maps)
            ctx.options, ctx.pieces = options, pieces
            ctx.has_initial = initial is not None
        assert o is not None
        return o.view(B, T, J, V), final[pieces - 1 :: pieces]

    @staticmethod
    def backward(ctx, do, dfinal):  # type: ignore[override]
        q, k, U, log_decay, eta, document_T, *prepared, states, maps = ctx.saved_tensors
        pieces = ctx.pieces
        do = _cut(do, pieces)
        if pieces > 1:
            alone_BJKV = reverse_scan(q, k, do, prepared, None)[2]
            dfinal = _gradients_after(maps, alone_BJKV, dfinal)
        dv, dstates, dinitial = reverse_scan(q, k, do, prepared, dfinal)
        dq, dk, dlog_decay, deta = gradient(
            q, k, U, do, dv, log_decay, eta, document_T, prepared, states, dstates, ctx.options
        )
        found = (None if x is None else _join(x, pieces) for x in (dq, dk, dv, dlog_decay, deta))
        dinitial = dinitial[::pieces] if ctx.has_initial else None
        return *found, dinitial, None, None


def _cut(x_BTE: Tensor | None, pieces: int) -> Tensor | None:
    """[B, T, ...] to [B pieces, T / pieces, ...], contiguous."""
    return None if x_BTE is None else x_BTE.contiguous().unflatten(1, (pieces, -1)).flatten(0, 1)


def _join(x_BTE: Tensor, pieces: int) -> Tensor:
    """The way back."""
    return x_BTE.unflatten(0, (-1, pieces)).flatten(1, 2)


def _maps(k, v, prepared, pieces: int) -> Tensor:
    """[h | M] [B, pieces, J, K, V + K] of each piece, fp32: where a scan from [0 | I] ends."""
    K, (J, V) = k.shape[3], v.shape[2:]
    start_KE = F.pad(torch.eye(K, dtype=torch.float32, device=k.device), (V, 0))
    initial = start_KE.expand(k.shape[0], J, K, V + K)
    _, maps, _, _ = scan(None, k, v, prepared, initial, training=False)
    return maps.unflatten(0, (-1, pieces))


def _states_before(maps_BNJKE: Tensor, initial_BJKV: Tensor | None) -> Tensor:
    """The state before each piece, [B N, J, K, V], one after another: N is small."""
    K = maps_BNJKE.shape[3]
    states = [torch.zeros_like(maps_BNJKE[:, 0, ..., :-K])]
    if initial_BJKV is not None:
        states[0] = initial_BJKV.to(maps_BNJKE.dtype)
    for map_BJKE in maps_BNJKE.unbind(1)[:-1]:
        states.append(map_BJKE[..., -K:] @ states[-1] + map_BJKE[..., :-K])
    return torch.stack(states, dim=1).flatten(0, 1)


def _gradients_after(maps_BNJKE: Tensor, alone: Tensor, dfinal_BJKV: Tensor) -> Tensor:
    """The gradient of the state after each piece, [B N, J, K, V], from the end; `alone` is what
    each piece's own outputs make of the state's before it."""
    B, N, _, K, _ = maps_BNJKE.shape
    gradients = [dfinal_BJKV]
    for n in range(N - 1, 0, -1):
        M_BJKK = maps_BNJKE[:, n, ..., -K:]
        gradients.append(M_BJKK.mT @ gradients[-1] + alone.unflatten(0, (B, N))[:, n])
    return torch.stack(gradients[::-1], dim=1).flatten(0, 1)


def shape_of(k_BTHK: Tensor, J: int) -> dict:
    """What every kernel is compiled for."""
    H, K = k_BTHK.shape[2:]
    product = product_dtype(k_BTHK.dtype)
    return {"H": H, "J": J, "K": K, "C": CHUNK_LENGTH, "PRODUCT": product}


def prepare(q, k, log_decay, eta, document_T, options: Options):
    """X and P [B, J, T', C], the row factors [4, B, J, T'] fp32 and the decay across each chunk
    [B, J, N] fp32; T' is T filled up to whole chunks."""
    (B, T), J, C = k.shape[:2], eta.shape[2], CHUNK_LENGTH
    N = triton.cdiv(T, C)
    X_BJTC, P_BJTC = k.new_empty(B, J, N * C, C), k.new_empty(B, J, N * C, C)
    rows_4BJT = k.new_empty(4, B, J, N * C, dtype=torch.float32)
    across_BJN = k.new_empty(B, J, N, dtype=torch.float32)
    launch_prepare(
        (N, B * J),
        q,
        k,
        log_decay,
        eta,
        document_T,
        X_BJTC,
        P_BJTC,
        rows_4BJT,
        across_BJN,
        options.scale,
        options.eps,
        T,
        B * J * N * C,
        STEP_SIZE=options.step_size,
        HAS_DECAY=log_decay is not None,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(k, J),
        num_warps=launch_plan(k.device).prepare_warps,
    )
    return X_BJTC, P_BJTC, rows_4BJT, across_BJN


def scan(q, k, v, prepared, initial, training: bool):
    """o, the final state, and for backward U and every second state. Without q no output; the
    state has the columns of `initial`, of which v may have only the first."""
    (B, T, _, K), (J, V) = k.shape, v.shape[2:]
    columns = V if initial is None else initial.shape[-1]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(k.device).scan
    block_v = math.gcd(plan.block_v, V)
    o_BTJV = None if q is None else torch.empty_like(v)
    final_BJKV = v.new_empty(B, J, K, columns, dtype=torch.float32)
    U_BTJV = states_BJNKV = None
    if training:
        U_BTJV = torch.empty_like(v)
        states_BJNKV = v.new_empty(B, J, triton.cdiv(N, STATE_EVERY), K, V)
    launch_scan(
        (columns // block_v, B * J),
        q,
        k,
        v,
        *prepared,
        None if initial is None else initial.contiguous(),
        o_BTJV,
        U_BTJV,
        states_BJNKV,
        final_BJKV,
        T,
        N,
        B * J * N * CHUNK_LENGTH,
        V=columns,
        VALUES=V,
        BLOCK_V=block_v,
        STATE_EVERY=STATE_EVERY,
        HAS_INITIAL=initial is not None,
        HAS_OUTPUT=q is not None,
        TRAINING=training,
        **shape_of(k, J),
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    return o_BTJV, final_BJKV, U_BTJV, states_BJNKV


def reverse_scan(q, k, do, prepared, dfinal):
    """The gradients of v, of every second state and of the initial one."""
    (B, T, _, K), (J, V) = k.shape, do.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(k.device).reverse
    block_v = math.gcd(plan.block_v, V)
    dv_BTJV = torch.empty_like(do)
    dstates_BJNKV = do.new_empty(B, J, triton.cdiv(N, STATE_EVERY), K, V)
    dinitial_BJKV = do.new_empty(B, J, K, V, dtype=torch.float32)
    launch_reverse_scan(
        (V // block_v, B * J),
        q,
        k,
        do,
        *prepared,
        None if dfinal is None else dfinal.contiguous(),
        dv_BTJV,
        dstates_BJNKV,
        dinitial_BJKV,
        T,
        N,
        B * J * N * CHUNK_LENGTH,
        V=V,
        BLOCK_V=block_v,
        STATE_EVERY=STATE_EVERY,
        HAS_DFINAL=dfinal is not None,
        **shape_of(k, J),
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    return dv_BTJV, dstates_BJNKV, dinitial_BJKV


def gradient(q, k, U, do, dv, log_decay, eta, document_T, prepared, states, dstates, options):
    """The gradients of q, k, the log decay (None without) and eta."""
    _, _, rows_4BJT, across_BJN = prepared
    (B, T, H, K), (J, V) = k.shape, U.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(k.device)
    shape = shape_of(k, J)
    documents = document_T is not None
    dP_BJTC, dM_BJTC = k.new_empty(2, B, J, N * CHUNK_LENGTH, CHUNK_LENGTH)
    pull_BJT = rows_4BJT.new_empty(B, J, N * CHUNK_LENGTH)
    deta_BTJ = torch.empty_like(eta)
    launch_pairs(
        (N, B * J),
        U,
        do,
        dv,
        log_decay,
        eta,
        document_T,
        rows_4BJT,
        dP_BJTC,
        dM_BJTC,
        pull_BJT,
        deta_BTJ,
        options.scale,
        T,
        rows_4BJT[0].numel(),
        J=J,
        V=V,
        BLOCK_V=math.gcd(128, V),
        C=CHUNK_LENGTH,
        STEP_SIZE=options.step_size,
        HAS_DECAY=log_decay is not None,
        HAS_DOCUMENTS=documents,
        PRODUCT=shape["PRODUCT"],
        num_warps=plan.pairs_warps,
    )
    block_k, block_v = min(plan.gradient.block_k, K), math.gcd(plan.gradient.block_v, V)
    parts = K // block_k
    dq_BTJK, dk_BTJK = q.new_empty(B, T, J, K), k.new_empty(B, T, J, K)
    dlog_decay_PBTJ = None if log_decay is None else log_decay.new_empty(parts, B, T, J)
    launch_gradient(
        (N * parts, B * J),
        q,
        k,
        U,
        do,
        dv,
        document_T,
        rows_4BJT,
        across_BJN,
        states,
        dstates,
        dP_BJTC,
        dM_BJTC,
        pull_BJT,
        dq_BTJK,
        dk_BTJK,
        dlog_decay_PBTJ,
        T,
        N,
        rows_4BJT[0].numel(),
        V=V,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        STATE_EVERY=STATE_EVERY,
        HAS_DECAY=log_decay is not None,
        HAS_DOCUMENTS=documents,
        **shape,
        STAGES=plan.gradient.stages,
        num_warps=plan.gradient.warps,
    )
    dlog_decay_BTJ = None if dlog_decay_PBTJ is None else dlog_decay_PBTJ.sum(0)
    return _to_key_heads(dq_BTJK, H), _to_key_heads(dk_BTJK, H), dlog_decay_BTJ, deta_BTJ


def _to_key_heads(x_BTJK: Tensor, H: int) -> Tensor:
    """The sum over the value heads that share a query/key head."""
    if x_BTJK.shape[2] == H:
        return x_BTJK
    return x_BTJK.unflatten(2, (H, -1)).sum(3)
