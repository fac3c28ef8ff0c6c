"""One token of the delta rule on a GPU, from what the projections give, in one launch."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 32
"""Columns of the state of one program: 128 bytes of each row."""


def delta_rule_decode_triton(
    state_BJKV: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BJV: Tensor,
    decay_logit_BJ: Tensor | None,
    log_decay_rate_J: Tensor | None,
    dt_bias_J: Tensor | None,
    step_logit_BJ: Tensor,
    *,
    step_size: str,
    normalize_keys: bool,
    eps: float,
    scale: float,
) -> Tensor:
    """Arguments and result of `delta_rule_decode`, for K and V powers of 2.

    Raises:
        ValueError: a state that is not contiguous fp32.
    """
    if state_BJKV.dtype != torch.float32 or not state_BJKV.is_contiguous():
        raise ValueError(
            f"state_BJKV is {state_BJKV.dtype} with strides {state_BJKV.stride()}: the triton form "
            "writes contiguous fp32 in place"
        )
    (B, J, K, V), H = state_BJKV.shape, q_BHK.shape[1]
    block_v = min(BLOCK_V, V)
    o_BJV = torch.empty_like(v_BJV, memory_format=torch.contiguous_format)
    logit_BJ = None if decay_logit_BJ is None else decay_logit_BJ.contiguous()
    step_kernel[(V // block_v, B * J)](
        state_BJKV,
        q_BHK.contiguous(),
        k_BHK.contiguous(),
        v_BJV.contiguous(),
        logit_BJ,
        log_decay_rate_J,
        dt_bias_J,
        step_logit_BJ.contiguous(),
        o_BJV,
        scale,
        eps,
        H=H,
        J=J,
        K=K,
        V=V,
        BLOCK_V=block_v,
        STEP_SIZE=step_size,
        HAS_DECAY=logit_BJ is not None,
        NORMALIZE_KEYS=normalize_keys,
        num_warps=4,
    )
    return o_BJV


@triton.jit
def step_kernel(
    state_BJKV,
    q_BHK,
    k_BHK,
    v_BJV,
    decay_logit_BJ,
    log_decay_rate_J,
    dt_bias_J,
    step_logit_BJ,
    o_BJV,
    scale,
    eps,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    NORMALIZE_KEYS: tl.constexpr,
):
    """BLOCK_V columns of one value head's state, read and written once."""
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    key_K = tl.arange(0, K)
    value_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = (b * H + j // (J // H)) * K
    q_K = tl.load(q_BHK + head + key_K).to(tl.float32)
    k_K = tl.load(k_BHK + head + key_K).to(tl.float32)
    v_V = tl.load(v_BJV + bj * V + value_V).to(tl.float32)
    S_tile = state_BJKV + (bj * K + key_K)[:, None] * V + value_V[None, :]
    S_KV = tl.load(S_tile)
    if HAS_DECAY:
        x = tl.load(decay_logit_BJ + bj).to(tl.float32) + tl.load(dt_bias_J + j)
        S_KV *= tl.exp(-tl.exp(tl.load(log_decay_rate_J + j)) * _softplus(x))
    q_K = q_K / tl.maximum(tl.sqrt(tl.sum(q_K * q_K, 0)), 1e-12)
    if NORMALIZE_KEYS:
        k_K = k_K / tl.maximum(tl.sqrt(tl.sum(k_K * k_K, 0)), 1e-12)
    norm2 = tl.sum(k_K * k_K, 0)
    beta = 1 / (1 + tl.exp(-tl.load(step_logit_BJ + bj).to(tl.float32)))
    if STEP_SIZE == "kaczmarz":
        beta = beta / (norm2 + eps)
    elif STEP_SIZE == "longhorn":
        beta = beta / (1 + beta * norm2)
    error_V = v_V - tl.sum(S_KV * k_K[:, None], 0)
    S_KV += (beta * k_K)[:, None] * error_V[None, :]
    tl.store(S_tile, S_KV)
    o_V = scale * tl.sum(S_KV * q_K[:, None], 0)
    tl.store(o_BJV + bj * V + value_V, o_V.to(o_BJV.dtype.element_ty))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); the logarithm by its series of atanh, to the last places of small ones."""
    small = tl.exp(-tl.abs(x))
    s = small / (2 + small)
    z = s * s
    series = 1 / 9 + z * (1 / 11 + z * (1 / 13))
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * series)))
    return tl.maximum(x, 0.0) + 2 * s * series
