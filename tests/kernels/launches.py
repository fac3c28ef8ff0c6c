"""What an op launches, compiled for GPUs that are not there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mixtron.kernels import triton_tools
from mixtron.kernels.windowed_attention import triton_plan
from tests.helpers.machine_code import TYPES

OPTIONS = ("num_warps", "num_stages", "maxnreg")


@contextmanager
def recorded() -> Iterator[dict[tuple, Callable[[int], int]]]:
    """Kernels that would be launched on a GPU, inputs being bf16 on the CPU: by what they are
    compiled for, what gives the shared memory in bytes that one needs for a compute capability."""
    found: dict[tuple, Callable[[int], int]] = {}

    def record(kernel, *args, grid, warmup, **kwargs):
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        signature, constants, aligned = {}, {}, {}
        for index, param in enumerate(kernel.params):
            value = named[param.name]
            if param.is_constexpr or value is None:
                # The interpreter multiplies in fp32, a GPU in the inputs' dtype.
                constants[param.name] = tl.bfloat16 if value is tl.float32 else value
                signature[param.name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[param.name] = TYPES[value.dtype]
                aligned[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                dtype = TYPES[value.base.dtype].removeprefix("*")
                signature[param.name] = f"tensordesc<{dtype}{list(value.block_shape)}>"
            else:
                signature[param.name] = "fp32" if isinstance(value, float) else "i32"

        def shared_bytes(capability: int) -> int:
            source = ASTSource(kernel, signature, constants, aligned)
            target = GPUTarget("cuda", capability, 32)
            return compile(source, target=target, options=options).metadata.shared  # pyright: ignore

        constexprs = tuple(f"{name}={value}" for name, value in constants.items())
        found[kernel.__name__, constexprs, *sorted(options.items())] = shared_bytes

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(triton_tools, "INTERPRETED", True),
        mock.patch.object(triton_plan, "INTERPRETED", True),
    ):
        yield found
