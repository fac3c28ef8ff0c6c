"""Launches of Triton kernels at less cost to the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor

from mixtron.kernels import triton_tools

DESCRIPTORS = (TensorDescriptor, hopper.TensorDescriptor)


class Launched:
    """A kernel whose `constexpr` parameters come last.

    Triton's `kernel[grid](...)` binds and hashes every argument in Python at each launch, which
    takes the host longer than a small kernel takes the GPU. Here that is done for the first launch
    of a kind. A kind is what Triton compiles for: device, constants, dtypes, pointers that lie on
    16 bytes, integers that are 1, multiples of 16 or beyond 32 bits, and arguments that are None.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, tuple] = {}

    def __call__(
        self,
        grid: Sequence[int],
        *arguments: Any,
        num_warps: int,
        maxnreg: int | None = None,
        **constants: Any,
    ) -> None:
        """Arguments in the kernel's order, constants by name."""
        options = {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})
        if triton_tools.INTERPRETED:
            self.kernel[grid](*arguments, **constants, **options)
            return
        device = torch.cuda.current_device()
        kind = (device, *options.values(), *constants.items(), *_kinds(arguments))
        known = self.compiled.get(kind)
        if known is None:
            compiled = self.kernel[grid](*arguments, **constants, **options)
            values = tuple(constants[name] for name in self.kernel.arg_names[len(arguments) :])
            self.compiled[kind] = compiled, values
            return
        compiled, values = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        # As Triton does, without its hooks around a launch: metadata, enter, exit.
        compiled.run(
            *(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None),
            *arguments,
            *values,
        )


def _kinds(arguments: Sequence[Any]) -> list[Any]:
    """What Triton would compile anew for, of each argument."""
    found: list[Any] = []
    for x in arguments:
        of_type = type(x)
        if of_type is int:
            found.append((x == 1) + 2 * (x % 16 == 0) + 4 * (-(2**31) <= x < 2**31))
        elif of_type in DESCRIPTORS:
            found += (x.base.dtype, *x.block_shape)
        elif isinstance(x, Tensor):
            found += (x.dtype, x.data_ptr() % 16 == 0)
        else:
            found.append(of_type)
    return found
