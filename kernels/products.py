"""Products that are added to what is there."""

import torch
from torch import Tensor


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """sum + a b, written into `sum`, which may be wider than a and b.

    On a GPU the matrix product adds in the sum's dtype itself; elsewhere a narrower one is rounded
    to the operands' dtype first.
    """
    if a_MK.dtype == sum_MN.dtype:
        return torch.addmm(sum_MN, a_MK, b_KN, out=sum_MN)
    if a_MK.is_cuda:
        return torch.addmm(sum_MN, a_MK, b_KN, out_dtype=sum_MN.dtype, out=sum_MN)  # type: ignore[call-overload]
    return sum_MN.add_(a_MK @ b_KN)
