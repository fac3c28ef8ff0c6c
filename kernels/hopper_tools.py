"""What Gluon kernels for Hopper share: barriers, rings of buffers that a producer fills and
consumers free, layouts of wgmma.

A ring has some slots of shared memory. Its n-th item, counted from 0 over the kernel's life, lies
in slot n % slots; consumers wait until it is full, the producer until they have freed the item
before it.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of boxes of 64 or 128 columns of 16 bits in shared memory, for TMA and wgmma."""
SWIZZLED_3 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""The same for boxes [1, rows, columns], which wgmma takes reshaped to two dimensions."""
LINEAR = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
"""Of fp32 scalars."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
"""Of a thread, unless a kernel has others."""


@gluon.constexpr_function
def accumulator(columns):
    """Of a product of 64 rows by four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def left_operand(columns):
    """Of a product whose left operand stays in registers, with an accumulator of `columns`."""
    return gl.DotOperandLayout(0, accumulator(columns), 2)


@gluon.jit
def begin_square(x, y):
    """Begins x y, [64, 64]."""
    zeros = gl.zeros([64, 64], gl.float32, accumulator(64))
    return warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def begin_wide(x, y):
    """Begins x y, [64, 128]."""
    zeros = gl.zeros([64, 128], gl.float32, accumulator(128))
    return warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def add(x, y, acc):
    """Begins x y + acc."""
    return warpgroup_mma(x, y, acc, is_async=True)


@gluon.jit
def barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """One for each slot, that completes a phase after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


@gluon.jit
def ring(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Buffers [SLOTS, *box] for what a descriptor loads, each full at one barrier and empty at
    another."""
    shape: gl.constexpr = [SLOTS] + descriptor.block_shape  # noqa: RUF005 (Gluon has no *)
    buffers = gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)
    return buffers, barriers(SLOTS, 1), barriers(SLOTS, READERS)


@gluon.jit
def fill(ring, n, descriptor, coordinates):
    """Loads the ring's n-th item, one box, when its slot is free."""
    buffers, full, empty = ring
    SLOTS: gl.constexpr = buffers.shape[0]
    slot = n % SLOTS
    mbarrier.wait(empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, coordinates, full.index(slot), buffers.index(slot))


@gluon.jit
def fill_with(ring, n, descriptor, coordinates, others, other, place):
    """Loads the ring's n-th item, and with it a box of another descriptor into the same slot of
    `others`, buffers of their own."""
    buffers, full, empty = ring
    SLOTS: gl.constexpr = buffers.shape[0]
    slot = n % SLOTS
    mbarrier.wait(empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    full = full.index(slot)
    mbarrier.expect(full, descriptor.block_type.nbytes + other.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, coordinates, full, buffers.index(slot))
    tma.async_copy_global_to_shared(other, place, full, others.index(slot))


@gluon.jit
def take(ring, n):
    """The ring's n-th item, when it has come."""
    buffers, full, _ = ring
    SLOTS: gl.constexpr = buffers.shape[0]
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)
    return item(ring, n)


@gluon.jit
def item(ring, n):
    """The ring's n-th item, which has been waited for."""
    buffers, _, _ = ring
    return buffers.index(n % buffers.shape[0])


@gluon.jit
def free(ring, n, pred=True):
    """The n-th item is not needed any more: one reader's arrival."""
    buffers, _, empty = ring
    mbarrier.arrive(empty.index(n % buffers.shape[0]), pred=pred)


@gluon.jit
def halves(descriptor, SLOTS: gl.constexpr):
    """A ring of pairs of boxes, one for each consumer."""
    shape: gl.constexpr = [2 * SLOTS] + descriptor.block_shape  # noqa: RUF005 (Gluon has no *)
    buffers = gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)
    return buffers, barriers(SLOTS, 1), barriers(SLOTS, 2)


@gluon.jit
def fill_halves(ring, n, descriptor, first, second):
    """Loads the n-th pair, boxes at two places, when its slot is free."""
    buffers, full, empty = ring
    SLOTS: gl.constexpr = buffers.shape[0] // 2
    slot = n % SLOTS
    mbarrier.wait(empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), 2 * descriptor.block_type.nbytes)
    full = full.index(slot)
    tma.async_copy_global_to_shared(descriptor, first, full, buffers.index(2 * slot))
    tma.async_copy_global_to_shared(descriptor, second, full, buffers.index(2 * slot + 1))


@gluon.jit
def half_of(ring, n, half: gl.constexpr):
    """A consumer's box of the n-th pair."""
    buffers, _, _ = ring
    return buffers.index(2 * (n % (buffers.shape[0] // 2)) + half)


@gluon.jit
def take_half(ring, n, half: gl.constexpr):
    """The same, when the pair has come."""
    buffers, full, _ = ring
    SLOTS: gl.constexpr = buffers.shape[0] // 2
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)
    return half_of(ring, n, half)


@gluon.jit
def free_half(ring, n):
    buffers, _, empty = ring
    mbarrier.arrive(empty.index(n % (buffers.shape[0] // 2)))


@gluon.jit
def turns(count):
    """How many of `count` pieces of work this program takes."""
    rounds = count // gl.num_programs(0)
    return rounds + (turn_of(rounds) < count).to(gl.int32)


@gluon.jit
def turn_of(n):
    """The program's n-th piece: each second round goes backwards, so that pieces that become
    shorter and shorter are dealt evenly."""
    programs, program = gl.num_programs(0), gl.program_id(0)
    return n * programs + gl.where(n % 2 == 1, programs - 1 - program, program)
