"""What the recurrent ops share: the checks of their arguments, document starts, decays, chunk maps
one after another."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

INPUT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GATE_DTYPES = (torch.float64, torch.float32)


def check_inputs(q_BTHK: Tensor, k_BTHK: Tensor, v_BTJV: Tensor) -> None:
    """Raises ValueError naming the argument: shapes, dtypes or devices that do not fit."""
    if q_BTHK.dim() != 4 or 0 in q_BTHK.shape:
        raise ValueError(f"q_BTHK is {list(q_BTHK.shape)}, expected [B, T, H, K], none of them 0")
    if q_BTHK.dtype not in INPUT_DTYPES:
        raise ValueError(f"q_BTHK is {q_BTHK.dtype}, expected fp64, fp32, bf16 or fp16")
    if k_BTHK.shape != q_BTHK.shape:
        raise ValueError(f"k_BTHK is {list(k_BTHK.shape)}, expected q's {list(q_BTHK.shape)}")
    B, T, H, _ = q_BTHK.shape
    if v_BTJV.dim() != 4 or v_BTJV.shape[:2] != (B, T) or v_BTJV.shape[2] % H or 0 in v_BTJV.shape:
        raise ValueError(
            f"v_BTJV is {list(v_BTJV.shape)}, expected [{B}, {T}, J, V] with J a multiple of {H}"
        )
    for name, x in (("k_BTHK", k_BTHK), ("v_BTJV", v_BTJV)):
        if (x.dtype, x.device) != (q_BTHK.dtype, q_BTHK.device):
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, expected q's {q_BTHK.dtype} on {q_BTHK.device}"
            )


def check_gate(name: str, x: Tensor, shapes: Sequence[tuple[int, ...]], q_BTHK: Tensor) -> None:
    """Raises ValueError: a gate or state of none of these shapes, or not fp32 or fp64 beside q."""
    if tuple(x.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} is {list(x.shape)}, expected {expected}")
    if x.dtype not in GATE_DTYPES or x.device != q_BTHK.device:
        raise ValueError(
            f"{name} is {x.dtype} on {x.device}, expected fp32 or fp64 on {q_BTHK.device}"
        )


def check_documents(cu_seqlens: Tensor, q_BTHK: Tensor, tokens: int | None = None) -> None:
    """Raises ValueError for offsets that do not fit; their values are read on the CPU alone.

    `tokens` is where they end; None is q's T.
    """
    B, T = q_BTHK.shape[0], tokens or q_BTHK.shape[1]
    if B != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, q_BTHK is {list(q_BTHK.shape)}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}, expected [documents + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != q_BTHK.device:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} on {cu_seqlens.device}, "
            f"expected int32 or int64 on {q_BTHK.device}"
        )
    if cu_seqlens.device.type == "cpu":
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != T or offsets != sorted(offsets):
            raise ValueError(f"cu_seqlens is {offsets}, expected to rise from 0 to {T}")


def check_rows(rows: int, cu_seqlens: Tensor | None, tokens: int) -> None:
    """Raises ValueError unless so many parts of equal length begin a document each; where documents
    begin is read on the CPU alone."""
    if rows < 1 or tokens % rows or cu_seqlens is None:
        raise ValueError(
            f"rows is {rows}, expected a divisor of T = {tokens}, and cu_seqlens beside it"
        )
    starts = range(0, tokens, tokens // rows)
    if cu_seqlens.device.type == "cpu" and not set(cu_seqlens.tolist()).issuperset(starts):
        raise ValueError(f"rows is {rows}: no document of {cu_seqlens.tolist()} begins at each row")


def document_starts(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] bool: tokens that start a document, but for token 0, which may continue one."""
    starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    starts.index_fill_(0, cu_seqlens.long(), True)
    starts[:1] = False
    return starts[:tokens]


