"""Whether Triton forms are right on this GPU with this compiler: compilers have miscompiled such
kernels without a word. A form's results on a tiny case are compared with its reference's.

A result may be off by four times what the reference's own moves when what it is given and what it
returns are rounded as bf16 rounds; its largest element by eight times. That is twice what the ops'
tests allow: a run must not fail to start by the luck of one small draw (a right form was seen at
2.03 times), and miscompiled kernels are off by far more.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED

FACTORS = {"rms": 4.0, "largest": 8.0}
FLOOR = 2 * torch.finfo(torch.float32).eps
BF16_ROUNDING = 2.0**-8
"""The largest relative error of a rounding to bf16."""


class SelfTestError(Exception):
    """A form is wrong here; the message names it, the result and the error."""

    exit_code = 2


@dataclass(frozen=True)
class Case:
    op: str
    """Its folder in kernels/."""
    form: str
    """Which of its kernels, in words."""
    inputs: dict[str, Tensor]
    """On the CPU."""
    wide: tuple[str, ...]
    """Those of them that stay fp32."""
    triton: Callable[..., Tensor]
    """Of the inputs."""
    reference: Callable[..., Tensor]

    @property
    def name(self) -> str:
        return f"{self.op} ({self.form})"


@dataclass(frozen=True)
class Report:
    """What became of some cases."""

    run: list[str]
    known: list[str]
    """Right when they were run before."""
    seconds: float


def run_cases(
    cases: Iterable[Case], device: torch.device, cache: Path, *, again: bool = False
) -> Report:
    """Runs the cases that `cache` does not know to be right here, or all, and notes them there.

    Raises:
        SelfTestError: the first that is wrong.
    """
    started = time.monotonic()
    report = Report([], [], 0.0)
    for case in cases:
        note = cache / f"{fingerprint(case, device)}.json"
        if note.is_file() and not again:
            report.known.append(case.name)
            continue
        check(case, device)
        report.run.append(case.name)
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"right": case.name, "on": where(device)}) + "\n")
        os.replace(temporary, note)
    return Report(report.run, report.known, time.monotonic() - started)


def check(case: Case, device: torch.device) -> None:
    """
    Raises:
        SelfTestError: it fails; the output or a gradient is too far off, or differs between runs.
    """
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    inputs = {n: x if n in case.wide else x.to(dtype) for n, x in case.inputs.items()}
    generator = torch.Generator().manual_seed(0)
    exact_inputs = {n: x.double() for n, x in inputs.items()}
    shape = case.reference(*exact_inputs.values()).shape
    weight = torch.randn(shape, generator=generator).to(dtype)
    try:
        found, again = (
            results(case.triton, {n: x.to(device) for n, x in inputs.items()}, weight.to(device))
            for _ in range(2)
        )
    except Exception as error:  # of the compiler, of the launch, or of the kernel's addresses
        raise SelfTestError(f"{case.name} fails on {where(device)}: {error}") from error
    exact = results(case.reference, exact_inputs, weight.double())
    shaken_inputs = {n: shaken(x, generator) for n, x in exact_inputs.items()}
    moved = results(case.reference, shaken_inputs, shaken(weight.double(), generator))
    for name, x in exact.items():
        result = found[name].cpu()
        _compare(case, device, name, result.double() - x, moved[name].to(result.dtype) - x, x)
        if not torch.equal(result, again[name].cpu()):
            raise SelfTestError(
                f"{case.name} on {where(device)}: {name} differs between two runs of the same"
            )


def _compare(case: Case, device, name: str, off: Tensor, allowed: Tensor, exact: Tensor) -> None:
    for kind, factor in FACTORS.items():
        norm = _rms if kind == "rms" else _largest
        size = max(norm(exact), torch.finfo(torch.float32).tiny)
        error = norm(off) / size
        bound = factor * norm(allowed) / size + FLOOR
        if not error <= bound:  # also NaN
            raise SelfTestError(
                f"{case.name} is wrong on {where(device)}: {name} is off by {error:.1e} ({kind}, "
                f"relative), allowed is {bound:.1e}; choose the torch form (mixers.<name>.kernel)"
            )


def results(form: Callable[..., Tensor], inputs: dict[str, Tensor], weight: Tensor) -> dict:
    """The output, and every gradient of sum(output * weight)."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    output = form(*leaves.values())
    gradients = torch.autograd.grad((output * weight).sum(), list(leaves.values()))
    named = {f"the gradient of {n}": x for n, x in zip(leaves, gradients, strict=True)}
    return {"the output": output.detach(), **named}


def shaken(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1
    return x * (1 + BF16_ROUNDING * noise)


def where(device: torch.device) -> str:
    """The GPU and the versions that a result holds for."""
    name = "the interpreter"
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        name = f"{torch.cuda.get_device_name(device)} ({capability})"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def fingerprint(case: Case, device: torch.device) -> str:
    """Of all that decides whether the case is right: where, which, and the sources."""
    digest = hashlib.sha256(f"{where(device)}\n{case.name}\n".encode())
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *(here / case.op).glob("*.py")]):
        digest.update(f"{path.relative_to(here)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def cache_folder() -> Path:
    """In the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mixtron" / "self_test"


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _largest(x: Tensor) -> float:
    return float(x.abs().max())
