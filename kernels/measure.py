"""Times and memory of an op on the GPU, for the tables in the ops' READMEs."""

import statistics
from collections.abc import Callable, Sequence
from importlib import metadata

import torch
from torch import Tensor

PACKAGES = ("torch", "triton", "fla-core", "flash-linear-attention", "flash-qla")


BUSY_CYCLES = 2_000_000
"""About a millisecond."""


def time_ms(run: Callable[[], object], warm_up: int = 3, repeats: int = 12) -> float:
    """Median milliseconds of `run()` on the current GPU, by CUDA events.

    The GPU is kept busy until everything is launched, as in training, where the host runs ahead.
    """
    for _ in range(warm_up):
        run()
    times_ms = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms)


def extra_mib(run: Callable[[], object]) -> float:
    """Peak MiB that `run()` allocates above what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def forward_and_backward(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor]
) -> tuple[float, float, float]:
    """(forward ms, forward + backward ms, extra MiB) of an op whose result is `forward()`.

    Gradients of `inputs` are made anew each time; the output's gradient is a fixed random tensor.
    """
    grad = torch.randn_like(forward())

    def both():
        torch.autograd.grad(forward(), inputs, grad)

    with torch.no_grad():
        forward_ms = time_ms(forward)
    return forward_ms, time_ms(both), extra_mib(both)


def versions() -> str:
    """The GPU and the packages that a table was measured with."""
    found = [torch.cuda.get_device_name()]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats get three significant digits."""
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in (list(heads), *cells)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])
