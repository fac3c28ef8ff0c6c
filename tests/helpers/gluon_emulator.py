"""Runs Gluon kernels for Hopper on the CPU, from their own source.

    run(kernel, grid, *arguments, **constants)

Arguments are tensors, Gluon's host TensorDescriptors, ints, floats and None, constants what the
kernel declares `gl.constexpr`. Programs run one after another, a program's partitions as threads.
Dtypes are those of the arguments: give fp32 ones, whatever the layouts say, to compare sums, bf16
ones to see the rounding. Layouts are ignored; that they fit is for the compiler to say
(`machine_code.Compiled`). Byte counts of barriers must be written as
`descriptor.block_type.nbytes`, casts of bits as `gl.cast(x, dtype, bitcast=True)`, dtypes of
pointers as `pointer.dtype.element_ty`; layouts of tensors cannot be asked for.

An error (`EmulationError`) is, in whatever order the threads happen to run:
- a partition that reads shared memory which a TMA load, a store or another partition writes, or
  writes what is still read, without a chain of barriers (arrive, wait) between the two;
- shared memory that is reused while a product that reads it has not been waited for, or a product
  taken before it has been waited for;
- a store to shared memory that a product or a TMA store reads without `fence_async_shared`;
- partitions that all wait: the barriers, phases and missing arrivals are named;
- addresses outside of a tensor, shapes and dtypes of operands that do not match.
"""

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.helpers.gluon_machine import (
    DTYPES,
    NEVER,
    PARTITIONS,
    Barrier,
    Machine,
    Partition,
    Pointer,
    Shared,
    allocate,
    arrive,
    check,
    current,
    dtype_of,
    expect,
    fence,
    flat,
    init,
    load,
    machine,
    poison,
    running,
    scalar_of,
    store,
    wait,
)

# TMA


class Descriptor:
    """A host TensorDescriptor within a kernel."""

    def __init__(self, host: TensorDescriptor) -> None:
        base, block = flat(host.base), [int(n) for n in host.block_shape]
        first = host.base.storage_offset()
        self.x = base.as_strided(list(host.shape), list(host.strides), first)
        self.block_shape, self.dtype, self.layout = block, host.base.dtype, host.layout
        self.block_type = types.SimpleNamespace(
            nbytes=torch.empty(block, dtype=self.dtype, device="meta").nbytes,
            shape=block,
            element_ty=self.dtype,
        )
        self.shape = host.shape

    def box(self, coordinates: Sequence) -> tuple[tuple, tuple]:
        """The part of the tensor and of the block that lie on each other."""
        check(len(coordinates) == len(self.block_shape), "one coordinate for each dimension")
        outer, inner = [], []
        sizes = zip(map(int, coordinates), self.block_shape, self.x.shape, strict=True)
        for at, length, size in sizes:
            lo, hi = max(at, 0), min(at + length, size)
            outer.append(slice(lo, max(lo, hi)))
            inner.append(slice(lo - at, max(lo, hi) - at))
        return tuple(outer), tuple(inner)


def _load_box(
    descriptor: Descriptor, coord: Sequence, barrier: Barrier, result: Shared, pred: Any = True
) -> None:
    if not pred:
        return
    check(list(result.shape) == descriptor.block_shape, f"{result.name}: not the block's shape")
    check(result.dtype == descriptor.dtype, f"{result.name}: {descriptor.dtype} loaded to it")
    outer, inner = descriptor.box(coord)
    block = torch.zeros(descriptor.block_shape, dtype=descriptor.dtype)
    block[inner] = descriptor.x[outer]
    with machine().changed:
        result.write(barrier.actor, barrier.completed + 1, poison(result.dtype))
        barrier.fills.append(lambda: result.data.copy_(block))
        barrier.bytes -= descriptor.block_type.nbytes
        barrier.settle()


def _store_box(descriptor: Descriptor, coord: Sequence, source: Shared) -> None:
    check(list(source.shape) == descriptor.block_shape, f"{source.name}: not the block's shape")
    check(source.dtype == descriptor.dtype, f"{source.name}: stored as {descriptor.dtype}")
    with machine().changed:
        source.read(NEVER, asynchronous=True)
        outer, inner = descriptor.box(coord)
        descriptor.x[outer] = source.data[inner]
        current().stores.append(source)


def _store_wait(pendings: int) -> None:
    me = current()
    with machine().changed:
        while len(me.stores) > int(pendings):
            me.stores.pop(0).planes[4 + me.index].fill_(me.now())


# Products


