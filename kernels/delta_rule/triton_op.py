"""The delta rule on a GPU: launches the kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.delta_rule.triton_backward import reverse_scan_kernel
from mixtron.kernels.delta_rule.triton_forward import prepare_kernel, scan_kernel
from mixtron.kernels.delta_rule.triton_gradient import gradient_kernel, pairs_kernel, states_kernel
from mixtron.kernels.delta_rule.triton_plan import Launch, launch_plan
from mixtron.kernels.launching import Launched
from mixtron.kernels.recurrence import compose_chunks, document_numbers
from mixtron.kernels.triton_tools import check_takes, product_dtype

launch_prepare, launch_scan = Launched(prepare_kernel), Launched(scan_kernel)
launch_reverse_scan, launch_pairs = Launched(reverse_scan_kernel), Launched(pairs_kernel)
launch_states, launch_gradient = Launched(states_kernel), Launched(gradient_kernel)
CHUNK_LENGTH = 64
PROGRAMS, MOST_PIECES = 128, 8
"""A sequence of few heads is cut in pieces that are scanned side by side, up to so many programs,
about one for each multiprocessor. Their maps, which come first, cost up to two scans of a piece."""
STATE_EVERY = 8
"""Of so many chunks a state is kept; those between are computed again in backward."""
SEGMENTS = 4
"""Backward takes the chunks in so many parts, from the last: states, their gradients and those of P
and A are there of one part at a time."""


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
    unit_queries: bool = False


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
            maps = _maps(k, v, prepared, initial, pieces)
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
        found, dinitial = _gradients(inputs, dfinal, ctx.options)
        found = (None if x is None else _join(x, pieces) for x in found)
        dinitial = dinitial[::pieces] if ctx.has_initial else None
        return *found, dinitial, None, None


@dataclass(frozen=True)
class Inputs:
    """What backward has: arguments, what forward made of them, and the output's gradient."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    eta: Tensor
    document_T: Tensor | None
    prepared: Sequence[Tensor]
    o: Tensor | None
    U: Tensor
    states: Tensor
    do: Tensor


@dataclass(frozen=True)
class Gradients:
    """Of every token, filled segment by segment; q's and k's by value head, the log decay's by
    block of keys."""

    dq_BTJK: Tensor
    dk_BTJK: Tensor
    dv_BTJV: Tensor
    dlog_decay_PBTJ: Tensor | None
    deta_BTJ: Tensor


def _gradients(x: Inputs, dfinal: Tensor, options: Options) -> tuple[tuple, Tensor]:
    """The gradients of q, k, v, log decay and eta, and of the initial state."""
    (B, T, H, K), J = x.k.shape, x.eta.shape[2]
    N = triton.cdiv(T, CHUNK_LENGTH)
    parts = triton.cdiv(K, launch_plan(x.k.device).gradient.block_k)
    out = Gradients(
        dq_BTJK=x.q.new_empty(B, T, J, K),
        dk_BTJK=x.k.new_empty(B, T, J, K),
        dv_BTJV=torch.empty_like(x.do),
        dlog_decay_PBTJ=None if x.log_decay is None else x.log_decay.new_empty(parts, B, T, J),
        deta_BTJ=torch.empty_like(x.eta),
    )
    length = triton.cdiv(triton.cdiv(N, SEGMENTS), STATE_EVERY) * STATE_EVERY
    state = dfinal
    for begin in reversed(range(0, N, length)):
        state = _segment(x, out, state, begin, min(length, N - begin), options)
    dlog_decay = None if out.dlog_decay_PBTJ is None else out.dlog_decay_PBTJ.sum(0)
    dq, dk = (_to_key_heads(dx, H) for dx in (out.dq_BTJK, out.dk_BTJK))
    return (dq, dk, out.dv_BTJV, dlog_decay, out.deta_BTJ), state


def _segment(x: Inputs, out: Gradients, after, begin: int, chunks: int, options: Options):
    """Fills the gradients of some chunks; from the gradient of the state after them to that before
    them."""
    dstates, before = reverse_scan(x.q, x.k, x.do, x.prepared, after, out.dv_BTJV, begin, chunks)
    pairs = pair_gradients(x, out, begin, chunks, options)
    states = states_again(x, begin, chunks)
    gradient(x, out, states, dstates, pairs, begin, chunks, options)
    return before


