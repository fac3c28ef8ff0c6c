"""PaTH attention by blocks of tokens, in torch, with its backward. Derived in README.md."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.path_attention.attend import Layout, attend, attend_backward
from mixtron.kernels.path_attention.blocks import (
    KeyBlocks,
    QueryBlocks,
    block_length,
    join_heads,
    key_blocks,
    query_blocks,
    same_document,
    split_groups,
    split_heads,
)
from mixtron.kernels.path_attention.segment import documents


def path_attention_blockwise(
    *inputs: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Arguments of `path_attention` in its order (past as k, v, gate); the gate is scaled already.

    The arithmetic is fp64 for fp64 inputs, else fp32. Backward keeps the inputs and the log-sum-exp
    and computes the rest anew. Never waits for the device.
    """
    o_BTHV, _ = path_attention_with_lse(
        *inputs, scale=scale, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
    )
    return o_BTHV.to(inputs[2].dtype)  # type: ignore[union-attr]


def path_attention_with_lse(
    *inputs: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, unrounded, and the log-sum-exp [B, T, H] of its logits: what it takes to merge it
    with attention to other keys. Both are differentiable."""
    return _Blockwise.apply(*inputs, scale, cu_seqlens, max_seqlen)  # type: ignore[return-value]


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w, beta, log_forget, past_k, past_v, past_gate, *options):
        inputs = (q, k, v, w, beta, log_forget, past_k, past_v, past_gate)
        ctx.options = options
        queries, keys, v_BGSV, layout = _terms(inputs, *options)
        o_BGRNCV, lse_BGRNC = attend(queries, keys, v_BGSV, layout)
        ctx.save_for_backward(lse_BGRNC, *inputs)
        o_BTHV = join_heads(o_BGRNCV, q.shape[1])
        return o_BTHV, join_heads(lse_BGRNC[..., None], q.shape[1]).squeeze(-1)

    @staticmethod
    def backward(ctx, do_BTHV, dlse_BTH):  # type: ignore[override]
        lse_BGRNC, *saved = ctx.saved_tensors
        inputs = [x if x is None else x.detach().requires_grad_() for x in saved]
        with torch.enable_grad():
            queries, keys, v_BGSV, layout = _terms(inputs, *ctx.options)
        G, dtype = v_BGSV.shape[1], v_BGSV.dtype
        do_BGRNCV = split_heads(do_BTHV, G, layout.block_length, dtype)
        gradients = attend_backward(
            _detached(queries),
            _detached(keys),
            v_BGSV.detach(),
            layout,
            lse_BGRNC,
            do_BGRNCV,
            split_heads(dlse_BTH[..., None], G, layout.block_length, dtype).squeeze(-1),
        )
        terms = vars(queries) | vars(keys) | {"v_BGSV": v_BGSV}
        named = {n: x for n, x in terms.items() if x is not None}
        leaves = [x for x in inputs if x is not None]
        found = iter(
            torch.autograd.grad(
                list(named.values()), leaves, [getattr(gradients, n) for n in named]
            )
        )
        return *(None if x is None else next(found) for x in inputs), *([None] * len(ctx.options))


def _detached[Terms: (QueryBlocks, KeyBlocks)](terms: Terms) -> Terms:
    return replace(terms, **{n: x.detach() for n, x in vars(terms).items() if x is not None})


def _terms(
    inputs, scale: float, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[QueryBlocks, KeyBlocks, Tensor, Layout]:
    """What attention runs on, made of the inputs by differentiable steps that are linear in T."""
    q, k, v, w, beta, log_forget, past_k, past_v, past_gate = inputs
    T, G, C = q.shape[1], k.shape[2], block_length(k, w)
    dtype = torch.promote_types(q.dtype, torch.float32)
    k_BGNCK, v_BGNCV = split_groups(k, C, dtype), split_groups(v, C, dtype)
    w_BGNCK = beta_BGNC = gate_BGRNC = None
    if w is not None:
        w_BGNCK = split_groups(w, C, dtype)
        beta_BGNC = split_groups(beta[..., None], C, dtype).squeeze(-1)
    if log_forget is not None:
        gate_BGRNC = split_heads(log_forget[..., None], G, C, dtype).squeeze(-1)
    past = 0 if past_k is None else past_k.shape[1]
    filling = -past % C
    blocks = (past + filling) // C
    tokens = past + k_BGNCK.shape[2] * C
    document_S = documents(cu_seqlens, tokens, filling, q.device)
    same_NCC = same_document(document_S[blocks * C :], C)
    keys, transform = key_blocks(k_BGNCK, w_BGNCK, beta_BGNC, gate_BGRNC, same_NCC)
    q_BGRNCK = split_heads(q, G, C, dtype) * scale
    queries = query_blocks(q_BGRNCK, k_BGNCK, transform, gate_BGRNC, same_NCC)
    if past_k is not None and past_v is not None:
        keys, v_BGNCV = _with_past(keys, v_BGNCV, filling, past_k, past_v, past_gate)
    # Two tokens of a document are at most max_seqlen - 1 apart, those of blocks a lag of L apart
    # at least (L - 1) C + 1.
    longest = past + T if max_seqlen is None else min(max_seqlen, past + T)
    lags = (longest - 2) // C + 1 if longest > 1 else 0
    return queries, keys, v_BGNCV.flatten(2, 3), Layout(blocks, lags, document_S, C)


def _with_past(
    keys: KeyBlocks,
    v_BGNCV: Tensor,
    filling: int,
    past_k: Tensor,
    past_v: Tensor,
    past_gate: Tensor | None,
) -> tuple[KeyBlocks, Tensor]:
    """Puts the past in front, in blocks whose maps are I and whose gates are behind their keys."""
    C, dtype = keys.k_BGNCK.shape[-2], keys.k_BGNCK.dtype
    past_k, past_v = (F.pad(x, (0, 0, 0, 0, filling, 0)) for x in (past_k, past_v))
    k_BGNCK, past_v_BGNCV = split_groups(past_k, C, dtype), split_groups(past_v, C, dtype)
    map_BGNKK, after_BGRNC, total_BGRN = keys.map_BGNKK, keys.gate_after_BGRNC, keys.gate_total_BGRN
    blocks = k_BGNCK.shape[2]
    if map_BGNKK is not None:
        identity_KK = torch.eye(map_BGNKK.shape[-1], dtype=dtype, device=map_BGNKK.device)
        identity_BGNKK = identity_KK.expand(*map_BGNKK.shape[:2], blocks, -1, -1)
        map_BGNKK = torch.cat([identity_BGNKK, map_BGNKK], dim=2)
    if past_gate is not None:
        assert after_BGRNC is not None
        assert total_BGRN is not None
        gate_BPH1 = F.pad(past_gate, (0, 0, filling, 0))[..., None]
        past_BGRNC = split_heads(gate_BPH1, k_BGNCK.shape[1], C, dtype).squeeze(-1)
        after_BGRNC = torch.cat([past_BGRNC, after_BGRNC], dim=3)
        total_BGRN = F.pad(total_BGRN, (blocks, 0))
    carried_BGNCK = torch.cat([k_BGNCK, keys.k_BGNCK], dim=2)
    keys = KeyBlocks(carried_BGNCK, map_BGNKK, after_BGRNC, total_BGRN)
    return keys, torch.cat([past_v_BGNCV, v_BGNCV], dim=2)