class Accumulator:
    """A product that has not been waited for."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _product(
    a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    me = current()
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    check(isinstance(b, Shared), "the right operand must lie in shared memory")
    check(a.dtype == b.dtype, f"operands are {a.dtype} and {b.dtype}")
    with machine().changed:
        for x in operands:
            x.read(NEVER if is_async else me.now(), asynchronous=True)
        a, b = (x.data if isinstance(x, Shared) else x for x in (a, b))
        check(a.shape[0] % 64 == 0, f"{a.shape[0]} rows are no multiple of 64")
        value = a.float() @ b.float()
        before = acc.value if isinstance(acc, Accumulator) else acc
        check(before.shape == value.shape, f"a sum of {before.shape} for {value.shape}")
        value = value + before if use_acc else value
        if not is_async:
            return value
        found = Accumulator(value)
        me.in_flight.append((found, operands))
        return found


def _product_wait(num_outstanding: int = 0, deps: Sequence | None = None):
    check(bool(deps), "warpgroup_mma_wait needs deps")
    me = current()
    with machine().changed:
        left = len(me.in_flight) - int(num_outstanding)
        done, me.in_flight = me.in_flight[: max(left, 0)], me.in_flight[max(left, 0) :]
        for x in (x for _, operands in done for x in operands):
            x.planes[4 + me.index].fill_(me.now())
        for x in (x for _, operands in me.in_flight for x in operands):
            x.planes[4 + me.index].fill_(NEVER)
        flying = [found for found, _ in me.in_flight]
    for x in deps or ():
        check(x not in flying if isinstance(x, Accumulator) else True, "a product still in flight")
    values = [x.value if isinstance(x, Accumulator) else x for x in deps or ()]
    return values[0] if len(values) == 1 else tuple(values)


# The language


def _cast(x: Any, dtype: Any, bitcast: bool = False, **_: Any) -> Tensor:
    return scalar_of(x).view(dtype_of(dtype)) if bitcast else scalar_of(x).to(dtype_of(dtype))


def _full(shape: Sequence, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return torch.full([int(n) for n in shape], value, dtype=dtype_of(dtype))


def _elementwise(function: Callable) -> Callable:
    return lambda *x, **_: function(*map(scalar_of, x))


def _range(*bounds: Any, **_: Any) -> Iterator[Tensor]:
    return map(scalar_of, range(*map(int, bounds)))


def _reduction(function: Callable) -> Callable:
    return lambda x, axis, **_: function(x, dim=axis)


def _warp_specialize(functions_and_args, worker_num_warps, worker_num_regs):
    """The first one's results."""
    (first, first_args), *workers = functions_and_args
    check(len(workers) == len(worker_num_warps) == len(worker_num_regs), "one for each worker")
    check(len(workers) < PARTITIONS, f"at most {PARTITIONS - 1} workers are emulated")
    parent, members = current(), []

    def work(function, arguments, partition):
        machine().here.partition = partition
        try:
            with torch.no_grad():
                return function(*arguments)
        except BaseException as error:
            machine().failure = machine().failure or error
        finally:
            machine().end_partition()

    for i, (function, arguments) in enumerate(workers, 1):
        tensors = [x for x in arguments if isinstance(x, Tensor) and x.ndim]
        check(not tensors, "workers take no tensors of registers")
        partition = Partition(i, parent.clock)
        thread = threading.Thread(target=work, args=(function, arguments, partition), daemon=True)
        members.append((thread, partition))
    parent.clock[parent.index] += 1
    machine().running = 1 + len(members)
    for thread, _ in members:
        thread.start()
    results = work(first, first_args, parent)
    for thread, partition in members:
        thread.join()
        parent.clock |= partition.clock
    machine().running = 1
    failure = machine().failure
    if failure is not None:
        raise failure
    return results


