"""Gated linear attention with one decay a head on a GPU: launches the kernels and gives them to
autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mixtron.kernels import recurrence
from mixtron.kernels.gated_linear_attention.triton_backward import gla_key_kernel, gla_query_kernel
from mixtron.kernels.gated_linear_attention.triton_forward import (
    gla_output_kernel,
    gla_scan_kernel,
    gla_state_kernel,
    gla_weight_kernel,
    gla_write_kernel,
)
from mixtron.kernels.triton_tools import product_dtype

CHUNK_LENGTH = 64


@dataclass(frozen=True)
class Plan:
    """How the kernels are cut and launched; no search at run time, which would let ranks differ."""

    write_block_v: int = 64
    write_warps: int = 4
    scan_block: int = 1024
    scan_warps: int = 4
    scan_stages: int = 4
    state_block: int = 64
    state_warps: int = 4
    state_stages: int = 3
    fewest_programs: int = 128
    """With so many tiles of states one walk makes them; with fewer, a GPU would be left empty."""
    output_warps: int = 4
    query_warps: int = 4
    key_warps: int = 4


PLAN = Plan()


def run_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    initial_state_BJKV: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    rows: int,
    fp32_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op, unchecked; V may be 16 too, and o be left in fp32."""
    inputs = (q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ)
    options = (cu_seqlens, scale, fp32_output)
    return side_by_side(_GatedLinear, rows, inputs, initial_state_BJKV, *options)


