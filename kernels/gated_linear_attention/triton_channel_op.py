"""Gated linear attention on a GPU: the public form; and with one decay a key channel, what launches
the kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import math

import torch
import triton
from torch import Tensor

from mixtron.kernels.gated_linear_attention import triton_channel as kernels
from mixtron.kernels.gated_linear_attention.triton_op import (
    CHUNK_LENGTH,
    document_numbers,
    run_triton,
    scan,
    shape_of,
    side_by_side,
)
from mixtron.kernels.triton_tools import check_takes

SUBCHUNK_LENGTH = 16
WARPS = {"sums": 4, "write": 4, "scores": 8, "output": 4, "query": 8, "key": 8}


def gated_linear_attention_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state_BJKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: int = 1,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `gated_linear_attention`, for bf16 on a GPU; K and V of 64 or 128.

    Raises:
        ValueError: a dtype, device or width that it cannot take.
    """
    check_takes(q_BTHK, v_BTJV, "q_BTHK")
    if scale is None:
        scale = 1 / math.sqrt(q_BTHK.shape[-1])
    inputs = (q_BTHK, k_BTHK, v_BTJV, log_decay)
    options = (initial_state_BJKV, cu_seqlens, scale)
    if log_decay.dim() == 3:
        return run_triton(*inputs, *options, rows)
    return side_by_side(GatedLinearChannel, rows, inputs, *options)


class GatedLinearChannel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, initial, cu_seqlens, scale):
        q, k, v, log_decay = (x.contiguous() for x in (q, k, v, log_decay))
        (B, T, H, K), (J, V), N = q.shape, v.shape[2:], triton.cdiv(q.shape[1], CHUNK_LENGTH)
        document_T = document_numbers(cu_seqlens, B * T)
        per_value, per_key = _options(q, v, document_T)
        fp32 = {"dtype": torch.float32}
        G_BHTK = q.new_empty(B, H, N * CHUNK_LENGTH, K, **fp32)
        across_BHNK = q.new_empty(B, H, N, K, **fp32)
        P_BHTC = q.new_empty(B, H, N * CHUNK_LENGTH, CHUNK_LENGTH)
        write_BJNKV = q.new_empty(B, J, N, K, V, **fp32)
        o_BTJV = torch.empty_like(v)
        sums_options = {name: per_key[name] for name in ("H", "K", "C", "HAS_DOCUMENTS")}
        kernels.gla_channel_sums_kernel[(N, B * H)](
            log_decay, document_T, G_BHTK, across_BHNK, T,
            **sums_options, num_warps=WARPS["sums"],
        )  # fmt: skip
        kernels.gla_channel_write_kernel[(N, B * J)](
            k, v, document_T, G_BHTK, write_BJNKV, T, **per_value, num_warps=WARPS["write"],
        )  # fmt: skip
        states_BJNKV, final_BJKV = scan(write_BJNKV, across_BHNK, initial, q.dtype, reverse=False)
        del write_BJNKV
        kernels.gla_channel_scores_kernel[(N, B * H)](
            q, k, document_T, G_BHTK, P_BHTC, scale, T,
            **per_key, SUB=SUBCHUNK_LENGTH, num_warps=WARPS["scores"],
        )  # fmt: skip
        kernels.gla_channel_output_kernel[(N, B * J)](
            q, v, document_T, G_BHTK, P_BHTC, states_BJNKV, o_BTJV, scale, T,
            **per_value, num_warps=WARPS["output"],
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, document_T, G_BHTK, across_BHNK, P_BHTC, states_BJNKV)
        ctx.scale = scale
        ctx.has_initial = initial is not None
        return o_BTJV, final_BJKV

    @staticmethod
    def backward(ctx, do, dfinal):  # type: ignore[override]
        q, k, v, document_T, G_BHTK, across_BHNK, P_BHTC, states_BJNKV = ctx.saved_tensors
        do, scale = do.contiguous(), ctx.scale
        (B, T, H, _), N = q.shape, states_BJNKV.shape[2]
        per_value, _ = _options(q, v, document_T)
        per_value["SUB"] = SUBCHUNK_LENGTH
        dq_BTHK, dk_BTHK, dv_BTJV = (torch.empty_like(x) for x in (q, k, v))
        dlog_decay_BTHK = torch.empty_like(q, dtype=torch.float32)
        dP_BHTC = torch.empty_like(P_BHTC)
        read_BJNKV = torch.empty_like(states_BJNKV, dtype=torch.float32)
        kernels.gla_channel_query_kernel[(N, B * H)](
            q, k, v, do, document_T, G_BHTK, states_BJNKV,
            dq_BTHK, dlog_decay_BTHK, dP_BHTC, read_BJNKV, scale, T,
            **per_value, num_warps=WARPS["query"], num_stages=1,
        )  # fmt: skip
        dstates_BJNKV, dinitial = scan(read_BJNKV, across_BHNK, dfinal, q.dtype, reverse=True)
        del read_BJNKV
        kernels.gla_channel_key_kernel[(N, B * H)](
            q, k, v, do, document_T, G_BHTK, across_BHNK, P_BHTC, dP_BHTC,
            states_BJNKV, dstates_BJNKV, dk_BTHK, dv_BTJV, dlog_decay_BTHK, T,
            **per_value, num_warps=WARPS["key"], num_stages=1,
        )  # fmt: skip
        dinitial = dinitial if ctx.has_initial else None
        return dq_BTHK, dk_BTHK, dv_BTJV, dlog_decay_BTHK, dinitial, None, None


def _options(q, v, document_T) -> tuple[dict, dict]:
    """What kernels of value heads and kernels of key heads are compiled for."""
    per_value = shape_of(q, *v.shape[2:]) | {"HAS_DOCUMENTS": document_T is not None}
    per_key = {name: x for name, x in per_value.items() if name not in ("J", "V")}
    return per_value, per_key
