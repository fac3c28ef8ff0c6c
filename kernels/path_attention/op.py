"""The public op: checks what it is given and calls the form that is asked for."""

from typing import Literal

from torch import Tensor

from mixtron.kernels.path_attention.blockwise import path_attention_blockwise
from mixtron.kernels.path_attention.reference import path_attention_reference
from mixtron.kernels.path_attention.segment import PastKeys
from mixtron.kernels.path_attention.triton_op import path_attention_triton
from mixtron.kernels.recurrence import INPUT_DTYPES, check_documents, check_gate

Backend = Literal["block", "triton", "reference"]
BACKENDS = {
    "block": path_attention_blockwise,
    "triton": path_attention_triton,
    "reference": path_attention_reference,
}


def path_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    w_BTGK: Tensor | None = None,
    beta_BTG: Tensor | None = None,
    log_forget_BTH: Tensor | None = None,
    *,
    scale: float | None = None,
    gate_scale: float = 1.0,
    past: PastKeys | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: Backend = "block",
) -> Tensor:
    """Causal attention with data-dependent position encoding (PaTH, arXiv 2505.16381).

        logit_ij = scale k_j^T H_{j+1} ... H_i q_i + gate_scale sum of log_forget_{j+1 .. i}
        H_s = I - beta_s w_s w_s^T,   o_i = sum over j <= i of softmax_j(logit_ij) v_j

    With w, beta and log_forget it is PaTH-FoX; without log_forget PaTH; without w and beta the
    Forgetting Transformer's attention (FoX); with none of them softmax attention.

    Args:
        q_BTHK          [B, T, H, K]  fp64, fp32, bf16 or fp16; k and v have the same dtype.
        k_BTGK, v_BTGV  [B, T, G, K], [B, T, G, V]  query head h reads head h // (H/G).
        w_BTGK          [B, T, G, K]  unit vectors, fp32 or fp64: rounded to bf16, |w| = 1 + 2^-9
                        and beta = 2 would give maps that grow.
        beta_BTG        [B, T, G]     in [0, 2], fp32 or fp64; given with w.
        log_forget_BTH  [B, T, H]     <= 0, fp32 or fp64.
        scale           of the products; None is K^-1/2.
        gate_scale      1 is FoX's meaning: the gate is added to the scaled logit. `scale` gives
                        that of implementations that add it before scaling.
        past            P tokens before the first one (the shards of earlier context ranks).
        cu_seqlens      [N+1] int32 or int64 on q's device, with B = 1: where documents start in the
                        P + T tokens. From 0 to P + T, not decreasing; may be padded by repeating
                        the last. None: past and tokens of each of the B rows are one document.
        max_seqlen      the longest document, past included, on the host: blocks of keys further
                        back are not visited. None: all are.
        backend         "block" in torch on any device; "triton" for bf16 on a GPU with K and V of
                        64 or 128, without a past; "reference" token by token.
    Returns:
        o_BTHV [B, T, H, V] in v's dtype.
    Raises:
        ValueError: an argument whose shape, dtype, device or value does not fit. The values of
            cu_seqlens are read on a CPU only: on a GPU that would wait for the device.
    """
    _check_inputs(q_BTHK, k_BTGK, v_BTGV)
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    if (w_BTGK is None) != (beta_BTG is None):
        raise ValueError("w_BTGK and beta_BTG come together: one of them is None")
    if w_BTGK is not None and beta_BTG is not None:
        check_gate("w_BTGK", w_BTGK, [(B, T, G, K)], q_BTHK)
        check_gate("beta_BTG", beta_BTG, [(B, T, G)], q_BTHK)
    if log_forget_BTH is not None:
        check_gate("log_forget_BTH", log_forget_BTH, [(B, T, H)], q_BTHK)
    before = 0
    if past is not None:
        before = _check_past(past, q_BTHK, v_BTGV, G, gated=log_forget_BTH is not None)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q_BTHK, tokens=before + T)
    if max_seqlen is not None and max_seqlen < 1:
        raise ValueError(f"max_seqlen is {max_seqlen}, expected at least 1")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    gate_after_BPH = None
    if log_forget_BTH is not None:
        log_forget_BTH = gate_scale * log_forget_BTH
        if past is not None and past.gate_after_BPH is not None:
            gate_after_BPH = gate_scale * past.gate_after_BPH
    return BACKENDS[backend](
        q_BTHK,
        k_BTGK,
        v_BTGV,
        w_BTGK,
        beta_BTG,
        log_forget_BTH,
        None if past is None else past.k_BPGK,
        None if past is None else past.v_BPGV,
        gate_after_BPH,
        scale=K**-0.5 if scale is None else scale,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )


def _check_inputs(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor) -> None:
    if q_BTHK.dim() != 4 or 0 in q_BTHK.shape:
        raise ValueError(f"q_BTHK is {list(q_BTHK.shape)}, expected [B, T, H, K], none of them 0")
    if q_BTHK.dtype not in INPUT_DTYPES:
        raise ValueError(f"q_BTHK is {q_BTHK.dtype}, expected fp64, fp32, bf16 or fp16")
    B, T, H, K = q_BTHK.shape
    fits = k_BTGK.dim() == 4 and 0 not in k_BTGK.shape
    if not fits or (*k_BTGK.shape[:2], k_BTGK.shape[3]) != (B, T, K) or H % k_BTGK.shape[2]:
        raise ValueError(
            f"k_BTGK is {list(k_BTGK.shape)}, expected [{B}, {T}, G, {K}] with G dividing {H}"
        )
    if v_BTGV.dim() != 4 or v_BTGV.shape[:3] != k_BTGK.shape[:3] or 0 in v_BTGV.shape:
        raise ValueError(
            f"v_BTGV is {list(v_BTGV.shape)}, expected [{B}, {T}, {k_BTGK.shape[2]}, V]"
        )
    for name, x in (("k_BTGK", k_BTGK), ("v_BTGV", v_BTGV)):
        if (x.dtype, x.device) != (q_BTHK.dtype, q_BTHK.device):
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, expected q's {q_BTHK.dtype} on {q_BTHK.device}"
            )


def _check_past(past: PastKeys, q_BTHK: Tensor, v_BTGV: Tensor, groups: int, gated: bool) -> int:
    """The number of past tokens."""
    B, _, H, K = q_BTHK.shape
    P = past.k_BPGK.shape[1]
    check_gate("past.k_BPGK", past.k_BPGK, [(B, P, groups, K)], q_BTHK)
    expected = (B, P, groups, v_BTGV.shape[-1])
    if past.v_BPGV.shape != expected or past.v_BPGV.dtype != v_BTGV.dtype:
        raise ValueError(
            f"past.v_BPGV is {list(past.v_BPGV.shape)} {past.v_BPGV.dtype}, "
            f"expected {list(expected)} {v_BTGV.dtype}"
        )
    if gated != (past.gate_after_BPH is not None):
        raise ValueError(
            "past.gate_after_BPH and log_forget_BTH come together: one of them is None"
        )
    if past.gate_after_BPH is not None:
        check_gate("past.gate_after_BPH", past.gate_after_BPH, [(B, P, H)], q_BTHK)
    return P