def side_by_side(
    op: type[torch.autograd.Function],
    rows: int,
    inputs: Sequence[Tensor],
    initial_BJKV: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The op's output and final state, with one stream's rows as a batch: nothing passes from row
    to row."""
    if rows == 1:
        return op.apply(*inputs, initial_BJKV, *options)  # type: ignore[return-value]
    if initial_BJKV is not None:
        initial_BJKV = F.pad(initial_BJKV, (0,) * 7 + (rows - 1,))
    in_rows = [x[0].unflatten(0, (rows, -1)) for x in inputs]
    o_BTJV, final_BJKV = op.apply(*in_rows, initial_BJKV, *options)  # type: ignore[misc]
    return o_BTJV.flatten(0, 1)[None], final_BJKV[-1:]


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, initial, cu_seqlens, scale, fp32_output):
        q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
        document_T = document_numbers(cu_seqlens, q.shape[0] * q.shape[1])
        weights = chunk_weights(k, v, log_decay, document_T)
        if weights is None:
            write, across = chunk_products(k, v, log_decay, document_T, None)
            states, final = scan(write, across, initial, q.dtype, reverse=False)
            del write
        else:
            _, to_end, across = weights
            states, final = one_scan(k, v, to_end, across, initial, 1.0, reverse=False)
        o = output(q, k, v, log_decay, document_T, states, scale, fp32_output)
        from_start = None if weights is None else weights[0]
        ctx.save_for_backward(q, k, v, log_decay, document_T, across, states, from_start)
        ctx.scale = scale
        ctx.has_initial = initial is not None
        return o, final

    @staticmethod
    def backward(ctx, do, dfinal):  # type: ignore[override]
        q, k, v, log_decay, document_T, across, states, from_start = ctx.saved_tensors
        do = do.contiguous()
        if from_start is None:
            read, _ = chunk_products(q, do, log_decay, document_T, ctx.scale)
            dstates, dinitial = scan(read, across, dfinal, q.dtype, reverse=True)
            del read
        else:
            options = (across, dfinal, ctx.scale)
            dstates, dinitial = one_scan(q, do, from_start, *options, reverse=True)
        dq, dk, dv, dlog_decay = gradient(
            q, k, v, do, log_decay, document_T, states, dstates, ctx.scale
        )
        return dq, dk, dv, dlog_decay, dinitial if ctx.has_initial else None, None, None, None


def document_numbers(cu_seqlens: Tensor | None, tokens: int) -> Tensor | None:
    """[T] int32: rises where a document starts."""
    return None if cu_seqlens is None else recurrence.document_numbers(cu_seqlens, tokens)


def shape_of(x_BTHK: Tensor, J: int, V: int) -> dict:
    """What the kernels are compiled for."""
    H, K = x_BTHK.shape[2:]
    product = product_dtype(x_BTHK.dtype)
    return {"H": H, "J": J, "K": K, "V": V, "C": CHUNK_LENGTH, "PRODUCT": product}


def state_tiles(K: int, V: int) -> tuple[int, int, int]:
    """A tile's rows and columns, and their number."""
    block_k, block_v = min(PLAN.state_block, K), min(PLAN.state_block, V)
    return block_k, block_v, (K // block_k) * (V // block_v)


def chunk_weights(k, v, log_decay, document_T) -> tuple[Tensor, Tensor, Tensor] | None:
    """What `one_scan` needs: decays from chunks' starts and to their ends [B, T, J], and across
    [B, J, N]; or None where two steps are better."""
    B, T, J = log_decay.shape
    if B * J * state_tiles(k.shape[3], v.shape[3])[2] < PLAN.fewest_programs:
        return None
    N = triton.cdiv(T, CHUNK_LENGTH)
    from_start_BTJ = torch.empty_like(log_decay, dtype=torch.float32)
    to_end_BTJ = torch.empty_like(from_start_BTJ)
    across_BJN = from_start_BTJ.new_empty(B, J, N)
    gla_weight_kernel[(N, B * J)](
        log_decay,
        document_T,
        from_start_BTJ,
        to_end_BTJ,
        across_BJN,
        T,
        J=J,
        C=CHUNK_LENGTH,
        HAS_DOCUMENTS=document_T is not None,
        num_warps=4,
    )
    return from_start_BTJ, to_end_BTJ, across_BJN


def one_scan(x, y, weight_BTJ, across_BJN, edge_BJKV, scale: float, *, reverse: bool):
    """What `chunk_products` and `scan` make together."""
    (B, T, _, K), (J, V) = x.shape, y.shape[2:]
    block_k, block_v, tiles = state_tiles(K, V)
    states_BJNKV = x.new_empty(B, J, across_BJN.shape[2], K, V)
    end_BJKV = x.new_empty(B, J, K, V, dtype=torch.float32)
    gla_state_kernel[(tiles, B * J)](
        x,
        y,
        weight_BTJ,
        across_BJN,
        None if edge_BJKV is None else edge_BJKV.contiguous(),
        states_BJNKV,
        end_BJKV,
        scale,
        T,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        HAS_EDGE=edge_BJKV is not None,
        REVERSE=reverse,
        STAGES=PLAN.state_stages,
        **shape_of(x, J, V),
        num_warps=PLAN.state_warps,
    )
    return states_BJNKV, end_BJKV


def chunk_products(x, y, log_decay, document_T, read_scale: float | None):
    """Each chunk's x^T (weight y) [B, J, N, K, V] fp32; without `read_scale`, for keys and values,
    also the decay across it [B, J, N] fp32."""
    (B, T, _, K), (J, V) = x.shape, y.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    write_BJNKV = y.new_empty(B, J, N, K, V, dtype=torch.float32)
    across_BJN = None
    if read_scale is None:
        across_BJN = y.new_empty(B, J, N, dtype=torch.float32)
    block_v = min(PLAN.write_block_v, V)
    gla_write_kernel[(N, B * J, V // block_v)](
        x,
        y,
        log_decay,
        document_T,
        write_BJNKV,
        across_BJN,
        read_scale or 1.0,
        T,
        BLOCK_V=block_v,
        READS=read_scale is not None,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(x, J, V),
        num_warps=PLAN.write_warps,
    )
    return write_BJNKV, across_BJN


def scan(write_BJNKV, across, edge_BJKV, dtype: torch.dtype, *, reverse: bool):
    """The states before the chunks, in dtype, and after the last, fp32; backwards, their gradients
    after the chunks, and before the first."""
    B, J, N, K, V = write_BJNKV.shape
    states_BJNKV = write_BJNKV.new_empty(B, J, N, K, V, dtype=dtype)
    end_BJKV = write_BJNKV.new_empty(B, J, K, V)
    block = min(PLAN.scan_block, K * V)
    gla_scan_kernel[(K * V // block, B * J)](
        write_BJNKV,
        across,
        None if edge_BJKV is None else edge_BJKV.contiguous(),
        states_BJNKV,
        end_BJKV,
        N,
        H=across.shape[1],
        J=J,
        K=K,
        V=V,
        PER_CHANNEL=across.dim() == 4,
        BLOCK=block,
        HAS_EDGE=edge_BJKV is not None,
        REVERSE=reverse,
        STAGES=PLAN.scan_stages,
        num_warps=PLAN.scan_warps,
    )
    return states_BJNKV, end_BJKV


def output(q, k, v, log_decay, document_T, states, scale: float, fp32_output: bool):
    (B, T), (J, V) = q.shape[:2], v.shape[2:]
    o_BTJV = torch.empty_like(v, dtype=torch.float32 if fp32_output else v.dtype)
    gla_output_kernel[(triton.cdiv(T, CHUNK_LENGTH), B * J)](
        q,
        k,
        v,
        log_decay,
        document_T,
        states,
        o_BTJV,
        scale,
        T,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(q, J, V),
        num_warps=PLAN.output_warps,
    )
    return o_BTJV


def gradient(q, k, v, do, log_decay, document_T, states, dstates, scale: float):
    """The gradients of q, k, v and the log decay."""
    (B, T, H, K), (J, V) = q.shape, v.shape[2:]
    dq_BTJK, dk_BTJK = q.new_empty(B, T, J, K), k.new_empty(B, T, J, K)
    dv_BTJV, dlog_decay_BTJ = torch.empty_like(v), torch.empty_like(log_decay)
    dG_BTJ = torch.empty_like(log_decay, dtype=torch.float32)
    grid = (triton.cdiv(T, CHUNK_LENGTH), B * J)
    inputs = (q, k, v, do, log_decay, document_T, states)
    shape = {"HAS_DOCUMENTS": document_T is not None, **shape_of(q, J, V)}
    gla_query_kernel[grid](*inputs, dq_BTJK, dG_BTJ, scale, T, **shape, num_warps=PLAN.query_warps)
    gla_key_kernel[grid](
        *inputs,
        dstates,
        dk_BTJK,
        dv_BTJV,
        dG_BTJ,
        dlog_decay_BTJ,
        scale,
        T,
        **shape,
        num_warps=PLAN.key_warps,
    )
    return to_key_heads(dq_BTJK, H), to_key_heads(dk_BTJK, H), dv_BTJV, dlog_decay_BTJ


def to_key_heads(x_BTJK: Tensor, H: int) -> Tensor:
    """The sum over the value heads that share a query/key head."""
    if x_BTJK.shape[2] == H:
        return x_BTJK
    return x_BTJK.unflatten(2, (H, -1)).sum(3)
