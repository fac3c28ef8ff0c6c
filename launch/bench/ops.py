"""`mixtron bench ops`: runs the ops' own benches, one process each."""

import importlib.util
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

import mixtron.kernels.measure
from mixtron.launch.lifetime import die_with_parent
from mixtron.megatron_ext.errors import ConfigError


def benches() -> list[str]:
    """Ops that have a bench."""
    folder = Path(mixtron.kernels.measure.__file__).parent
    return sorted(path.parent.name for path in folder.glob("*/bench.py"))


def run_benches(ops: list[str]) -> int:
    """Prints every op's tables; the number of benches that failed.

    Raises:
        ConfigError: an op without a bench, or no GPU.
    """
    known = benches()
    for op in ops:
        if op not in known:
            raise ConfigError(f"no bench for op {op!r}; ops: {', '.join(known)}")
    if not torch.cuda.is_available():
        raise ConfigError("mixtron bench ops needs a GPU, and there is none")
    if importlib.util.find_spec("fla") is None:
        print("Without the `bench` extra: flash-linear-attention is not compared with.\n")
    end_with_this, failed = partial(die_with_parent, signal.SIGTERM), []
    for op in ops or known:
        print(f"## {op}\n", flush=True)
        command = [sys.executable, "-m", f"mixtron.kernels.{op}.bench"]
        if subprocess.run(command, preexec_fn=end_with_this).returncode:
            failed.append(op)
        print(flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)
