"""The public op: checks what it is given and calls the form that is asked for."""

from typing import Literal

from torch import Tensor

from mixtron.kernels.gated_linear_attention.chunk import gated_linear_attention_chunk
from mixtron.kernels.gated_linear_attention.reference import gated_linear_attention_reference
from mixtron.kernels.gated_linear_attention.triton_channel_op import gated_linear_attention_triton
from mixtron.kernels.recurrence import check_documents, check_gate, check_inputs, check_rows

Backend = Literal["chunk", "triton", "reference"]
BACKENDS = {
    "chunk": gated_linear_attention_chunk,
    "triton": gated_linear_attention_triton,
    "reference": gated_linear_attention_reference,
}


def gated_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state_BJKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: int = 1,
    backend: Backend = "chunk",
) -> tuple[Tensor, Tensor]:
    """Linear attention whose state decays by the data: GLA (arXiv 2312.06635), or with one decay a
    head Mamba-2 (arXiv 2405.21060).

        S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q_BTHK, k_BTHK      [B, T, H, K]  fp64, fp32, bf16 or fp16; v has the same dtype.
        v_BTJV              [B, T, J, V]  J a multiple of H; value head j reads head j // (J/H).
        log_decay           <= 0, fp32 or fp64; -inf forgets all. [B, T, J]: one a value head;
                            [B, T, H, K]: one a key channel, which scales a row of S.
        scale               of the output; None is K^-1/2.
        initial_state_BJKV  [B, J, K, V]  fp32 or fp64; None is zero.
        cu_seqlens          [N+1] int32 or int64 on q's device, with B = 1: document n is the tokens
                            cu_seqlens[n] .. cu_seqlens[n+1]. From 0 to T, not decreasing; empty
                            documents are skipped, so it may be padded by repeating T. None: each
                            of the B rows is one document.
        rows                in how many parts of equal length, each beginning a document of
                            cu_seqlens, the "triton" form may run side by side.
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
    B, T, H, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    check_gate("log_decay", log_decay, [(B, T, J), (B, T, H, K)], q_BTHK)
    if initial_state_BJKV is not None:
        check_gate("initial_state_BJKV", initial_state_BJKV, [(B, J, K, V)], q_BTHK)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q_BTHK)
    if rows != 1:
        check_rows(rows, cu_seqlens, T)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    return BACKENDS[backend](
        q_BTHK,
        k_BTHK,
        v_BTJV,
        log_decay,
        scale=scale,
        initial_state_BJKV=initial_state_BJKV,
        cu_seqlens=cu_seqlens,
        **({"rows": rows} if backend == "triton" else {}),
    )
