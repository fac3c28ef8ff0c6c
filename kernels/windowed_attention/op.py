"""The public op: checks what it is given and runs the form that is asked for."""

import torch
from torch import Tensor

from mixtron.kernels.windowed_attention import triton_op
from mixtron.kernels.windowed_attention.permutation import Backend
from mixtron.kernels.windowed_attention.plan import WindowPlan
from mixtron.kernels.windowed_attention.tiled import TiledAttention

FORMS = {"tiled": TiledAttention, "triton": triton_op.TritonAttention}

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def windowed_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    plan: WindowPlan,
    *,
    scale: float | None = None,
    backend: Backend = "tiled",
) -> Tensor:
    """o_i = sum_j softmax_j(scale q_i . k_j) v_j over the tokens j that i attends.

    Those of i's document that are not after it and whose slots in the plan's permuted order lie in
    the window around i's slot (Stochastic Attention, arXiv 2604.00754; in the plain order,
    one-sided, sliding-window attention).

    Args:
        q_THK  [T, H, K]  fp64, fp32, bf16 or fp16; k and v have the same dtype.
        k_SGK  [S, G, K]  query head h reads key/value head h // (H/G).
        v_SGV  [S, G, V]
        plan   of `plan_windows`, which fixes T and S, the rows that it expects. Shared by all
               heads, and by layers with the same order.
        scale  None is K^-1/2.
        backend  "tiled" in torch on any device; "triton" for bf16 on a GPU with K and V of 64 or
                 128 and a positive scale.
    Returns:
        [T, H, V] in q's dtype, rows as in q. Softmax and sums are in fp32 (fp64 for fp64).
    Raises:
        ValueError: an argument whose shape, dtype or device does not fit.
    """
    T, S = plan.queries.rows, plan.keys.rows
    if q_THK.dim() != 3 or q_THK.shape[0] != T or q_THK.dtype not in DTYPES:
        raise ValueError(
            f"q_THK is {q_THK.dtype} {list(q_THK.shape)}, expected [{T}, H, K] in a float dtype"
        )
    _, H, K = q_THK.shape
    if k_SGK.dim() != 3 or k_SGK.shape[0] != S or k_SGK.shape[2] != K or H % k_SGK.shape[1]:
        raise ValueError(
            f"k_SGK is {list(k_SGK.shape)}, expected [{S}, G, {K}] with {H} a multiple of G"
        )
    if v_SGV.dim() != 3 or v_SGV.shape[:2] != k_SGK.shape[:2]:
        raise ValueError(
            f"v_SGV is {list(v_SGV.shape)}, expected [{S}, {k_SGK.shape[1]}, V] as in k_SGK"
        )
    for name, x in (("k_SGK", k_SGK), ("v_SGV", v_SGV)):
        if (x.dtype, x.device) != (q_THK.dtype, q_THK.device):
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, expected q's {q_THK.dtype} on {q_THK.device}"
            )
    scale = float(K**-0.5 if scale is None else scale)
    if backend not in FORMS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(FORMS)}")
    if backend == "triton":
        triton_op.check(q_THK, v_SGV, scale)
    return FORMS[backend].apply(q_THK, k_SGK, v_SGV, plan, scale)  # type: ignore[return-value]
