"""Log-linear attention on a GPU: the public form; and for the gated linear base, what launches the
kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.gated_linear_attention.triton_op import (
    CHUNK_LENGTH,
    shape_of,
    to_key_heads,
)
from mixtron.kernels.log_linear_attention.chunk import first_chunk_states
from mixtron.kernels.log_linear_attention.triton_backward import (
    log_linear_gradient_kernel,
    log_linear_parts_kernel,
    log_linear_push_kernel,
)
from mixtron.kernels.log_linear_attention.triton_delta_op import LogLinearDelta
from mixtron.kernels.log_linear_attention.triton_forward import (
    log_linear_block_sums_kernel,
    log_linear_output_kernel,
    log_linear_tree_kernel,
    log_linear_write_kernel,
)
from mixtron.kernels.log_linear_attention.triton_plan import TreePlan, tree_plan
from mixtron.kernels.triton_tools import check_takes

SMALL_BITS = CHUNK_LENGTH.bit_length() - 1
"""Nodes of these bits are smaller than a chunk."""


@dataclass(frozen=True)
class Plan:
    """How the kernels are cut and launched; no search at run time, which would let ranks differ."""

    write_block_v: int = 64
    write_warps: int = 4
    tree_block: int = 1024
    tree_warps: int = 4
    output_warps: int = 4
    parts_block_v: int = 64
    parts_warps: int = 4
    gradient_warps: int = 8


PLAN = Plan()


def log_linear_attention_triton(
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
) -> Tensor:
    """Arguments and result of `log_linear_attention`, for bf16 on a GPU; K and V of 64 or 128.

    Raises:
        ValueError: a dtype, device or width that it cannot take.
    """
    check_takes(q_BTHK, v_BTJV, "q_BTHK")
    if scale is None:
        scale = 1 / math.sqrt(q_BTHK.shape[-1])
    lengths = tuple(lengths or [q_BTHK.shape[1]])
    plan = tree_plan(lengths, initial_position, CHUNK_LENGTH, q_BTHK.device)
    slot, count = initial_position % CHUNK_LENGTH, 0
    o_first_BTJV = first_write_BJKV = larger_BSJKV = None
    if initial_states_BSJKV is not None:
        larger_BSJKV = initial_states_BSJKV[:, SMALL_BITS:][:, : plan.slots - plan.chunks]
        if slot:
            count = min(lengths[0], CHUNK_LENGTH - slot)
            o_first_BTJV, first_write_BJKV = first_chunk_states(
                q_BTHK[:, :count],
                k_BTHK[:, :count],
                log_decay_BTJ[:, :count],
                None if beta_BTJ is None else beta_BTJ[:, :count],
                lambda_BTJL[:, :count],
                initial_states_BSJKV,
                initial_position,
                CHUNK_LENGTH,
                scale,
            )
    states = (first_write_BJKV, larger_BSJKV, plan, scale)
    if beta_BTJ is None:
        o = _LogLinear.apply(q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, lambda_BTJL, *states)
    else:
        inputs = (q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, beta_BTJ, lambda_BTJL)
        o = LogLinearDelta.apply(*inputs, *states)
    assert isinstance(o, Tensor)
    if o_first_BTJV is None:
        return o
    return torch.cat([(o[:, :count] + o_first_BTJV).to(o.dtype), o[:, count:]], dim=1)


class _LogLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, lambda_, first_write, large, plan, scale):
        q, k, v, log_decay, lambda_ = (x.contiguous() for x in (q, k, v, log_decay, lambda_))
        tree, cumulative = chunk_writes(k, v, log_decay, plan)
        before = block_sums(cumulative[..., -1], plan)
        low = build_tree(tree, cumulative, before, first_write, large, plan, q.dtype)
        del tree
        o = output(q, k, v, lambda_, cumulative, before, low, plan, scale)
        ctx.save_for_backward(q, k, v, lambda_, cumulative, before, low)
        ctx.plan, ctx.scale = plan, scale
        ctx.has_first, ctx.has_large = first_write is not None, large is not None
        return o

    @staticmethod
    def backward(ctx, do):  # type: ignore[override]
        q, k, v, lambda_, cumulative, before, low = ctx.saved_tensors
        plan, scale, do = ctx.plan, ctx.scale, do.contiguous()
        parts = read_parts(q, do, lambda_, cumulative, before, plan, scale)
        dtree, merged = push_gradients(parts, low, cumulative, before, plan)
        del parts
        dq, dk, dv, dlambda, dlog_decay, read = gradient(
            q, k, v, do, lambda_, cumulative, before, low, dtree, plan, scale
        )
        dlog_decay += passing(read, merged, plan).index_select(2, plan.chunk_T).transpose(1, 2)
        N = plan.chunks
        dfirst = dtree[:, :, 0] if ctx.has_first else None
        dlarge = dtree[:, :, N:].transpose(1, 2) if ctx.has_large else None
        return dq, dk, dv, dlog_decay, dlambda, dfirst, dlarge, None, None


def chunk_writes(k, v, log_decay, plan: TreePlan):
    """The tree [B, J, S, K, V] fp32 with the chunks' writes in it, and the running sum of the log
    decay in each chunk [B, J, N, C] fp32."""
    (B, T, _, K), (J, V) = k.shape, v.shape[2:]
    tree_BJSKV = v.new_empty(B, J, plan.slots, K, V, dtype=torch.float32)
    cumulative_BJNC = v.new_empty(B, J, plan.chunks, CHUNK_LENGTH, dtype=torch.float32)
    block_v = min(PLAN.write_block_v, V)
    log_linear_write_kernel[(plan.chunks, B * J, V // block_v)](
        k,
        v,
        log_decay,
        plan.chunk_N4,
        cumulative_BJNC,
        tree_BJSKV,
        T,
        plan.slots,
        BLOCK_V=block_v,
        **shape_of(k, J, V),
        num_warps=PLAN.write_warps,
    )
    return tree_BJSKV, cumulative_BJNC


def block_sums(x, plan: TreePlan, *, reverse: bool = False):
    """[B, J, M, N] fp32: sums of x [B, J, N] or [B, J, M, N] over the chunks before each one
    (reverse: after it) in the block of 2^m chunks that it lies in."""
    B, J = x.shape[:2]
    sums_BJMN = x.new_empty(B, J, plan.bits, plan.chunks)
    if plan.bits:
        log_linear_block_sums_kernel[(plan.bits, B * J)](
            x,
            plan.chunk_N4,
            sums_BJMN,
            plan.chunks,
            x.stride(-1),
            int(x.dim() == 4),
            TILE=64,
            REVERSE=reverse,
        )
    return sums_BJMN


def build_tree(tree_BJSKV, cumulative, before, first_write, large_BSJKV, plan, dtype: torch.dtype):
    """The nodes [B, J, S, K, V] in dtype; the fp32 ones are left in `tree_BJSKV`."""
    B, J, S, K, V = tree_BJSKV.shape
    low_BJSKV = torch.empty_like(tree_BJSKV, dtype=dtype)
    N = plan.chunks
    if S > N:
        initial = 0.0 if large_BSJKV is None else large_BSJKV.transpose(1, 2)
        tree_BJSKV[:, :, N:] = initial
        low_BJSKV[:, :, N:] = initial
    block = min(PLAN.tree_block, K * V)
    log_linear_tree_kernel[(K * V // block, B * J, plan.stretches)](
        tree_BJSKV,
        low_BJSKV,
        cumulative,
        before,
        None if first_write is None else first_write.contiguous(),
        plan.chunk_N4,
        plan.stretch_R2,
        N,
        S,
        plan.bits,
        C=CHUNK_LENGTH,
        E=K * V,
        BLOCK=block,
        HAS_FIRST=first_write is not None,
        num_warps=PLAN.tree_warps,
    )
    return low_BJSKV


def output(q, k, v, lambda_, cumulative, before, low, plan: TreePlan, scale: float):
    (B, T), (J, V) = q.shape[:2], v.shape[2:]
    o_BTJV = torch.empty_like(v)
    log_linear_output_kernel[(plan.chunks, B * J)](
        q,
        k,
        v,
        lambda_,
        plan.chunk_N4,
        cumulative,
        before,
        low,
        o_BTJV,
        scale,
        T,
        plan.slots,
        plan.bits,
        L=lambda_.shape[-1],
        **shape_of(q, J, V),
        num_warps=PLAN.output_warps,
    )
    return o_BTJV


def read_parts(q, do, lambda_, cumulative, before, plan: TreePlan, scale: float):
    """What is read of the nodes, in parts [B, J, P, K, V] fp32."""
    (B, T, _, K), (J, V) = q.shape, do.shape[2:]
    parts_BJPKV = q.new_empty(B, J, plan.parts, K, V, dtype=torch.float32)
    block_v = min(PLAN.parts_block_v, V)
    if plan.parts:
        log_linear_parts_kernel[(plan.parts, B * J, V // block_v)](
            q,
            do,
            lambda_,
            plan.chunk_N4,
            plan.part_P4,
            cumulative,
            before,
            parts_BJPKV,
            scale,
            T,
            plan.chunks,
            plan.bits,
            L=lambda_.shape[-1],
            BLOCK_V=block_v,
            **shape_of(q, J, V),
            num_warps=PLAN.parts_warps,
        )
    return parts_BJPKV


def push_gradients(parts_BJPKV, low_BJSKV, cumulative, before, plan: TreePlan):
    """The nodes' gradients [B, J, S, K, V] fp32, and those of the log decay from each node's end to
    its parent's [B, J, S] fp32."""
    B, J, S, K, V = low_BJSKV.shape
    block = min(PLAN.tree_block, K * V)
    dtree_BJSKV = torch.empty_like(low_BJSKV, dtype=torch.float32)
    merged_QBJS = parts_BJPKV.new_empty(K * V // block, B, J, S)
    log_linear_push_kernel[(K * V // block, B * J, plan.stretches)](
        parts_BJPKV,
        low_BJSKV,
        cumulative,
        before,
        plan.node_S4,
        plan.stretch_R2,
        dtree_BJSKV,
        merged_QBJS,
        plan.chunks,
        S,
        plan.bits,
        plan.parts,
        C=CHUNK_LENGTH,
        E=K * V,
        BLOCK=block,
        num_warps=PLAN.tree_warps,
    )
    return dtree_BJSKV, merged_QBJS.sum(0)


def gradient(q, k, v, do, lambda_, cumulative, before, low, dtree, plan: TreePlan, scale: float):
    """The gradients of q, k, v, lambda, and the log decay's but for what passes whole chunks; and
    what each chunk reads of each node times its gradient [B, J, M, N] fp32."""
    (B, T, H, K), (J, V) = q.shape, v.shape[2:]
    dq_BTJK, dk_BTJK = q.new_empty(B, T, J, K), k.new_empty(B, T, J, K)
    dv_BTJV, dlambda_BTJL = torch.empty_like(v), torch.empty_like(lambda_)
    dlambda_BTJL[..., 7 + plan.bits :] = 0
    dlog_decay_BTJ = lambda_.new_empty(B, T, J)
    read_BJMN = torch.empty_like(before)
    log_linear_gradient_kernel[(plan.chunks, B * J)](
        q,
        k,
        v,
        do,
        lambda_,
        plan.chunk_N4,
        cumulative,
        before,
        low,
        dtree,
        dq_BTJK,
        dk_BTJK,
        dv_BTJV,
        dlambda_BTJL,
        dlog_decay_BTJ,
        read_BJMN,
        scale,
        T,
        plan.slots,
        plan.bits,
        L=lambda_.shape[-1],
        **shape_of(q, J, V),
        num_warps=PLAN.gradient_warps,
    )
    dq_BTHK, dk_BTHK = to_key_heads(dq_BTJK, H), to_key_heads(dk_BTJK, H)
    return dq_BTHK, dk_BTHK, dv_BTJV, dlambda_BTJL, dlog_decay_BTJ, read_BJMN


def passing(read_BJMN: Tensor, merged_BJS: Tensor, plan: TreePlan) -> Tensor:
    """[B, J, N]: the gradient of each chunk's log decay by the nodes that pass it, on to later
    reads and to the nodes that they become part of."""
    later_BJMN = block_sums(read_BJMN, plan, reverse=True)
    padded = torch.nn.functional.pad(merged_BJS, (0, 1))
    held_MN = plan.live_MN < plan.slots
    return ((later_BJMN + padded[:, :, plan.live_MN]) * held_MN).sum(2)
