"""The public op: checks what it is given and calls the form that is asked for."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from mixtron.kernels.log_linear_attention.chunk import log_linear_attention_chunk
from mixtron.kernels.log_linear_attention.fenwick import required_levels
from mixtron.kernels.log_linear_attention.reference import (
    log_linear_attention_recurrent,
    log_linear_attention_reference,
)
from mixtron.kernels.log_linear_attention.triton_op import log_linear_attention_triton
from mixtron.kernels.recurrence import check_gate, check_inputs

Backend = Literal["chunk", "triton", "recurrent", "reference"]
BACKENDS = {
    "chunk": log_linear_attention_chunk,
    "triton": log_linear_attention_triton,
    "recurrent": log_linear_attention_recurrent,
    "reference": log_linear_attention_reference,
}


def log_linear_attention(
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
    backend: Backend = "chunk",
) -> Tensor:
    """Log-linear attention (arXiv 2506.04761): linear attention that weighs the buckets of a
    Fenwick tree over the past by level.

        o_t = scale sum over s <= t of lambda_t[level(t, s)] q_t^T A_t A_{t-1} ... A_{s+1} W_s
        level(t, s) = bit_length(t xor s), t and s counted from the document's start

    Without beta A_t = exp(log_decay_t) and W_s = k_s v_s^T (gated linear attention, Mamba-2); with
    it A_t = exp(log_decay_t) (I - beta_t k_t k_t^T) and W_s = beta_s k_s v_s^T (gated delta rule).

    Args:
        q_BTHK, k_BTHK      [B, T, H, K]  fp64, fp32, bf16 or fp16; v has the same dtype.
        v_BTJV              [B, T, J, V]  J a multiple of H; value head j reads head j // (J/H).
        log_decay_BTJ       [B, T, J]     <= 0, fp32 or fp64; -inf forgets all.
        beta_BTJ            [B, T, J]     in [0, 1], fp32 or fp64; or None.
        lambda_BTJL         [B, T, J, L]  any numbers, fp32 or fp64. A document's last position
                            must be below 2^(L-1).
        scale               of the output; None is K^-1/2.
        lengths             tokens of each document, on the host, with B = 1: each has a tree of
                            its own. None: each of the B rows is one document.
        initial_states_BSJKV  [B, S, J, K, V] fp32 or fp64, S = L: what the first document's tokens
                            before token 0 have left. State b is that of the node of bit b of
                            `initial_position`; states of bits that it does not have are ignored.
                            None is zero.
        initial_position    how many tokens of the first document lie before token 0.
        backend             "chunk" in torch on any device; "triton" for bf16 on a GPU with K and V
                            of 64 or 128; "recurrent" token by token; "reference".
    Returns:
        o_BTJV [B, T, J, V] in v's dtype. The states after the last token are
        `log_linear_segment_map`'s.
    Raises:
        ValueError: an argument whose shape, dtype, device or value does not fit; too few levels.
            All of it is known on the host: nothing waits for the device.
    """
    check_inputs(q_BTHK, k_BTHK, v_BTJV)
    B, T, _, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    L = lambda_BTJL.shape[-1]
    check_gate("log_decay_BTJ", log_decay_BTJ, [(B, T, J)], q_BTHK)
    check_gate("lambda_BTJL", lambda_BTJL, [(B, T, J, L)], q_BTHK)
    if beta_BTJ is not None:
        check_gate("beta_BTJ", beta_BTJ, [(B, T, J)], q_BTHK)
    if initial_states_BSJKV is not None:
        check_gate("initial_states_BSJKV", initial_states_BSJKV, [(B, L, J, K, V)], q_BTHK)
    check_lengths(lengths, initial_position, B, T, L)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    return BACKENDS[backend](
        q_BTHK,
        k_BTHK,
        v_BTJV,
        log_decay_BTJ,
        beta_BTJ,
        lambda_BTJL,
        scale=scale,
        lengths=lengths,
        initial_states_BSJKV=initial_states_BSJKV,
        initial_position=initial_position,
    )


def check_lengths(
    lengths: Sequence[int] | None, initial_position: int, B: int, T: int, levels: int
) -> None:
    """Raises ValueError: documents that do not fill the stream, or need more levels."""
    if initial_position < 0:
        raise ValueError(f"initial_position is {initial_position}, expected at least 0")
    if lengths is not None:
        if B != 1:
            raise ValueError(f"lengths need a batch of 1, q_BTHK has {B}")
        if not lengths or min(lengths) < 1 or sum(lengths) != T:
            raise ValueError(f"lengths is {list(lengths)}, expected positive ones that sum to {T}")
    first, *others = lengths or [T]
    longest = max([initial_position + first, *others])
    if required_levels(longest) > levels:
        raise ValueError(
            f"lambda_BTJL has {levels} levels, a document of {longest} tokens needs "
            f"{required_levels(longest)}"
        )
