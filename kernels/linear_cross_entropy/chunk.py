"""What the loss needs of one chunk's logits, and their gradient."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
from torch import Tensor

from mixtron.kernels.linear_cross_entropy.triton_kernels import (
    cross_entropy_gradient_kernel,
    cross_entropy_statistics_kernel,
)
from mixtron.kernels.triton_tools import Form

BLOCK_V = 4096


def logit_statistics(
    logits_CV: Tensor, label_C: Tensor, used: int, form: Form
) -> tuple[Tensor, Tensor]:
    """The log sum of exponentials over v < used, and the label's logit (0 if it lies elsewhere).

    [C] each, fp32 or above.
    """
    if form == "triton":
        return _statistics(logits_CV, label_C, None, used)
    here_C, index_C = _in_slice(label_C, used)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    label_logit_C = logits_CV.gather(1, index_C[:, None]).squeeze(1) * here_C
    return logits_CV[:, :used].logsumexp(1), label_logit_C


def statistics_and_gradients(
    logits_CV: Tensor, label_C: Tensor, share_C: Tensor, used: int, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    """`logit_statistics`, and then `logit_gradients`."""
    if form == "triton":
        return *_statistics(logits_CV, label_C, share_C.contiguous(), used), logits_CV
    lse_C, label_logit_C = logit_statistics(logits_CV, label_C, used, form)
    gradients_CV = logit_gradients(logits_CV, label_C, lse_C, share_C, used, form)
    return lse_C, label_logit_C, gradients_CV


def logit_gradients(
    logits_CV: Tensor, label_C: Tensor, lse_C: Tensor, share_C: Tensor, used: int, form: Form
) -> Tensor:
    """share (softmax - onehot(label)), in the logits' dtype; 0 in the padding. May reuse logits."""
    if form == "triton":
        cross_entropy_gradient_kernel[(len(logits_CV),)](
            logits_CV,
            label_C,
            lse_C,
            share_C.contiguous(),
            used,
            V=logits_CV.shape[1],
            BLOCK_V=BLOCK_V,
            num_warps=8,
        )
        return logits_CV
    here_C, index_C = _in_slice(label_C, used)
    gradient_CV = (logits_CV.to(lse_C.dtype) - lse_C[:, None]).exp()
    gradient_CV.scatter_add_(1, index_C[:, None], -here_C.to(lse_C.dtype)[:, None])
    gradient_CV[:, used:] = 0
    return (gradient_CV * share_C[:, None]).to(logits_CV.dtype)


def _statistics(logits_CV: Tensor, label_C: Tensor, share_C: Tensor | None, used: int) -> tuple:
    """With shares the logits become their gradient."""
    lse_C, label_logit_C = (logits_CV.new_empty(len(logits_CV), dtype=torch.float32) for _ in "ab")
    cross_entropy_statistics_kernel[(len(logits_CV),)](
        logits_CV,
        label_C,
        share_C,
        lse_C,
        label_logit_C,
        used,
        V=logits_CV.shape[1],
        BLOCK_V=BLOCK_V,
        GRADIENT=share_C is not None,
        num_warps=8,
    )
    return lse_C, label_logit_C


def _in_slice(label_C: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Whether the label lies in this slice, and an index that is valid in any case."""
    here_C = (label_C >= 0) & (label_C < used)
    return here_C, torch.where(here_C, label_C, 0)
