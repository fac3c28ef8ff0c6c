"""A small kernel of a producer and two consumers, run on the emulator, which also finds its
faults, and compiled."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.helpers.gluon_emulator import run
from tests.helpers.gluon_machine import EmulationError
from tests.helpers.machine_code import Compiled, disassembled, instructions


@gluon.jit
def product_sums_kernel(x, y, out, blocks, FAULT: gl.constexpr):
    """out = sum over blocks n of x y_n, for x [128, 64] and y_n [64, 64]."""
    x_buffer = gl.allocate_shared_memory(x.dtype, [2, 64, 64], x.layout)
    y_buffers = gl.allocate_shared_memory(y.dtype, [2, 64, 64], y.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(x_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    shared = x_buffer, y_buffers, x_full, full, empty
    gl.warp_specialize(
        [
            (_consume, (shared, out, blocks, 0, FAULT)),
            (_consume, (shared, out, blocks, 1, FAULT)),
            (_produce, (x, y, shared, blocks)),
        ],
        [4, 1],
        [232, 24],
    )


@gluon.jit
def _produce(x, y, shared, blocks):
    x_buffer, y_buffers, x_full, full, empty = shared
    mbarrier.expect(x_full, 2 * x.block_type.nbytes)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(x, [half * 64, 0], x_full, x_buffer.index(half))
    for n in range(blocks):
        mbarrier.wait(empty.index(n % 2), (n // 2 + 1) & 1)
        mbarrier.expect(full.index(n % 2), y.block_type.nbytes)
        tma.async_copy_global_to_shared(y, [n * 64, 0], full.index(n % 2), y_buffers.index(n % 2))


@gluon.jit
def _consume(shared, out, blocks, half: gl.constexpr, FAULT: gl.constexpr):
    x_buffer, y_buffers, x_full, full, empty = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    mbarrier.wait(x_full, 0)
    for n in range(blocks):
        if FAULT != "no fill waited for":
            mbarrier.wait(full.index(n % 2), (n // 2) & 1)
        y_buffer = y_buffers.index(n % 2)
        token = warpgroup_mma(x_buffer.index(half), y_buffer, acc, is_async=True)
        if FAULT == "freed too early":
            mbarrier.arrive(empty.index(n % 2))
        acc = warpgroup_mma_wait(1 if FAULT == "product not waited for" else 0, deps=[token])
        if FAULT != "freed too early" and (FAULT != "never freed" or half == 0):
            mbarrier.arrive(empty.index(n % 2))
    row = gl.arange(0, 64, gl.SliceLayout(1, layout)) + half * 64
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + row[:, None] * 64 + column[None, :], acc)


def arguments(dtype, blocks):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 64, generator=generator).to(dtype) for n in (128, 64 * blocks))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    out = torch.full((128, 64), float("nan"))
    descriptors = (TensorDescriptor.from_tensor(a, [64, 64], layout) for a in (x, y))
    return x.float() @ y.float().view(-1, 64, 64).sum(0), (*descriptors, out, blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes(dtype):
    expected, given = arguments(dtype, 5)
    run(product_sums_kernel, (1,), *given, FAULT="")
    torch.testing.assert_close(given[2], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "no fill waited for",
            "y_buffers: partition . reads what it has not waited for|is read before",
        ),
        ("freed too early", "y_buffers: .*(may still read|a product is reading it)"),
        ("never freed", r"all partitions wait.*empty\[0\] for phase 0"),
        ("product not waited for", "still in flight"),
    ],
)
def test_faults_are_found(fault, message):
    _, given = arguments(torch.float32, 5)
    with pytest.raises(EmulationError, match=message):
        run(product_sums_kernel, (1,), *given, FAULT=fault)


def test_it_compiles_for_hopper(tmp_path):
    kernel = Compiled(product_sums_kernel)
    _, given = arguments(torch.bfloat16, 5)
    kernel[(1,)](*given, FAULT="")
    assert kernel.shared_bytes[0] < 40 * 2**10
    found = instructions(disassembled(kernel.cubins[0], tmp_path))
    assert found["HGMMA"] == 2 * 4
    assert not found["STL"]
