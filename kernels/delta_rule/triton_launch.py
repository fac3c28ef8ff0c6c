"""Launches of the delta rule's kernels.

What takes chunk by chunk takes the heads of a chunk after each other: their rows are neighbours in
memory.
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.delta_rule.triton_backward import reverse_scan_kernel
from mixtron.kernels.delta_rule.triton_forward import piece_maps_kernel, prepare_kernel, scan_kernel
from mixtron.kernels.delta_rule.triton_gradient import gradient_kernel, pairs_kernel, states_kernel
from mixtron.kernels.delta_rule.triton_plan import Launch, launch_plan
from mixtron.kernels.launching import Launched
from mixtron.kernels.triton_tools import product_dtype

launch_prepare, launch_scan = Launched(prepare_kernel), Launched(scan_kernel)
launch_piece_maps = Launched(piece_maps_kernel)
launch_reverse_scan, launch_pairs = Launched(reverse_scan_kernel), Launched(pairs_kernel)
launch_states, launch_gradient = Launched(states_kernel), Launched(gradient_kernel)
CHUNK_LENGTH = 64
FILLED = 128
"""About as many programs as a GPU has multiprocessors."""
STATE_EVERY = 8
"""Of so many chunks a state is kept; those between are computed again in backward."""
SEGMENTS = 4
"""Backward takes the chunks in so many parts, from the last: states, their gradients and those of P
and A are there of one part at a time."""


@dataclass(frozen=True)
class Options:
    step_size: StepSize
    eps: float
    scale: float
    unit_queries: bool = False


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


def shape_of(k_BTHK: Tensor, J: int) -> dict:
    """What every kernel is compiled for."""
    H, K = k_BTHK.shape[2:]
    product = product_dtype(k_BTHK.dtype)
    return {"H": H, "J": J, "K": K, "C": CHUNK_LENGTH, "PRODUCT": product}


def options_of(launch: Launch) -> dict:
    return {"num_warps": launch.warps, "maxnreg": launch.registers}


def descriptor(x: Tensor, *tile: int) -> TensorDescriptor:
    """By which a GPU that can (Hopper) loads tiles without their addresses in registers. It is a
    parameter of the launch, which a recorded graph keeps."""
    return TensorDescriptor.from_tensor(x, list(tile))


def columns_of(launch: Launch, K: int, V: int, heads: int) -> tuple[int, dict]:
    """How many of V columns a program of a scan takes, and with what options: the launch's, but
    64 where these leave half of a GPU idle, and no more than K: with 8 warps, 128 columns and keys
    of 64 Triton 3.6 gave NaN on an H200."""
    columns = math.gcd(launch.block_v, K, V)
    if 2 * heads * (V // columns) <= FILLED:
        columns = min(columns, 64)
    warps = launch.warps * columns // launch.block_v
    return columns, {"num_warps": warps, "maxnreg": launch.registers}


def prepare(q, k, log_decay, eta, document_T, options: Options):
    """X and P [B, J, T', C], the row factors [7, B, J, T'] fp32 and the decay across each chunk
    [B, J, N] fp32; T' is T filled up to whole chunks."""
    (B, T), J, C = k.shape[:2], eta.shape[2], CHUNK_LENGTH
    N = triton.cdiv(T, C)
    X_BJTC, P_BJTC = k.new_empty(B, J, N * C, C), k.new_empty(B, J, N * C, C)
    rows_7BJT = k.new_empty(7, B, J, N * C, dtype=torch.float32)
    across_BJN = k.new_empty(B, J, N, dtype=torch.float32)
    launch_prepare(
        (B * J, N),
        q,
        k,
        log_decay,
        eta,
        document_T,
        X_BJTC,
        P_BJTC,
        rows_7BJT,
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
    return X_BJTC, P_BJTC, rows_7BJT, across_BJN


def scan(q, k, v, prepared, initial, training: bool):
    """o, the final state, and for backward U and some states."""
    (B, T, _, K), (J, V) = k.shape, v.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(k.device).scan
    block_v, options = columns_of(plan, K, V, B * J)
    o_BTJV = torch.empty_like(v)
    final_BJKV = v.new_empty(B, J, K, V, dtype=torch.float32)
    U_BJNVC = states_BJNVK = None
    if training:
        U_BJNVC = v.new_empty(B, J, N, V, CHUNK_LENGTH)
        states_BJNVK = v.new_empty(B, J, triton.cdiv(N, STATE_EVERY), V, K)
    launch_scan(
        (V // block_v, B * J),
        q,
        k,
        v,
        *prepared,
        None if initial is None else initial.contiguous(),
        o_BTJV,
        U_BJNVC,
        states_BJNVK,
        final_BJKV,
        T,
        N,
        B * J * N * CHUNK_LENGTH,
        V=V,
        BLOCK_V=block_v,
        STATE_EVERY=STATE_EVERY,
        HAS_INITIAL=initial is not None,
        TRAINING=training,
        **shape_of(k, J),
        STAGES=plan.stages,
        **options,
    )
    return o_BTJV, final_BJKV, U_BJNVC, states_BJNVK


def piece_maps(k, v, prepared, initial, pieces: int) -> Tensor:
    """[h | M] [B, J, K, V + K] fp32 of each piece, of which B has `pieces` for each sequence. Of a
    sequence's first in the place of h what becomes of its initial state, M not filled; of its
    last nothing."""
    (B, T, _, K), (J, V), C = k.shape, v.shape[2:], CHUNK_LENGTH
    N = triton.cdiv(T, C)
    plan = launch_plan(k.device).maps
    block_v, options = columns_of(plan, K, V, B * J)
    X_BJTC, _, rows_7BJT, across_BJN = prepared
    maps_BJKE = v.new_empty(B, J, K, V + K, dtype=torch.float32)
    launch_piece_maps(
        ((V + K) // block_v, B * J),
        descriptor(k.flatten(2), 1, C, K),
        descriptor(v, 1, C, 1, block_v),
        descriptor(X_BJTC.view(-1, C), C, C),
        rows_7BJT,
        across_BJN,
        None if initial is None else initial.contiguous(),
        maps_BJKE,
        N,
        B * J * N * C,
        V=V,
        BLOCK_V=block_v,
        PIECES=pieces,
        HAS_INITIAL=initial is not None,
        **shape_of(k, J),
        STAGES=plan.stages,
        **options,
    )
    return maps_BJKE


def reverse_scan(q, k, do, prepared, dafter, dv, begin: int, chunks: int, pieces: int = 1):
    """The gradients of the state after each of the chunks and of that before them; fills v's. Of
    more than one piece only what is before the others than the first."""
    (B, T, _, K), (J, V) = k.shape, do.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(k.device).reverse
    block_v, options = columns_of(plan, K, V, B * J)
    dstates_BJNVK = do.new_empty(B, J, chunks, V, K) if pieces == 1 else None
    dbefore_BJKV = do.new_empty(B, J, K, V, dtype=torch.float32)
    launch_reverse_scan(
        (V // block_v, B * J),
        q,
        k,
        do,
        *prepared,
        dafter.contiguous(),
        dv,
        dstates_BJNVK,
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
        **options,
    )
    return dstates_BJNVK, dbefore_BJKV


def pair_gradients(x: Inputs, out: Gradients, begin: int, chunks: int, options: Options):
    """Of some chunks dP and dM [B, J, chunks C, C] and what the lengths take along k and q,
    [2, B, J, chunks C] fp32; fills the gradient of eta."""
    (B, T, J, V), C = x.do.shape, CHUNK_LENGTH
    N = triton.cdiv(T, C)
    plan = launch_plan(x.U.device).pairs
    rows_7BJT = x.prepared[2]
    dP_BJTC, dM_BJTC = x.U.new_empty(2, B, J, chunks * C, C)
    along_2BJT = rows_7BJT.new_empty(2, B, J, chunks * C)
    launch_pairs(
        (B * J, chunks),
        x.o,
        x.U,
        x.do,
        out.dv_BTJV,
        x.eta,
        x.document_T,
        rows_7BJT,
        dP_BJTC,
        dM_BJTC,
        along_2BJT,
        out.deta_BTJ,
        options.scale,
        T,
        N,
        begin,
        rows_7BJT[0].numel(),
        J=J,
        V=V,
        BLOCK_V=math.gcd(plan.block_v, V),
        C=C,
        STEP_SIZE=options.step_size,
        UNIT_QUERIES=options.unit_queries,
        HAS_DOCUMENTS=x.document_T is not None,
        PRODUCT=product_dtype(x.U.dtype),
        STAGES=plan.stages,
        **options_of(plan),
    )
    return dP_BJTC, dM_BJTC, along_2BJT


def states_again(x: Inputs, begin: int, chunks: int) -> Tensor:
    """The state before each of some chunks, [B, J, chunks, V, K]."""
    (B, T, _, K), (J, V) = x.k.shape, x.do.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(x.k.device).states
    block_k, block_v = min(plan.block_k, K), math.gcd(plan.block_v, V)
    states_BJNVK = x.U.new_empty(B, J, chunks, V, K)
    rows_7BJT, across_BJN = x.prepared[2:]
    launch_states(
        (K // block_k * (V // block_v), B * J, triton.cdiv(chunks, STATE_EVERY)),
        x.k,
        x.U,
        rows_7BJT,
        across_BJN,
        x.states,
        states_BJNVK,
        T,
        N,
        begin,
        chunks,
        rows_7BJT[0].numel(),
        V=V,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        STATE_EVERY=STATE_EVERY,
        **shape_of(x.k, J),
        STAGES=plan.stages,
        **options_of(plan),
    )
    return states_BJNVK


def gradient(
    x: Inputs, out: Gradients, states, dstates, pairs, begin: int, chunks: int, options: Options
) -> None:
    """Fills the gradients of q, k and the log decay of some chunks."""
    (B, T, _, K), (J, V) = x.k.shape, x.do.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    plan = launch_plan(x.k.device).gradient
    block_k = min(plan.block_k, K)
    rows_7BJT, across_BJN = x.prepared[2:]
    launch_gradient(
        (B * J * (K // block_k), chunks),
        x.q,
        x.k,
        x.U,
        x.do,
        out.dv_BTJV,
        x.document_T,
        rows_7BJT,
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
        rows_7BJT[0].numel(),
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


def gradients(x: Inputs, dfinal: Tensor, options: Options) -> tuple[tuple, Tensor]:
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
