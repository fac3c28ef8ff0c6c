"""A program of the emulated GPU (gluon_emulator.py): partitions, barriers, shared memory, and who
knows of what.

Partitions and barriers have clocks; a partition knows the others' as of the last arrival that
reached it through barriers. Every entry of shared memory has the time at which it was written and
read last. What is not known to have happened before is an error.
"""

import linecache
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

DTYPES = {
    getattr(tl, name): getattr(torch, name)
    for name in ("bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64")
}
PARTITIONS = 4
NEVER = 2**62
TIMEOUT_S = 60


class EmulationError(RuntimeError):
    pass


class Partition:
    """What a thread has seen: the clocks of partitions and barriers."""

    def __init__(self, index: int, clock: Counter) -> None:
        self.index, self.clock = index, Counter(clock)
        self.clock[index] += 1
        self.in_flight: list[tuple[Any, list[Shared]]] = []
        self.stores: list[Shared] = []

    def now(self) -> int:
        return self.clock[self.index]


class Machine:
    """A program while it runs."""

    def __init__(self, program: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self.program, self.grid = program, grid
        self.changed = threading.Condition()
        self.running = 1
        self.waiting: dict[int, tuple[Barrier, int]] = {}
        self.failure: BaseException | None = None
        self.shared: list[Shared] = []
        self.actors = PARTITIONS
        """Barriers are counted from there on."""
        self.here = threading.local()
        self.here.partition = Partition(0, Counter())

    def end_partition(self) -> None:
        with self.changed:
            self.running -= 1
            self.check_stuck()
            self.changed.notify_all()

    def check_stuck(self) -> None:
        if self.failure is not None or not self.running or len(self.waiting) < self.running:
            return
        if any(barrier.passed(phase) for barrier, phase in self.waiting.values()):
            return
        waits = (f"partition {i}: {b.state(phase)}" for i, (b, phase) in self.waiting.items())
        self.failure = EmulationError("all partitions wait. " + "; ".join(sorted(waits)))
        self.changed.notify_all()


running: list[Machine] = []
"""The one that runs comes last."""


def machine() -> Machine:
    return running[-1]


def current() -> Partition:
    return machine().here.partition


class Barrier:
    def __init__(self, name: str) -> None:
        machine().actors += 1
        self.actor, self.name = machine().actors, name
        self.count = self.missing = self.bytes = self.completed = 0
        self.fills: list[Callable[[], None]] = []
        self.gathered, self.released = Counter(), Counter()

    def passed(self, phase: int) -> bool:
        return self.completed % 2 != phase

    def state(self, phase: int) -> str:
        return (
            f"{self.name} for phase {phase} after {self.completed} completed, "
            f"{self.missing} arrivals and {self.bytes} bytes missing"
        )

    def arrive(self, count: int) -> None:
        me = current()
        with machine().changed:
            if not self.count:
                raise EmulationError(f"{self.name} is used before mbarrier.init")
            self.gathered |= me.clock
            me.clock[me.index] += 1
            self.missing -= count
            self.settle()

    def settle(self) -> None:
        if self.missing < 0:
            raise EmulationError(f"{self.name}: {-self.missing} arrivals too many in a phase")
        if self.missing or self.bytes:
            return
        for fill in self.fills:
            fill()
        self.fills, self.missing = [], self.count
        self.completed += 1
        self.released |= self.gathered
        self.released[self.actor] = self.completed
        self.gathered = Counter()
        machine().changed.notify_all()

    def wait(self, phase: int) -> None:
        me = current()
        with machine().changed:
            if not self.count:
                raise EmulationError(f"{self.name} is used before mbarrier.init")
            machine().waiting[me.index] = self, phase
            while not self.passed(phase):
                machine().check_stuck()
                if machine().failure is not None:
                    raise EmulationError("another partition failed") from machine().failure
                if not machine().changed.wait(TIMEOUT_S):
                    raise EmulationError(f"waited too long: {self.state(phase)}")
            del machine().waiting[me.index]
            me.clock |= self.released


class Barriers(list):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[_inside(int(i), len(self))]


def _inside(i: int, count: int) -> int:
    if not 0 <= i < count:
        raise EmulationError(f"index {i} of {count}")
    return i


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = int(count)


def wait(barrier: Barrier, phase: Any, pred: Any = True, deps: Sequence = ()) -> None:
    if int(phase) not in (0, 1):
        raise EmulationError(f"{barrier.name}: phase {int(phase)} is neither 0 nor 1")
    if pred:
        barrier.wait(int(phase))


def arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(int(count))


def expect(barrier: Barrier, bytes: Any, pred: Any = True) -> None:
    if pred:
        with machine().changed:
            barrier.bytes += int(bytes)
        barrier.arrive(1)


class Shared:
    """A view: its values and, for each, who wrote it at which time of theirs, whether a store did
    and has not been fenced, and when each partition read it last."""

    def __init__(self, name: str, planes: list[Tensor]) -> None:
        self.name, self.planes = name, planes

    @staticmethod
    def new(name: str, dtype: torch.dtype, shape: list[int]) -> "Shared":
        data = torch.full(shape, poison(dtype), dtype=dtype)
        writer = torch.full(shape, -1)
        clocks = [torch.zeros(shape, dtype=torch.int64) for _ in range(1 + PARTITIONS)]
        return Shared(name, [data, writer, clocks[0], writer == 0, *clocks[1:]])

    @property
    def data(self) -> Tensor:
        return self.planes[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def _view(self, view: Callable[[Tensor], Tensor]) -> "Shared":
        return Shared(self.name, [view(x) for x in self.planes])

    def index(self, i: Any) -> "Shared":
        return self._view(lambda x: x[_inside(int(i), len(x))])

    def slice(self, start: Any, length: Any, dim: int = 0) -> "Shared":
        return self._view(lambda x: x.narrow(dim, int(start), int(length)))

    def permute(self, order: Sequence[int]) -> "Shared":
        return self._view(lambda x: x.permute(*order))

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> "Shared":
        """As another dtype of the same size, or in other shapes, through which nothing may be read
        that has been written in these: where the entries would lie is not emulated."""
        shaped = self.reshape([int(n) for n in shape])
        return Shared(self.name, [shaped.data.view(dtype_of(dtype)), *shaped.planes[1:]])

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return self._view(lambda x: x.view(*shape))

    def load(self, layout: Any) -> Tensor:
        with machine().changed:
            self.read(current().now())
            return self.data.clone()

    def store(self, value: Tensor) -> None:
        me = current()
        check(value.dtype == self.dtype, f"{self.name}: {value.dtype} stored to {self.dtype}")
        with machine().changed:
            self.write(me.index, me.now(), value)
            self.planes[3].fill_(True)

    def read(self, until: int, asynchronous: bool = False) -> None:
        """By this partition, which reads it until that time of its own."""
        me = current()
        self._check_written("reads")
        if asynchronous and bool(self.planes[3].any()):
            raise EmulationError(f"{self.name} was stored to and needs fence_async_shared")
        self.planes[4 + me.index].clamp_(min=until)

    def write(self, actor: int, at: int, value: Tensor | float) -> None:
        """By this partition or, at its request, by TMA."""
        me = current()
        if bool((self.planes[1] >= 0).any()):
            self._check_written("writes", everywhere=False)
        for reader, last in enumerate(self.planes[4:]):
            latest = int(last.max())
            if latest >= NEVER:
                raise EmulationError(f"{self.name}: written while a product is reading it")
            if reader != me.index and latest > me.clock[reader]:
                raise EmulationError(
                    f"{self.name}: partition {me.index} writes what {reader} may still read"
                )
        data, writer, written, stored = self.planes[:4]
        if isinstance(value, Tensor):
            check(value.shape == self.shape, f"{self.name}: {value.shape} for {self.shape}")
            data.copy_(value)
        else:
            data.fill_(value)
        writer.fill_(actor)
        written.fill_(at)
        stored.fill_(False)

    def _check_written(self, what: str, everywhere: bool = True) -> None:
        me, (_, writers, written) = current(), self.planes[:3]
        for writer in writers.unique().tolist():
            if writer < 0:
                check(not everywhere, f"{self.name} is read before anything is written there")
            elif int(written[writers == writer].max()) > me.clock[writer]:
                raise EmulationError(
                    f"{self.name}: partition {me.index} {what} what it has not waited for"
                )


def check(right: bool, message: str) -> None:
    if not right:
        raise EmulationError(message)


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def allocate(dtype: torch.dtype, shape: Sequence, layout: Any, value: Tensor | None = None):
    """Named like the variable that the caller's line assigns it to."""
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    name = (re.match(r"\s*(\w+) =", line) or ["", f"line {frame.f_lineno}"])[1]
    if isinstance(layout, mbarrier.MBarrierLayout):
        barriers = Barriers(Barrier(f"{name}[{i}]") for i in range(int(shape[0])))
        return barriers if len(shape) > 1 else barriers[0]
    shared = Shared.new(name, dtype_of(dtype), [int(n) for n in shape])
    machine().shared.append(shared)
    if value is not None:
        shared.store(value)
    return shared


def fence(cluster: bool = False) -> None:
    me = current().index
    with machine().changed:
        for x in machine().shared:
            x.planes[3] &= x.planes[1] != me


def dtype_of(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]


def scalar_of(x: Any) -> Tensor:
    if isinstance(x, bool | Tensor):
        return torch.as_tensor(x)
    return torch.tensor(x, dtype=torch.int32 if isinstance(x, int) else torch.float32)


class Pointer:
    def __init__(self, memory: Tensor, offset: Tensor) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + scalar_of(offset).long())

    __radd__ = __add__

    def __sub__(self, offset: Any) -> "Pointer":
        return self + -scalar_of(offset)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.memory, self.offset[index])

    def addresses(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        offset, taken = torch.broadcast_tensors(
            self.offset, torch.tensor(True) if mask is None else mask
        )
        wrong = taken & ((offset < 0) | (offset >= len(self.memory)))
        check(not bool(wrong.any()), "an address outside of its tensor")
        return torch.where(taken, offset, 0), taken


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Tensor:
    offset, taken = pointer.addresses(mask)
    found = pointer.memory[offset]
    other = poison(found.dtype) if other is None else other
    return torch.where(taken, found, torch.as_tensor(other, dtype=found.dtype))


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    offset, taken = pointer.addresses(mask)
    value = torch.as_tensor(value).to(pointer.memory.dtype).broadcast_to(offset.shape)
    pointer.memory[offset[taken]] = value[taken]


def flat(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
