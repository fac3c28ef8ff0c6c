"""The loss chunk by chunk of tokens: a chunk's logits live from one product to the next."""

from collections.abc import Callable

import torch
from torch import Tensor

from mixtron.kernels.linear_cross_entropy.chunk import logit_gradients, logit_statistics
from mixtron.kernels.products import add_product
from mixtron.kernels.triton_tools import Form, form_for

CHUNK_LOGITS = 2**27
"""Of one chunk: 256 MiB in bf16."""
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    *,
    used: int,
    combine: Combine | None = None,
    chunk_tokens: int | None = None,
    backend: Form | None = None,
) -> Tensor:
    """-log softmax(W h_t)[label_t] of every token.

    Args:
        hidden_TD   [T, D]
        weight_VD   [V, D]  this rank's slice of the vocabulary.
        label_T     [T] int64, counted from the slice's first entry: of another rank's slice it is
                    negative, or V or more.
        used        entries of the slice that are no padding; the others can never be chosen.
        combine     makes of this slice's log sum of exponentials and label's logit (0 where the
                    label lies elsewhere), [T] each, those of the whole vocabulary, which the slice
                    is where this is None.
        chunk_tokens  tokens whose logits are held at once; None: as many as make 2^27 logits.
        backend     torch or triton; None: triton on a GPU, torch elsewhere.
    Returns:
        [T] fp32 (fp64 of fp64). Kept for backward are the arguments and the log sums; the logits
        are computed again. The gradient of hidden is this slice's part of a sum over the ranks.
    Raises:
        ValueError: shapes that do not fit, or a dtype that the form cannot take.
    """
    V, D = weight_VD.shape
    if hidden_TD.shape[1:] != (D,) or label_T.shape != hidden_TD.shape[:1] or not 0 <= used <= V:
        raise ValueError(
            f"hidden {list(hidden_TD.shape)}, weight {[V, D]} with {used} entries used and labels "
            f"{list(label_T.shape)} do not fit"
        )
    form = form_for(hidden_TD, backend)
    if chunk_tokens is None:
        chunk_tokens = max(128, CHUNK_LOGITS // V // 128 * 128)
    return _LinearCrossEntropy.apply(  # type: ignore[return-value]
        hidden_TD, weight_VD, label_T, used, combine, chunk_tokens, form
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, label_T, used, combine, chunk_tokens, form):
        parts = [
            logit_statistics(hidden_CD @ weight_VD.t(), label_C, used, form)
            for hidden_CD, label_C in zip(
                hidden_TD.split(chunk_tokens), label_T.split(chunk_tokens), strict=True
            )
        ]
        lse_T, label_logit_T = (torch.cat(part) for part in zip(*parts, strict=True))
        if combine is not None:
            lse_T, label_logit_T = combine(lse_T, label_logit_T)
        ctx.save_for_backward(hidden_TD, weight_VD, label_T, lse_T)
        ctx.options = used, chunk_tokens, form
        return lse_T - label_logit_T

    @staticmethod
    def backward(ctx, dloss_T):  # type: ignore[override]
        hidden_TD, weight_VD, label_T, lse_T = ctx.saved_tensors
        used, chunk_tokens, form = ctx.options
        dhidden_TD = torch.empty_like(hidden_TD)
        dweight_VD = torch.zeros_like(weight_VD, dtype=lse_T.dtype)
        chunks = [x.split(chunk_tokens) for x in (hidden_TD, label_T, lse_T, dloss_T, dhidden_TD)]
        for hidden_CD, label_C, lse_C, dloss_C, dhidden_CD in zip(*chunks, strict=True):
            logits_CV = hidden_CD @ weight_VD.t()
            dlogits_CV = logit_gradients(logits_CV, label_C, lse_C, dloss_C, used, form)
            torch.matmul(dlogits_CV, weight_VD, out=dhidden_CD)
            add_product(dweight_VD, dlogits_CV.t(), hidden_CD)
        return dhidden_TD, dweight_VD.to(weight_VD.dtype), None, None, None, None, None
