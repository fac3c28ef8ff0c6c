"""The spectrum of one head's interaction: routing (skew-symmetric) against filtering (symmetric).

A head scores tokens i, j by x_i^T M x_j with M = W_Q^T W_K [D, D] of rank K. M and its transpose
live in the 2K-dimensional space that the rows of W_Q and W_K span, so everything is computed there:
with [W_Q^T W_K^T] = B [R_Q R_K] (QR), M = B C B^T and C = R_Q R_K^T is [2K, 2K]. The same holds for
scores of a sequence, where queries [T, K] and keys [T, K] stand for the weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 0.01
"""A singular value counts above this share of the largest."""


@dataclass(frozen=True)
class HeadSpectrum:
    """Ranks are in dimensions of the state: a routing rank of 2 is one plane of rotation."""

    routing_share: float
    """|skew part|^2 / |M|^2 (Frobenius)."""
    routing_rank: float
    """Effective: exp of the entropy of the normalised singular values. 0 where there is none."""
    filtering_rank: float
    routing_count: int
    """Singular values above 1 % of the largest."""
    filtering_count: int
    largest_real: float
    """Largest real part of the eigenvalues; above 0 the head's own dynamics grow."""
    eigenvalues: list[complex]
    """Those of M that can differ from 0: of W_K W_Q^T, which is [K, K]; of the 2K of an S-D head.
    In falling order of their real parts."""


def head_spectra(q_HKD: Tensor, k_HKD: Tensor, *, sd: bool = False) -> list[HeadSpectrum]:
    """One spectrum a head, in fp64, without the scale K^-1/2.

    Args:
        q_HKD, k_HKD: weights that map the D inputs to a head's K queries and keys.
        sd: the scores are q_i . k_j - k_i . q_j, that is M = W_Q^T W_K - W_K^T W_Q.
    """
    q_HKD, k_HKD = q_HKD.double(), k_HKD.double()
    core_HEE = _core(q_HKD, k_HKD)
    if sd:
        core_HEE = core_HEE - core_HEE.mT
        # Of a skew matrix: imaginary, exactly.
        eigenvalues = 1j * torch.linalg.eigvalsh(-1j * core_HEE)
    else:
        eigenvalues = torch.linalg.eigvals(k_HKD @ q_HKD.mT)
    filtering_HEE, routing_HEE = (core_HEE + core_HEE.mT) / 2, (core_HEE - core_HEE.mT) / 2
    # Singular values of a symmetric and of a skew matrix, by their real spectra.
    filtering_HE = torch.linalg.eigvalsh(filtering_HEE).abs()
    routing_HE = torch.linalg.eigvalsh(1j * routing_HEE).abs()
    share_H = routing_HE.square().sum(-1) / core_HEE.square().sum((-2, -1)).clamp_min(1e-300)
    parts = zip(share_H.tolist(), routing_HE, filtering_HE, eigenvalues, strict=True)
    return [_spectrum(*part) for part in parts]


def _core(q_HKD: Tensor, k_HKD: Tensor) -> Tensor:
    """C [H, E, E], E = min(2K, D): M in an orthonormal basis of what W_Q and W_K span."""
    stacked_HDE = torch.cat([q_HKD, k_HKD], dim=1).mT
    triangle = torch.linalg.qr(stacked_HDE, mode="r").R
    K = q_HKD.shape[1]
    return triangle[..., :K] @ triangle[..., K:].mT


def _spectrum(
    share: float, routing_E: Tensor, filtering_E: Tensor, eigenvalues: Tensor
) -> HeadSpectrum:
    ordered = sorted(eigenvalues.tolist(), key=lambda x: (-x.real, -x.imag))
    return HeadSpectrum(
        routing_share=share,
        routing_rank=effective_rank(routing_E),
        filtering_rank=effective_rank(filtering_E),
        routing_count=_count(routing_E),
        filtering_count=_count(filtering_E),
        largest_real=ordered[0].real,
        eigenvalues=ordered,
    )


def effective_rank(singular_values: Tensor) -> float:
    """exp(-sum p log p) with p the values over their sum; 0 of a zero matrix."""
    total = singular_values.sum()
    if total == 0:
        return 0.0
    p = singular_values / total
    return float(torch.special.entr(p).sum().exp())


def _count(singular_values: Tensor) -> int:
    return int((singular_values > SMALL * singular_values.max()).sum())
