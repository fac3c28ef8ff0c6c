"""The public op: checks what it is given and calls the form that is asked for."""

from typing import Literal, get_args

import torch
from torch import Tensor

from mixtron.kernels.delta_rule.chunk import delta_rule_chunk, segment_map_chunk
from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.delta_rule.reference import delta_rule_reference
from mixtron.kernels.delta_rule.triton_op import delta_rule_triton, segment_map_triton
from mixtron.kernels.norms import unit_norm
from mixtron.kernels.recurrence import check_documents, check_gate, check_inputs, check_rows

Backend = Literal["chunk", "triton", "reference"]
BACKENDS = {
    "chunk": delta_rule_chunk,
    "triton": delta_rule_triton,
    "reference": delta_rule_reference,
}


def delta_rule(
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
    backend: Backend = "chunk",
) -> tuple[Tensor, Tensor]:
    """Gated delta rule with the step size of Kaczmarz Linear Attention (arXiv 2605.08587).

        S~_t = exp(log_decay_t) S_{t-1},   S_t = S~_t + beta_t k_t (v_t - S~_t^T k_t)^T
        o_t = scale S_t^T q_t

    `step_size` gives beta: "kaczmarz" eta/(|k|^2 + eps), "learned" eta (Gated DeltaNet, DeltaNet),
    "longhorn" eta/(1 + eta |k|^2). q and k are used as they come, or q as
    q / |q|: what else a mixer L2-normalises (Gated DeltaNet: k), its caller does.

    Args:
        q_BTHK, k_BTHK      [B, T, H, K]  fp64, fp32, bf16 or fp16; v has the same dtype.
        v_BTJV              [B, T, J, V]  J a multiple of H; value head j reads head j // (J/H).
        log_decay_BTJ       [B, T, J]     <= 0, fp32 or fp64; None: the state is never forgotten.
        eta_BTJ             [B, T, J]     in [0, 1], fp32 or fp64.
        scale               of the output; None is K^-1/2.
        initial_state_BJKV  [B, J, K, V]  fp32 or fp64; None is zero.
        cu_seqlens          [N+1] int32 or int64 on q's device, with B = 1: document n is the tokens
                            cu_seqlens[n] .. cu_seqlens[n+1]. From 0 to T, not decreasing; empty
                            documents are skipped, so it may be padded by repeating T. None: each
                            of the B rows is one document.
        rows                in how many parts of equal length, each beginning a document of
                            cu_seqlens, the tokens fall: the triton form runs through them side by
                            side.
        unit_queries        L2-normalise q first; in the triton form without a copy of q.
        backend             "chunk" in torch on any device; "triton" for bf16 on a GPU with K and V
                            of 64 or 128; "reference" token by token.
    Documents: the state is empty at the start of every document but the first, which starts from
    `initial_state_BJKV` (the state of the rank before, when it continues a document from there).
    Returns:
        o_BTJV [B, T, J, V] in v's dtype, and the state after the last token, [B, J, K, V] in fp32
        (fp64 for fp64 inputs): what the rank after needs when the last document continues there.
    Raises:
        ValueError: an argument whose shape, dtype, device or value does not fit. The values of
            cu_seqlens are read on a CPU only: on a GPU that would wait for the device.
    """
    check_inputs(q_BTHK, k_BTHK, v_BTJV)
    B, T, _, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    check_gate("eta_BTJ", eta_BTJ, [(B, T, J)], q_BTHK)
    if log_decay_BTJ is not None:
        check_gate("log_decay_BTJ", log_decay_BTJ, [(B, T, J)], q_BTHK)
    if initial_state_BJKV is not None:
        check_gate("initial_state_BJKV", initial_state_BJKV, [(B, J, K, V)], q_BTHK)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q_BTHK)
    if rows != 1:
        check_rows(rows, cu_seqlens, T)
    for name, value, known in (
        ("step_size", step_size, get_args(StepSize)),
        ("backend", backend, tuple(BACKENDS)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    options = {}
    if backend == "triton":
        options = {"rows": rows, "unit_queries": unit_queries}
    elif unit_queries:
        # Triton's norm takes no fp64.
        q_BTHK = unit_norm(q_BTHK, backend="torch" if q_BTHK.dtype == torch.float64 else None)
    return BACKENDS[backend](
        q_BTHK,
        k_BTHK,
        v_BTJV,
        log_decay_BTJ,
        eta_BTJ,
        step_size=step_size,
        eps=eps,
        scale=scale,
        initial_state_BJKV=initial_state_BJKV,
        cu_seqlens=cu_seqlens,
        **options,
    )


def delta_rule_segment_map(
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor | None,
    eta_BTJ: Tensor,
    *,
    step_size: StepSize,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    backend: Literal["chunk", "triton"] = "chunk",
) -> tuple[Tensor, Tensor]:
    """What a stretch of tokens does to the state before it: S_after = M S_before + h.

    Arguments as for `delta_rule`. A rank that holds the stretch sends M [B, J, K, K] and
    h [B, J, K, V] (fp32; fp64 for fp64 inputs) to those after it, whatever T is.
    """
    form = segment_map_triton if backend == "triton" else segment_map_chunk
    options = {"step_size": step_size, "eps": eps, "cu_seqlens": cu_seqlens}
    return form(k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ, **options)
