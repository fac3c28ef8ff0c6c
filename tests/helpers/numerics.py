"""How near a low-precision result must be to the exact one."""

import torch
from torch import Tensor

FACTOR = 2.0
FLOOR = 2 * torch.finfo(torch.float32).eps
"""Relative; two roundings of the fp32 arithmetic that every kernel accumulates in."""


def assert_close_calibrated(
    actual: Tensor,
    reference_fp64: Tensor,
    reference_low_precision: Tensor,
    name: str = "result",
    maximum_factor: float = FACTOR,
    rms_factor: float = FACTOR,
) -> None:
    """The error is at most twice the one that the plain reference makes in the same dtype.

    `reference_fp64` is the exact result for the same (already rounded) inputs, and
    `reference_low_precision` the reference's own result in the dtype under test.

        error(actual) <= 2 error(reference) + 2^-22 size(exact)

    is asked of the root mean square, which is steady, and of the maximum over the elements, which
    sees a single wrong one (either may be given another factor, with a reason); size is the exact
    result's root mean square, or its largest element.
    """
    assert actual.dtype == reference_low_precision.dtype, (name, actual.dtype)
    assert actual.shape == reference_fp64.shape == reference_low_precision.shape, name
    for kind, norm, factor in (("rms", _rms, rms_factor), ("maximum", _maximum, maximum_factor)):
        size = norm(reference_fp64)
        found = norm(actual.double() - reference_fp64)
        calibration = norm(reference_low_precision.double() - reference_fp64)
        # Written so that NaN fails.
        assert found <= factor * calibration + FLOOR * size, (
            f"{name}: {kind} error {found:.3e}, the reference's in {actual.dtype} is "
            f"{calibration:.3e}, the exact {kind} is {size:.3e}"
        )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _maximum(x: Tensor) -> float:
    return float(x.abs().max())
