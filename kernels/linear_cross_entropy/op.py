"""The loss and its gradients chunk by chunk of tokens: a chunk's logits live for three products."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.linear_cross_entropy.chunk import (
    logit_gradients,
    logit_statistics,
    statistics_and_gradients,
)
from mixtron.kernels.products import add_product
from mixtron.kernels.triton_tools import Form, form_for

CHUNK_LOGITS = 2**27
"""Of one chunk: 256 MiB in bf16."""
Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    label_T: Tensor,
    share_T: Tensor,
    *,
    used: int,
    combine: Combine | None = None,
    chunk_tokens: int | None = None,
    backend: Form | None = None,
) -> Tensor:
    """The sum over tokens of share_t times -log softmax(W h_t)[label_t].

    Args:
        hidden_TD   [T, D]
        weight_VD   [V, D]  this rank's slice of the vocabulary.
        label_T     [T] int64, counted from the slice's first entry: of another rank's slice it is
                    negative, or V or more.
        share_T     [T] what each token's loss counts, such as a mask; it has no gradient.
        used        entries of the slice that are no padding; the others can never be chosen.
        combine     makes of this slice's log sum of exponentials and label's logit (0 where the
                    label lies elsewhere), [T] each, those of the whole vocabulary, which the slice
                    is where this is None.
        chunk_tokens  tokens whose logits are held at once; None: as many as make 2^27 logits.
        backend     torch or triton; None: triton on a GPU, torch elsewhere.
    Returns:
        0-dimensional, fp32 (fp64 of fp64). Forward computes the gradients of hidden and weight
        while it has a chunk's logits, and keeps these: [T, D] in hidden's dtype, [V, D] in fp32.
        The gradient of hidden is this slice's part of a sum over the ranks.
    Raises:
        ValueError: shapes that do not fit, or a dtype that the form cannot take.
    """
    V, D = weight_VD.shape
    fits = hidden_TD.shape[1:] == (D,) and label_T.shape == share_T.shape == hidden_TD.shape[:1]
    if not fits or not 0 <= used <= V:
        raise ValueError(
            f"hidden {list(hidden_TD.shape)}, weight {[V, D]} with {used} entries used, labels "
            f"{list(label_T.shape)} and shares {list(share_T.shape)} do not fit"
        )
    form = form_for(hidden_TD, backend)
    if chunk_tokens is None:
        chunk_tokens = max(128, CHUNK_LOGITS // V // 128 * 128)
    share_T = share_T.to(torch.promote_types(hidden_TD.dtype, torch.float32))
    read = hidden_TD.detach(), weight_VD.detach(), label_T, share_T
    chunks = _Chunks(*read, chunk_tokens, used, form)
    trains = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, chunks, combine, trains)  # type: ignore[return-value]


@dataclass
class _Chunks:
    """What logits are made of; those of a chunk live within one method."""

    hidden_TD: Tensor
    weight_VD: Tensor
    label_T: Tensor
    share_T: Tensor
    tokens: int
    used: int
    form: Form

    def __iter__(self) -> Iterator[slice]:
        for first in range(0, len(self.hidden_TD), self.tokens):
            yield slice(first, first + self.tokens)

    def begin_gradients(self) -> None:
        self.dhidden_TD = torch.empty_like(self.hidden_TD)
        self.dweight_VD = torch.zeros_like(self.weight_VD, dtype=self.share_T.dtype)

    def statistics(self, chunk: slice) -> tuple[Tensor, Tensor]:
        return logit_statistics(self._logits(chunk), self.label_T[chunk], self.used, self.form)

    def statistics_and_gradients(self, chunk: slice) -> tuple[Tensor, Tensor]:
        tokens = self.label_T[chunk], self.share_T[chunk]
        found = statistics_and_gradients(self._logits(chunk), *tokens, self.used, self.form)
        self._add(chunk, found[2])
        return found[:2]

    def gradients(self, chunk: slice, lse_C: Tensor) -> None:
        tokens = self.label_T[chunk], lse_C, self.share_T[chunk]
        self._add(chunk, logit_gradients(self._logits(chunk), *tokens, self.used, self.form))

    def _logits(self, chunk: slice) -> Tensor:
        return self.hidden_TD[chunk] @ self.weight_VD.t()

    def _add(self, chunk: slice, dlogits_CV: Tensor) -> None:
        torch.matmul(dlogits_CV, self.weight_VD, out=self.dhidden_TD[chunk])
        add_product(self.dweight_VD, dlogits_CV.t(), self.hidden_TD[chunk])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, chunks, combine, trains):
        if trains:
            chunks.begin_gradients()
        at_once = trains and combine is None
        statistics = chunks.statistics_and_gradients if at_once else chunks.statistics
        parts = [statistics(chunk) for chunk in chunks]
        lse_T, label_logit_T = (torch.cat(part) for part in zip(*parts, strict=True))
        if combine is not None:
            lse_T, label_logit_T = combine(lse_T, label_logit_T)
            for chunk in chunks if trains else ():  # only now are all slices' statistics known
                chunks.gradients(chunk, lse_T[chunk])
        if trains:
            ctx.save_for_backward(chunks.dhidden_TD, chunks.dweight_VD)
            ctx.dtype = weight_VD.dtype
        return ((lse_T - label_logit_T) * chunks.share_T).sum()

    @staticmethod
    def backward(ctx, dtotal):  # type: ignore[override]
        dhidden_TD, dweight_VD = ctx.saved_tensors
        scaled_VD = torch.empty_like(dweight_VD, dtype=ctx.dtype)
        torch.mul(dweight_VD, dtotal, out=scaled_VD)
        return (dhidden_TD * dtotal).to(dhidden_TD.dtype), scaled_VD, None, None, None
