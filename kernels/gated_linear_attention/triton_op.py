"""Gated linear attention with one decay a head on a GPU: launches the kernels and gives them to
autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mixtron.kernels.gated_linear_attention.triton_backward import key_kernel, query_kernel
from mixtron.kernels.gated_linear_attention.triton_forward import (
    output_kernel,
    scan_kernel,
    write_kernel,
)
from mixtron.kernels.recurrence import document_starts
from mixtron.kernels.triton_tools import INTERPRETED, product_dtype

CHUNK_LENGTH = 64
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Plan:
    """How the kernels are cut and launched; no search at run time, which would let ranks differ."""

    write_block_v: int = 64
    write_warps: int = 4
    scan_block: int = 1024
    scan_warps: int = 4
    scan_stages: int = 4
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
    fp32_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op, unchecked; V may be 16 too, and o be left in fp32."""
    return _GatedLinear.apply(  # type: ignore[return-value]
        q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, initial_state_BJKV, cu_seqlens, scale, fp32_output
    )


def check_triton(q_BTHK: Tensor, v_BTJV: Tensor) -> None:
    """Raises ValueError for what the kernels are not written for."""
    K, V = q_BTHK.shape[-1], v_BTJV.shape[-1]
    if INTERPRETED:
        return
    if q_BTHK.device.type != "cuda" or q_BTHK.dtype != torch.bfloat16:
        raise ValueError(
            f"q_BTHK is {q_BTHK.dtype} on {q_BTHK.device}: the triton form takes bf16 on a GPU"
        )
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        raise ValueError(f"K={K}, V={V}: the triton form takes 64 or 128 for each")


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, initial, cu_seqlens, scale, fp32_output):
        q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
        document_T = document_numbers(cu_seqlens, q.shape[1])
        write, across = chunk_writes(k, v, log_decay, document_T)
        states, final = scan(write, across, initial, q.dtype, reverse=False)
        o = output(q, k, v, log_decay, document_T, states, scale, fp32_output)
        ctx.save_for_backward(q, k, v, log_decay, document_T, across, states)
        ctx.scale = scale
        ctx.has_initial = initial is not None
        return o, final

    @staticmethod
    def backward(ctx, do, dfinal):  # type: ignore[override]
        q, k, v, log_decay, document_T, across, states = ctx.saved_tensors
        do = do.contiguous()
        dq, dlog_decay, read = query_gradients(
            q, k, v, do, log_decay, document_T, states, ctx.scale
        )
        dstates, dinitial = scan(read, across, dfinal, q.dtype, reverse=True)
        del read
        dk, dv = key_gradients(
            q, k, v, do, log_decay, document_T, states, dstates, dlog_decay, ctx.scale
        )
        return dq, dk, dv, dlog_decay, dinitial if ctx.has_initial else None, None, None, None


def document_numbers(cu_seqlens: Tensor | None, tokens: int) -> Tensor | None:
    """[T] int32: rises where a document starts."""
    if cu_seqlens is None:
        return None
    return document_starts(cu_seqlens, tokens).cumsum(0, dtype=torch.int32)


def shape_of(x_BTHK: Tensor, J: int, V: int) -> dict:
    """What the kernels are compiled for."""
    H, K = x_BTHK.shape[2:]
    product = product_dtype(x_BTHK.dtype)
    return {"H": H, "J": J, "K": K, "V": V, "C": CHUNK_LENGTH, "PRODUCT": product}


def chunk_writes(k, v, log_decay, document_T):
    """What each chunk adds to the state [B, J, N, K, V] and the decay across it [B, J, N], fp32."""
    (B, T, _, K), (J, V) = k.shape, v.shape[2:]
    N = triton.cdiv(T, CHUNK_LENGTH)
    write_BJNKV = v.new_empty(B, J, N, K, V, dtype=torch.float32)
    across_BJN = v.new_empty(B, J, N, dtype=torch.float32)
    block_v = min(PLAN.write_block_v, V)
    write_kernel[(N, B * J, V // block_v)](
        k,
        v,
        log_decay,
        document_T,
        write_BJNKV,
        across_BJN,
        T,
        BLOCK_V=block_v,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(k, J, V),
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
    scan_kernel[(K * V // block, B * J)](
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
    output_kernel[(triton.cdiv(T, CHUNK_LENGTH), B * J)](
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


def query_gradients(q, k, v, do, log_decay, document_T, states, scale: float):
    """dq; what queries give to the gradients of the log decay's running sums [B, T, J], and of the
    states [B, J, N, K, V] fp32."""
    (B, T, H, K), J = q.shape, v.shape[2]
    dq_BTJK = q.new_empty(B, T, J, K)
    dG_BTJ = torch.empty_like(log_decay, dtype=torch.float32)
    read_BJNKV = torch.empty_like(states, dtype=torch.float32)
    query_kernel[(states.shape[2], B * J)](
        q,
        k,
        v,
        do,
        log_decay,
        document_T,
        states,
        dq_BTJK,
        dG_BTJ,
        read_BJNKV,
        scale,
        T,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(q, J, v.shape[3]),
        num_warps=PLAN.query_warps,
    )
    return to_key_heads(dq_BTJK, H), dG_BTJ, read_BJNKV


def key_gradients(q, k, v, do, log_decay, document_T, states, dstates, dG_BTJ, scale: float):
    """dk and dv; and in place of `dG_BTJ` the gradient of the log decay."""
    (B, T, H, K), J = q.shape, v.shape[2]
    dk_BTJK, dv_BTJV = k.new_empty(B, T, J, K), torch.empty_like(v)
    key_kernel[(states.shape[2], B * J)](
        q,
        k,
        v,
        do,
        log_decay,
        document_T,
        states,
        dstates,
        dk_BTJK,
        dv_BTJV,
        dG_BTJ,
        scale,
        T,
        HAS_DOCUMENTS=document_T is not None,
        **shape_of(q, J, v.shape[3]),
        num_warps=PLAN.key_warps,
    )
    return to_key_heads(dk_BTJK, H), dv_BTJV


def to_key_heads(x_BTJK: Tensor, H: int) -> Tensor:
    """The sum over the value heads that share a query/key head."""
    if x_BTJK.shape[2] == H:
        return x_BTJK
    return x_BTJK.unflatten(2, (H, -1)).sum(3)
