"""The public op: strictly causal attention with each token's own term merged in."""

from typing import Literal, get_args

import torch
from torch import Tensor

from mixtron.kernels.sd_attention import blockwise, flash, triton_op

Backend = Literal["blockwise", "triton"]


def sd_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    d_TH: Tensor,
    lengths: list[int] | None,
    cu_seqlens: Tensor,
    *,
    scale: float,
    backend: Backend = "blockwise",
) -> Tensor:
    """Causal softmax of L = S - D inside each document (arXiv 2605.18826).

        S_ij = scale (q_i . k_j - k_i . q_j),   D = diag(d),   o_i = sum_{j<=i} softmax_j(L_ij) v_j

    Args:
        q_THK, k_THK  [T, H, K]  fp64, fp32, bf16 or fp16; v has the same dtype.
        v_THV         [T, H, V]  V at most 2K on a GPU in bf16 and fp16.
        d_TH          [T, H]     >= 0, fp32 or fp64.
        lengths       the documents' lengths on the host; they sum to T. The triton form reads none.
        cu_seqlens    [N+1] int32 on the device, may be padded by repeating T.
        scale         positive.
        backend       "blockwise" on any device (on a GPU in bf16 and fp16 by FlashAttention),
                      "triton" for bf16 on a GPU with K and V of 64 or 128.
    Returns:
        [T, H, V] in v's dtype. Memory is linear in T, forward and backward, and nothing waits for
        the device.
    Raises:
        ValueError: shapes, dtypes or widths that do not fit, or no lengths.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(get_args(Backend))}")
    _check(q_THK, k_THK, v_THV, d_TH)
    if backend == "triton":
        triton_op.check(q_THK, v_THV, scale)
        return triton_op.TritonSDAttention.apply(  # type: ignore[return-value]
            q_THK, k_THK, v_THV, d_TH, cu_seqlens, scale
        )
    if lengths is None:
        raise ValueError(f"lengths is None: backend={backend!r} reads them on the host")
    if sum(lengths) != len(q_THK):
        raise ValueError(f"documents of {sum(lengths)} tokens do not fit q of {len(q_THK)}")
    _check_flash_widths(q_THK, v_THV)
    return _SDAttention.apply(q_THK, k_THK, v_THV, d_TH, lengths, cu_seqlens, scale)  # type: ignore[return-value]


def _check(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, d_TH: Tensor) -> None:
    T, H, _ = q_THK.shape
    if k_THK.shape != q_THK.shape or v_THV.shape[:2] != (T, H) or d_TH.shape != (T, H):
        raise ValueError(
            f"q {list(q_THK.shape)}, k {list(k_THK.shape)}, v {list(v_THV.shape)} and "
            f"d {list(d_TH.shape)} do not fit: expected [T, H, K] twice, [T, H, V] and [T, H]"
        )
    if d_TH.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"d_TH is {d_TH.dtype}, expected fp32 or fp64")


def _check_flash_widths(q_THK: Tensor, v_THV: Tensor) -> None:
    K = q_THK.shape[-1]
    if _on_flash(q_THK) and (2 * K > flash.MAX_WIDTH or v_THV.shape[-1] > 2 * K):
        raise ValueError(
            f"K={K}, V={v_THV.shape[-1]}: FlashAttention takes K up to {flash.MAX_WIDTH // 2} "
            "and V up to 2K"
        )


def _on_flash(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


class _SDAttention(torch.autograd.Function):
    """S is the score of q' = [q; -k] and k' = [k; q]. See README.md for the merge."""

    @staticmethod
    def forward(ctx, q_THK, k_THK, v_THV, d_TH, lengths, cu_seqlens, scale):
        q_THE, k_THE = _doubled(q_THK, k_THK)
        if _on_flash(q_THK):
            before = flash.forward(q_THE, k_THE, v_THV, cu_seqlens, max(lengths), scale)
        else:
            before = blockwise.forward(q_THE, k_THE, v_THV, lengths, scale)
        o_THV, z_TH = before
        d_TH = d_TH.to(z_TH.dtype)
        total_TH = torch.logaddexp(z_TH, -d_TH)
        o_THV = (z_TH - total_TH).exp()[..., None] * o_THV
        o_THV = (o_THV + (-d_TH - total_TH).exp()[..., None] * v_THV).to(v_THV.dtype)
        ctx.save_for_backward(q_THK, k_THK, v_THV, d_TH, o_THV, total_TH, cu_seqlens)
        ctx.lengths, ctx.scale = lengths, scale
        return o_THV

    @staticmethod
    def backward(ctx, do_THV):  # type: ignore[override]
        q_THK, k_THK, v_THV, d_TH, o_THV, z_TH, cu_seqlens = ctx.saved_tensors
        q_THE, k_THE = _doubled(q_THK, k_THK)
        do = do_THV.to(z_TH.dtype)
        delta_TH = (do * o_THV).sum(-1)
        if _on_flash(q_THK):
            dq_THE, dk_THE, dv_THV = flash.backward(
                do_THV, q_THE, k_THE, v_THV, o_THV, z_TH, cu_seqlens, max(ctx.lengths), ctx.scale
            )
        else:
            dq_THE, dk_THE, dv_THV = blockwise.backward(
                do_THV, q_THE, k_THE, v_THV, delta_TH, z_TH, ctx.lengths, ctx.scale
            )
        own_TH = (-d_TH - z_TH).exp()
        dd_TH = -own_TH * ((do * v_THV).sum(-1) - delta_TH)
        dv_THV = dv_THV + own_TH[..., None] * do
        (dq_first, dq_second), (dk_first, dk_second) = dq_THE.chunk(2, -1), dk_THE.chunk(2, -1)
        dq_THK, dk_THK = dq_first + dk_second, dk_first - dq_second
        dtype = q_THK.dtype
        return dq_THK.to(dtype), dk_THK.to(dtype), dv_THV.to(dtype), dd_TH, None, None, None


def _doubled(q_THK: Tensor, k_THK: Tensor) -> tuple[Tensor, Tensor]:
    """q' and k' of width E = 2K, whose products are S."""
    return torch.cat([q_THK, -k_THK], -1), torch.cat([k_THK, q_THK], -1)