def document_numbers(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] int32: each token's document, counted from 0. Computed once for all layers that are given
    the same tensor of offsets."""

    def compute() -> Tensor:
        return document_starts(cu_seqlens, tokens).cumsum(0, dtype=torch.int32)

    return once(cu_seqlens, ("numbers", tokens), compute)


def once(cu_seqlens: Tensor, key: Hashable, compute: Callable[[], Any]) -> Any:
    """What `compute` gives for the documents, computed by the first of all layers that are given
    the same tensor of offsets and ask."""
    version, found = _KNOWN.get(cu_seqlens) or (None, {})
    if version != cu_seqlens._version:
        found = {}
        _KNOWN[cu_seqlens] = cu_seqlens._version, found
    if key not in found:
        found[key] = compute()
    return found[key]


_KNOWN = WeakTensorKeyDictionary()
"""Of offsets that still exist: their version, and what is known of them."""


def to_value_heads(x_BTHX: Tensor, value_heads: int) -> Tensor:
    """[B, T, H, X] to [B, T, J, X]: value head j takes head j // (J/H)."""
    return x_BTHX.repeat_interleave(value_heads // x_BTHX.shape[2], dim=2)


def apply_diagonal(decay_K1: Tensor, state_KV: Tensor) -> Tensor:
    """[..., K, V]: each row times its decay. Select, not 0 * inf: a decay of 0 drops an overflow
    too, and its gradient."""
    return decay_K1 * state_KV.masked_fill(decay_K1 == 0, 0)


def apply_matrix(transition_KK: Tensor, state_KV: Tensor) -> Tensor:
    """[..., K, V]: transition @ state; one of nothing but 0 drops an overflow too."""
    dropped_11 = ~transition_KK.flatten(-2).any(-1)[..., None, None]
    return transition_KK @ state_KV.masked_fill(dropped_11, 0)


def read_state(read_CK: Tensor, from_start_CE: Tensor, state_KV: Tensor) -> Tensor:
    """[..., C, V]: read @ state; 0 for a token that nothing of the state reaches, as all its decays
    from there are 0: it begins, or follows, another document."""
    cut_C1 = (from_start_CE == 0).all(-1, keepdim=True)
    return (read_CK.masked_fill(cut_C1, 0) @ state_KV).masked_fill(cut_C1, 0)


def scan_chunks(
    transition_BJNKE: Tensor,
    write_BJNKV: Tensor,
    state_BJKV: Tensor,
    apply: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """S_{n+1} = apply(transition_n, S_n) + write_n: S before each chunk and after the last.

    `apply` is `apply_matrix` (E = K) or `apply_diagonal` (E = 1). Composes neighbouring chunks,
    scans the half as many pairs, then fills in the states between: log2 N levels of batched
    products instead of N serial ones.
    """
    N = transition_BJNKE.shape[2]
    if N == 1:
        after_BJKV = apply(transition_BJNKE[:, :, 0], state_BJKV) + write_BJNKV[:, :, 0]
        return state_BJKV.unsqueeze(2), after_BJKV
    paired = N - N % 2
    first, second = (transition_BJNKE[:, :, i:paired:2] for i in (0, 1))
    first_write, second_write = (write_BJNKV[:, :, i:paired:2] for i in (0, 1))
    outer_BJNKV, state_BJKV = scan_chunks(
        apply(second, first), apply(second, first_write) + second_write, state_BJKV, apply
    )
    inner_BJNKV = apply(first, outer_BJNKV) + first_write
    before_BJNKV = torch.stack([outer_BJNKV, inner_BJNKV], dim=3).flatten(2, 3)
    if paired < N:
        before_BJNKV = torch.cat([before_BJNKV, state_BJKV.unsqueeze(2)], dim=2)
        state_BJKV = apply(transition_BJNKE[:, :, -1], state_BJKV) + write_BJNKV[:, :, -1]
    return before_BJNKV, state_BJKV


def compose_chunks(
    transition_BJNKE: Tensor, write_BJNKV: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The maps of all chunks one after another as one, by neighbouring pairs.

    `apply` as in `scan_chunks`; the writes may have dimensions before B. Returns [B, J, K, E] and
    [..., B, J, K, V].
    """
    while (N := transition_BJNKE.shape[-3]) > 1:
        paired = N - N % 2
        first, second = (transition_BJNKE[..., i:paired:2, :, :] for i in (0, 1))
        first_write, second_write = (write_BJNKV[..., i:paired:2, :, :] for i in (0, 1))
        composed, composed_write = apply(second, first), apply(second, first_write) + second_write
        if paired < N:
            composed = torch.cat([composed, transition_BJNKE[..., -1:, :, :]], dim=-3)
            composed_write = torch.cat([composed_write, write_BJNKV[..., -1:, :, :]], dim=-3)
        transition_BJNKE, write_BJNKV = composed, composed_write
    return transition_BJNKE[..., 0, :, :], write_BJNKV[..., 0, :, :]


def decay_between(log_decay_BJNCE: Tensor) -> Tensor:
    """[B, J, N, E, C, C]: exp(sum over j < m <= i of log_decay_m), 0 for j > i.

    Each entry is a sum, not a difference of two prefix sums: no cancellation beside strong decays,
    and log decays of -inf (document starts) give 0, not NaN.
    """
    C = log_decay_BJNCE.shape[-2]
    of_token_BJNECC = log_decay_BJNCE.mT.unsqueeze(-1).expand(*log_decay_BJNCE.mT.shape, C)
    sums_BJNECC = of_token_BJNECC.tril(-1).cumsum(-2)
    future_CC = torch.ones(C, C, dtype=torch.bool, device=sums_BJNECC.device).triu(1)
    return sums_BJNECC.masked_fill(future_CC, float("-inf")).exp()
