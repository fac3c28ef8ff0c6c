"""Log-linear attention on the gated delta base on a GPU: launches the kernels and gives them to
autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mixtron.kernels.gated_linear_attention.triton_op import CHUNK_LENGTH, to_key_heads
from mixtron.kernels.log_linear_attention.triton_delta_backward import (
    log_linear_delta_maps_gradient_kernel,
    log_linear_delta_read_gradient_kernel,
    log_linear_delta_reverse_scan_kernel,
    log_linear_delta_transition_gradient_kernel,
)
from mixtron.kernels.log_linear_attention.triton_delta_forward import (
    log_linear_delta_maps_kernel,
    log_linear_delta_output_kernel,
    log_linear_delta_scan_kernel,
)
from mixtron.kernels.log_linear_attention.triton_plan import ScanRange, TreePlan
from mixtron.kernels.triton_tools import product_dtype


@dataclass(frozen=True)
class Plan:
    """How the kernels are cut and launched; no search at run time, which would let ranks differ."""

    maps_warps: int = 4
    # ptxas 12.8 leaves the address of an operand of 16 or 32 columns unset with 4 warps.
    scan_block_v: int = 32
    scan_warps: int = 8
    reverse_block_v: int = 32
    reverse_warps: int = 4
    output_warps: int = 4
    transition_warps: int = 8
    read_warps: int = 8
    maps_gradient_warps: int = 8


PLAN = Plan()


class LogLinearDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, beta, lambda_, first_write, larger, plan, scale):
        inputs = (q, k, v, log_decay, beta, lambda_)
        q, k, v, log_decay, beta, lambda_ = (x.contiguous() for x in inputs)
        maps = chunk_maps(q, k, log_decay, beta, plan, scale)
        states = scan(v, maps, first_write, larger, plan)
        o = output(v, lambda_, maps, states, plan)
        ctx.save_for_backward(q, k, v, beta, lambda_, *maps, states)
        ctx.plan, ctx.scale = plan, scale
        ctx.has_first = first_write is not None
        ctx.larger = 0 if larger is None else larger.shape[1]
        return o

    @staticmethod
    def backward(ctx, do):  # type: ignore[override]
        q, k, v, beta, lambda_, *maps, states = ctx.saved_tensors
        plan, do = ctx.plan, do.contiguous()
        dstates, dwrite, dnodes = reverse_scan(do, lambda_, maps, states, plan)
        dE, dacross = transition_gradients(states, dstates, maps, plan)
        del dstates
        dv, dlambda, *dmaps = read_gradients(v, do, lambda_, maps, states, dwrite, plan)
        dq, dk, dlog_decay, dbeta = maps_gradients(
            q, k, beta, maps, (*dmaps, dE, dacross), plan, ctx.scale
        )
        dfirst = dwrite[:, :, 0] if ctx.has_first else None
        dlarger = None
        if ctx.larger:
            held = [float(plan.first_number >> b & 1) for b in range(ctx.larger)]
            held_S111 = torch.tensor(held).to(do.device, non_blocking=True)[:, None, None, None]
            dlarger = dnodes[:, :, : ctx.larger].transpose(1, 2)
            dlarger = torch.where(held_S111 > 0, dlarger, 0.0)
        return dq, dk, dv, dlog_decay, dbeta, dlambda, dfirst, dlarger, None, None


def chunk_maps(q, k, log_decay, beta, plan: TreePlan, scale: float):
    """The running sum of each chunk's log decay [B, J, N, C] fp32; X and M [B, J, N, C, C], Z and Y
    [B, J, N, C, K], E [B, J, N, K, K]."""
    (B, T, _, K), J, C = q.shape, beta.shape[2], CHUNK_LENGTH
    shape = (B, J, plan.chunks)
    cumulative_BJNC = q.new_empty(*shape, C, dtype=torch.float32)
    X_BJNCC, M_BJNCC = q.new_empty(*shape, C, C), q.new_empty(*shape, C, C)
    Z_BJNCK, Y_BJNCK = q.new_empty(*shape, C, K), q.new_empty(*shape, C, K)
    E_BJNKK = q.new_empty(*shape, K, K)
    maps = (cumulative_BJNC, X_BJNCC, M_BJNCC, Z_BJNCK, Y_BJNCK, E_BJNKK)
    log_linear_delta_maps_kernel[(plan.chunks, B * J)](
        q, k, log_decay, beta, plan.chunk_N4, *maps, scale, T,
        **_key_dims(q, J), num_warps=PLAN.maps_warps,
    )  # fmt: skip
    return maps


def _key_dims(q, J: int) -> dict:
    """What kernels of queries and keys are compiled for."""
    H, K = q.shape[2:]
    return {"H": H, "J": J, "K": K, "C": CHUNK_LENGTH, "PRODUCT": product_dtype(q.dtype)}


def _value_dims(v, maps) -> dict:
    """What kernels of values are compiled for."""
    K, product = maps[3].shape[-1], product_dtype(maps[3].dtype)
    return {"J": v.shape[2], "K": K, "V": v.shape[3], "C": CHUNK_LENGTH, "PRODUCT": product}


def _nodes(v, K: int, ranges: Sequence[ScanRange]) -> list:
    """Room for each range's nodes of a position in each group [B, J, R, M, K, V] fp32, and for the
    nodes that it takes over from the range below [B, J, A, K, V] fp32; nothing is below the first.
    """
    B, J, V = v.shape[0], v.shape[2], v.shape[3]
    fp32 = {"dtype": torch.float32}
    return [
        (
            v.new_empty(B, J, own.groups, own.slots, K, V, **fp32),
            v.new_empty(B, J, own.arriving, K, V, **fp32) if own.low else None,
        )
        for own in ranges
    ]


def _between(i: int, ranges: Sequence[ScanRange], nodes: list) -> tuple[tuple, dict]:
    """What a scan over range i is given of the ranges beside it: pointers, and numbers."""
    own, above = ranges[i], i + 1 if i + 1 < len(ranges) else None
    leaving = (None, None) if above is None else (ranges[above].arrival_N, nodes[above][1])
    pointers = (own.arrival_N if own.low else None, nodes[i][1], *leaving)
    numbers = {
        "low": own.low,
        "high": own.high,
        "ARRIVING": own.arriving,
        "LEAVING": 0 if above is None else ranges[above].arriving,
        "LOWEST": own.low == 0,
        "HIGHEST": above is None,
    }
    return pointers, numbers


def scan(v, maps, first_write, larger_BSJKV, plan: TreePlan):
    """The nodes that the chunks read [B, J, S, K, V], those of a chunk behind those of the one
    before, smallest first."""
    cumulative, _, _, _, Y, E = maps
    (B, T, J, V), K = v.shape, Y.shape[-1]
    count = plan.slots - plan.chunks
    states_BJSKV = v.new_empty(B, J, max(1, plan.live), K, V)
    first_write = None if first_write is None else first_write.contiguous()
    block_v = min(PLAN.scan_block_v, V)
    nodes = _nodes(v, K, plan.ranges)
    for i, own in enumerate(plan.ranges):
        held = nodes[i][0][:, :, 0, : max(0, min(count, own.high) - own.low)]
        held[...] = 0.0
        if larger_BSJKV is not None:
            held[...] = larger_BSJKV[:, own.low :][:, : held.shape[2]].transpose(1, 2)
        pointers, numbers = _between(i, plan.ranges, nodes)
        log_linear_delta_scan_kernel[(V // block_v, B * J, own.groups)](
            v, Y, E, cumulative, plan.chunk_N4, plan.live_N, own.group_R2, first_write,
            *pointers, nodes[i][0], states_BJSKV, T, plan.chunks, states_BJSKV.shape[2],
            **numbers, BLOCK_V=block_v, HAS_FIRST=first_write is not None,
            **_value_dims(v, maps), num_warps=PLAN.scan_warps,
        )  # fmt: skip
    return states_BJSKV


def output(v, lambda_, maps, states, plan: TreePlan):
    _, _, M, Z, _, _ = maps
    (B, T), J = v.shape[:2], v.shape[2]
    o_BTJV = torch.empty_like(v)
    log_linear_delta_output_kernel[(plan.chunks, B * J)](
        v, lambda_, M, Z, states, plan.chunk_N4, plan.live_N, o_BTJV,
        T, plan.bits, states.shape[2],
        L=lambda_.shape[-1], **_value_dims(v, maps), num_warps=PLAN.output_warps,
    )  # fmt: skip
    return o_BTJV


def reverse_scan(do, lambda_, maps, states, plan: TreePlan):
    """The gradients of the states that `scan` gives, as they leave the chunk; of what the chunks
    write [B, J, N, K, V]; and of the nodes before the first chunk."""
    cumulative, _, _, Z, _, E = maps
    (B, T, J, V), K = do.shape, Z.shape[-1]
    dstates_BJSKV = torch.empty_like(states)
    dwrite_BJNKV = states.new_empty(B, J, plan.chunks, K, V)
    block_v = min(PLAN.reverse_block_v, V)
    dnodes = _nodes(do, K, plan.ranges)
    for i, own in reversed([*enumerate(plan.ranges)]):
        pointers, numbers = _between(i, plan.ranges, dnodes)
        log_linear_delta_reverse_scan_kernel[(V // block_v, B * J, own.groups)](
            do, lambda_, Z, E, cumulative, plan.chunk_N4, plan.live_N, plan.following_N,
            own.group_R2, *pointers, dnodes[i][0], dstates_BJSKV, dwrite_BJNKV,
            T, plan.chunks, states.shape[2], **numbers, L=lambda_.shape[-1], BLOCK_V=block_v,
            **_value_dims(do, maps), num_warps=PLAN.reverse_warps,
        )  # fmt: skip
    first = torch.cat([own[:, :, 0] for own, _ in dnodes], dim=2)
    return dstates_BJSKV, dwrite_BJNKV, first


def transition_gradients(states, dstates, maps, plan: TreePlan):
    """The gradients of E and of the decay across each chunk [B, J, N] fp32."""
    B, J, S, K, V = states.shape
    dE_BJNKK = torch.empty_like(maps[5])
    dacross_BJN = states.new_empty(B, J, plan.chunks, dtype=torch.float32)
    log_linear_delta_transition_gradient_kernel[(plan.chunks, B * J)](
        states, dstates, plan.chunk_N4, plan.live_N, dE_BJNKK, dacross_BJN, plan.bits, S,
        K=K, V=V, PRODUCT=product_dtype(states.dtype), num_warps=PLAN.transition_warps,
    )  # fmt: skip
    return dE_BJNKK, dacross_BJN


def read_gradients(v, do, lambda_, maps, states, dwrite, plan: TreePlan):
    """The gradients of v, lambda, M, Z and Y."""
    _, _, M, Z, Y, _ = maps
    (B, T), J = v.shape[:2], v.shape[2]
    dv_BTJV, dlambda_BTJL = torch.empty_like(v), torch.empty_like(lambda_)
    dlambda_BTJL[..., 7 + plan.bits :] = 0
    dM, dZ, dY = torch.empty_like(M), torch.empty_like(Z), torch.empty_like(Y)
    log_linear_delta_read_gradient_kernel[(plan.chunks, B * J)](
        v, do, lambda_, M, Z, Y, states, dwrite, plan.chunk_N4, plan.live_N,
        dv_BTJV, dlambda_BTJL, dM, dZ, dY, T, plan.bits, states.shape[2],
        L=lambda_.shape[-1], **_value_dims(v, maps), num_warps=PLAN.read_warps,
    )  # fmt: skip
    return dv_BTJV, dlambda_BTJL, dM, dZ, dY


def maps_gradients(q, k, beta, maps, dmaps, plan: TreePlan, scale: float):
    """The gradients of q, k, the log decay and beta."""
    cumulative, X, M, _, Y, _ = maps
    (B, T, H, K), J = q.shape, beta.shape[2]
    dq_BTJK, dk_BTJK = q.new_empty(B, T, J, K), k.new_empty(B, T, J, K)
    dlog_decay_BTJ = torch.empty_like(beta, dtype=torch.float32)
    dbeta_BTJ = torch.empty_like(dlog_decay_BTJ)
    log_linear_delta_maps_gradient_kernel[(plan.chunks, B * J)](
        q, k, beta, cumulative, X, M, Y, *dmaps, plan.chunk_N4,
        dq_BTJK, dk_BTJK, dlog_decay_BTJ, dbeta_BTJ, scale, T,
        **_key_dims(q, J), num_warps=PLAN.maps_gradient_warps,
    )  # fmt: skip
    return to_key_heads(dq_BTJK, H), to_key_heads(dk_BTJK, H), dlog_decay_BTJ, dbeta_BTJ