def _cut(x_BTE: Tensor | None, pieces: int) -> Tensor | None:
    """[B, T, ...] to [B pieces, T / pieces, ...], contiguous."""
    return None if x_BTE is None else x_BTE.contiguous().unflatten(1, (pieces, -1)).flatten(0, 1)


def _join(x_BTE: Tensor, pieces: int) -> Tensor:
    """The way back."""
    return x_BTE.unflatten(0, (-1, pieces)).flatten(1, 2)


def _maps(k, v, prepared, initial_BJKV: Tensor | None, pieces: int) -> Tensor:
    """[h | M] [B, pieces, J, K, V + K] of each piece but the last, fp32: where a scan from [0 | I]
    ends. Of the first only what becomes of the initial state, in the place of h."""
    K, (J, V) = k.shape[3], v.shape[2:]
    start_KE = F.pad(torch.eye(K, dtype=torch.float32, device=k.device), (V, 0))
    start_BNJKE = start_KE.expand(k.shape[0], J, K, V + K).unflatten(0, (-1, pieces))
    if initial_BJKV is not None:
        start_BNJKE = start_BNJKE.clone()
        start_BNJKE[:, 0, ..., :V] = initial_BJKV
    _, maps, _, _ = scan(None, k, v, prepared, start_BNJKE.flatten(0, 1), False, pieces)
    return maps.unflatten(0, (-1, pieces))


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


def shape_of(k_BTHK: Tensor, J: int) -> dict:
    """What every kernel is compiled for."""
    H, K = k_BTHK.shape[2:]
    product = product_dtype(k_BTHK.dtype)
    return {"H": H, "J": J, "K": K, "C": CHUNK_LENGTH, "PRODUCT": product}


def options_of(launch: Launch) -> dict:
    return {"num_warps": launch.warps, "maxnreg": launch.registers}


def prepare(q, k, log_decay, eta, document_T, options: Options):
    """X and P [B, J, T', C], the row factors [5, B, J, T'] fp32 and the decay across each chunk
    [B, J, N] fp32; T' is T filled up to whole chunks."""
    (B, T), J, C = k.shape[:2], eta.shape[2], CHUNK_LENGTH
    N = triton.cdiv(T, C)
    X_BJTC, P_BJTC = k.new_empty(B, J, N * C, C), k.new_empty(B, J, N * C, C)
    rows_5BJT = k.new_empty(5, B, J, N * C, dtype=torch.float32)
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
        rows_5BJT,
        across_BJN,
        options.scale,
        options.eps,
        T,
        B * J * N * C,
        STEP_SIZE=options.step_size,
        UNIT_QUERIES=options.unit_queries,
        HAS_DECAY=log_decay is not None,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(k, J),
        **options_of(launch_plan(k.device).prepare),
    )
    return X_BJTC, P_BJTC, rows_5BJT, across_BJN


def scan(q, k, v, prepared, initial, training: bool, pieces: int = 1):
    """o, the final state, and for backward U and some states. Without q no output; the
    state has the columns of `initial`, of which v may have only the first. Of more than one piece
    only the maps that are needed."""
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
        PIECES=pieces,
        STATE_EVERY=STATE_EVERY,
        HAS_INITIAL=initial is not None,
        HAS_OUTPUT=q is not None,
        TRAINING=training,
        **shape_of(k, J),
        STAGES=plan.stages,
        **options_of(plan),
    )
    return o_BTJV, final_BJKV, U_BTJV, states_BJNKV


