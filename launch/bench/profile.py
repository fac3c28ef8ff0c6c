"""Where a step's time goes: kernels, and the operators that launched them, by torch's profiler."""

import sys
from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from triton.runtime.jit import JITFunction

from mixtron.kernels.measure import table

KINDS = {
    "matrix product": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "attention": ("flash", "fmha", "attention"),
    "copy or cast": ("copy", "memcpy", "catarray"),
    "communication": ("nccl",),
    "elementwise of torch": ("elementwise", "triton_poi", "multi_tensor"),
    "reduction of torch": ("reduce", "softmax", "layer_norm", "rms", "triton_red", "triton_per"),
}
"""What a kernel's name tells, where it is not one of `own_kernels`; the first kind that fits."""
NAME_WIDTH = 72


def profile(step: Callable[[], object], steps: int, rows: int) -> tuple[str, dict[str, float]]:
    """Tables of time by kind of kernel, by kernel and by operator, in ms a step; then of the time
    in which the GPU did nothing, by the kernel that it waited for; and ms a step by kind.

    The last one is of the host's time, by operator and call of CUDA; without a GPU it is alone.
    """
    kinds_ms: dict[str, float] = {}
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch_profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.key_averages()
    operators = [e for e in events if e.device_type == DeviceType.CPU]
    parts = []
    if on_gpu:
        kernels = [
            (e.key, e.self_device_time_total, e.count)
            for e in events
            if e.device_type == DeviceType.CUDA and not e.is_user_annotation
        ]
        kinds: dict[str, tuple[float, int]] = {}
        own = own_kernels()
        for name, time_us, count in kernels:
            kind = own.get(name) or kind_of(name)
            before = kinds.get(kind, (0.0, 0))
            kinds[kind] = (before[0] + time_us, before[1] + count)
        kinds_ms = {kind: time_us / 1000 / steps for kind, (time_us, _) in kinds.items()}
        parts.append(_table("kind", [(k, *v) for k, v in kinds.items()], steps, rows))
        parts.append(_table("kernel", kernels, steps, rows))
        launched = [(e.key, e.self_device_time_total, e.count) for e in operators]
        parts.append(_table("operator", launched, steps, rows))
        ran = [
            (e.time_range.start, e.time_range.end, e.name)
            for e in profiler.events() or []
            if e.device_type == DeviceType.CUDA and not e.is_user_annotation
        ]
        parts.append(_table("idle before", idle_before(ran), steps, rows // 2))
    host = [(e.key, e.self_cpu_time_total, e.count) for e in operators]
    parts.append(_table("on the host", host, steps, rows))
    return "\n\n".join(parts), kinds_ms


def own_kernels() -> dict[str, str]:
    """ "own: OP" by name, of every Triton kernel that has been imported; both ops where two have
    one of a name."""
    found: dict[str, str] = {}
    for path, module in list(sys.modules.items()):
        if path.startswith("mixtron.kernels."):
            op = path.split(".")[2]
            for name, member in vars(module).items():
                if isinstance(member, JITFunction) and member.__module__ == path:
                    found[name] = f"{found[name]} or {op}" if name in found else f"own: {op}"
    return found


def kind_of(kernel: str) -> str:
    """One of `KINDS`, or "other"."""
    lowered = kernel.lower()
    for kind, parts in KINDS.items():
        if any(part in lowered for part in parts):
            return kind
    return "other"


def idle_before(ran: list[tuple[float, float, str]]) -> list[tuple[str, float, int]]:
    """(kernel, us, gaps) of the time when none ran, by the kernel that came next.

    Args:
        ran: start us, end us and name of every kernel.
    """
    found: dict[str, tuple[float, int]] = {}
    busy_until = min((start for start, _, _ in ran), default=0.0)
    for start, end, name in sorted(ran):
        if start > busy_until:
            idle, gaps = found.get(name, (0.0, 0))
            found[name] = (idle + start - busy_until, gaps + 1)
        busy_until = max(busy_until, end)
    return [(name, *values) for name, values in found.items()]


def _table(head: str, found: list[tuple[str, float, int]], steps: int, rows: int) -> str:
    total = sum(time_us for _, time_us, _ in found) or 1.0
    found = sorted(found, key=lambda row: -row[1])[:rows]
    lines = [
        (
            name.replace("|", "/")[:NAME_WIDTH],
            f"{time_us / 1000 / steps:,.2f}",
            f"{time_us / total:.1%}",
            f"{count / steps:,.0f}",
        )
        for name, time_us, count in found
        if time_us > 0
    ]
    lines.append(("all", f"{total / 1000 / steps:,.2f}", "100.0%", ""))
    return table((head, "ms a step", "share", "calls"), lines)