class Language:
    """Stands in for gluon.language and triton.language in a kernel's globals."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(real, name, None)
        found = getattr(tl, name) if found is None else found
        return DTYPES.get(found, found) if isinstance(found, tl.dtype) else found

    constexpr = staticmethod(lambda x: x)
    static_range, range = staticmethod(range), staticmethod(_range)
    program_id = staticmethod(lambda axis: scalar_of(machine().program[axis]))
    num_programs = staticmethod(lambda axis: scalar_of(machine().grid[axis]))
    arange = staticmethod(lambda lo, hi, layout=None: torch.arange(lo, hi, dtype=torch.int32))
    zeros = staticmethod(lambda shape, dtype, layout=None: _full(shape, 0, dtype))
    zeros_like = staticmethod(torch.zeros_like)
    full, cast, to_tensor = map(staticmethod, (_full, _cast, scalar_of))
    load, store = staticmethod(load), staticmethod(store)
    full_like = staticmethod(torch.full_like)
    convert_layout = set_auto_layout = staticmethod(lambda x, layout, **_: x)
    allocate_shared_memory = staticmethod(allocate)
    warp_specialize = staticmethod(_warp_specialize)
    thread_barrier = static_print = device_print = staticmethod(lambda *_, **__: None)
    assume = multiple_of = max_contiguous = staticmethod(lambda x, *_: x)
    where = staticmethod(lambda c, x, y: torch.where(scalar_of(c), x, y))
    maximum = staticmethod(_elementwise(torch.maximum))
    minimum = staticmethod(_elementwise(torch.minimum))
    exp2, exp = staticmethod(_elementwise(torch.exp2)), staticmethod(_elementwise(torch.exp))
    log2, log = staticmethod(_elementwise(torch.log2)), staticmethod(_elementwise(torch.log))
    sqrt, abs = staticmethod(_elementwise(torch.sqrt)), staticmethod(_elementwise(torch.abs))
    fma = staticmethod(lambda x, y, z: x * y + z)
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)
    max, min, sum = (staticmethod(_reduction(f)) for f in (torch.amax, torch.amin, torch.sum))
    expand_dims = staticmethod(torch.unsqueeze)
    permute = staticmethod(lambda x, order: x.permute(*order))
    reshape = staticmethod(lambda x, shape: x.reshape([int(n) for n in shape]))
    join = staticmethod(lambda x, y: torch.stack([x, y], -1))
    split = staticmethod(lambda x: x.unbind(-1))

    @staticmethod
    def static_assert(condition: Any, message: str = "") -> None:
        check(bool(condition), message or "static_assert")


LANGUAGE = Language()
TMA = types.SimpleNamespace(
    async_copy_global_to_shared=_load_box,
    async_copy_shared_to_global=_store_box,
    store_wait=_store_wait,
)
MBARRIER = types.SimpleNamespace(
    init=init,
    invalidate=lambda barrier: None,
    wait=wait,
    arrive=arrive,
    expect=expect,
    MBarrierLayout=mbarrier.MBarrierLayout,
)
HOPPER = types.SimpleNamespace(
    fence_async_shared=fence,
    warpgroup_mma=_product,
    warpgroup_mma_init=Accumulator,
    warpgroup_mma_wait=_product_wait,
    tma=TMA,
    mbarrier=MBARRIER,
)
STAND_INS = {id(tma): TMA, id(mbarrier): MBARRIER, id(hopper): HOPPER} | {
    id(x): LANGUAGE for x in (tl, real)
}
for _module, _stand_in in ((tma, TMA), (mbarrier, MBARRIER), (hopper, HOPPER), (real, LANGUAGE)):
    STAND_INS |= {
        id(getattr(_module, name)): getattr(_stand_in, name)
        for name in dir(_module)
        if callable(getattr(_module, name)) and name in dir(_stand_in) and name != "constexpr"
    }


def _emulated(value: Any, known: dict[int, Any]) -> Any:
    """A value of a kernel's globals: jit functions as functions of the emulated language."""
    if id(value) in STAND_INS:
        return STAND_INS[id(value)]
    if isinstance(value, tl.constexpr):
        return _emulated(value.value, known)
    if isinstance(value, tl.dtype):
        return DTYPES.get(value, value)
    source = getattr(value, "fn", None)
    if not isinstance(source, types.FunctionType):
        return value
    if id(value) not in known:
        scope: dict[str, Any] = {"__builtins__": __builtins__, "range": _range}
        code, defaults = source.__code__, source.__defaults__ or ()
        default_values = tuple(_emulated(x, known) for x in defaults)
        known[id(value)] = types.FunctionType(code, scope, source.__name__, default_values)
        names = _names(code) & set(source.__globals__)
        scope |= {name: _emulated(source.__globals__[name], known) for name in names}
    return known[id(value)]


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, Tensor):
        return Pointer(flat(x), torch.tensor(x.storage_offset()))
    return x if x is None else scalar_of(x)


def run(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Runs the programs of a grid of up to three dimensions.

    Raises:
        EmulationError: see above; what the kernel itself raises is raised as it is.
    """
    constants.pop("num_warps", None)
    function = _emulated(kernel, {})
    values = {name: _emulated(x, {}) for name, x in constants.items()}
    x, y, z = (int(n) for n in (*grid, 1, 1)[:3])
    for program in ((i, j, k) for k in range(z) for j in range(y) for i in range(x)):
        running.append(Machine(program, (x, y, z)))
        try:
            with torch.no_grad():
                function(*map(_argument, arguments), **values)
        finally:
            running.pop()