def reverse_scan(q, k, do, prepared, dafter, dv, begin: int, chunks: int, pieces: int = 1):
    """The gradients of the state after each of the chunks and of that before them; fills v's. Of
    more than one piece only what is before the others than the first."""
    (B, T, _, K), (J, V) = k.shape, do.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(k.device).reverse
    block_v = math.gcd(plan.block_v, V)
    dstates_BJNKV = do.new_empty(B, J, chunks, K, V) if pieces == 1 else None
    dbefore_BJKV = do.new_empty(B, J, K, V, dtype=torch.float32)
    launch_reverse_scan(
        (V // block_v, B * J),
        q,
        k,
        do,
        *prepared,
        dafter.contiguous(),
        dv,
        dstates_BJNKV,
        dbefore_BJKV,
        T,
        N,
        begin,
        chunks,
        B * J * N * CHUNK_LENGTH,
        V=V,
        BLOCK_V=block_v,
        PIECES=pieces,
        **shape_of(k, J),
        STAGES=plan.stages,
        **options_of(plan),
    )
    return dstates_BJNKV, dbefore_BJKV


def pair_gradients(x: Inputs, out: Gradients, begin: int, chunks: int, options: Options):
    """Of some chunks dP and dM [B, J, chunks C, C] and what the lengths take along k and q,
    [2, B, J, chunks C] fp32; fills the gradient of eta."""
    (B, T, J, V), C = x.U.shape, CHUNK_LENGTH
    N = triton.cdiv(T, C)
    plan = launch_plan(x.U.device).pairs
    rows_5BJT = x.prepared[2]
    dP_BJTC, dM_BJTC = x.U.new_empty(2, B, J, chunks * C, C)
    along_2BJT = rows_5BJT.new_empty(2, B, J, chunks * C)
    launch_pairs(
        (chunks, B * J),
        x.o,
        x.U,
        x.do,
        out.dv_BTJV,
        x.log_decay,
        x.eta,
        x.document_T,
        rows_5BJT,
        dP_BJTC,
        dM_BJTC,
        along_2BJT,
        out.deta_BTJ,
        options.scale,
        T,
        N,
        begin,
        rows_5BJT[0].numel(),
        J=J,
        V=V,
        BLOCK_V=math.gcd(plan.block_v, V),
        C=C,
        STEP_SIZE=options.step_size,
        UNIT_QUERIES=options.unit_queries,
        HAS_DECAY=x.log_decay is not None,
        HAS_DOCUMENTS=x.document_T is not None,
        PRODUCT=product_dtype(x.U.dtype),
        **options_of(plan),
    )
    return dP_BJTC, dM_BJTC, along_2BJT


def states_again(x: Inputs, begin: int, chunks: int) -> Tensor:
    """The state before each of some chunks, [B, J, chunks, K, V]."""
    (B, T, _, K), (J, V) = x.k.shape, x.U.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(x.k.device).states
    block_k, block_v = min(plan.block_k, K), math.gcd(plan.block_v, V)
    states_BJNKV = x.U.new_empty(B, J, chunks, K, V)
    rows_5BJT, across_BJN = x.prepared[2:]
    launch_states(
        (K // block_k * (V // block_v), triton.cdiv(chunks, STATE_EVERY), B * J),
        x.k,
        x.U,
        rows_5BJT,
        across_BJN,
        x.states,
        states_BJNKV,
        T,
        N,
        begin,
        chunks,
        rows_5BJT[0].numel(),
        V=V,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        STATE_EVERY=STATE_EVERY,
        **shape_of(x.k, J),
        STAGES=plan.stages,
        **options_of(plan),
    )
    return states_BJNKV


def gradient(
    x: Inputs, out: Gradients, states, dstates, pairs, begin: int, chunks: int, options: Options
) -> None:
    """Fills the gradients of q, k and the log decay of some chunks."""
    (B, T, _, K), (J, V) = x.k.shape, x.U.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(x.k.device).gradient
    block_k = min(plan.block_k, K)
    rows_5BJT, across_BJN = x.prepared[2:]
    launch_gradient(
        (chunks * (K // block_k), B * J),
        x.q,
        x.k,
        x.U,
        x.do,
        out.dv_BTJV,
        x.document_T,
        rows_5BJT,
        across_BJN,
        states,
        dstates,
        *pairs,
        out.dq_BTJK,
        out.dk_BTJK,
        out.dlog_decay_PBTJ,
        T,
        N,
        begin,
        rows_5BJT[0].numel(),
        V=V,
        BLOCK_K=block_k,
        BLOCK_V=math.gcd(plan.block_v, V),
        UNIT_QUERIES=options.unit_queries,
        HAS_DECAY=x.log_decay is not None,
        HAS_DOCUMENTS=x.document_T is not None,
        **shape_of(x.k, J),
        STAGES=plan.stages,
        **options_of(plan),
    )


def _to_key_heads(x_BTJK: Tensor, H: int) -> Tensor:
    """The sum over the value heads that share a query/key head."""
    if x_BTJK.shape[2] == H:
        return x_BTJK
    return x_BTJK.unflatten(2, (H, -1)).sum(3)
