"""One rank's results of parity's subjects, from processes of their own: they compile kernels, which
takes cores and not the GPU, so many run at once.

    python -m tests.multi_gpu.references OPTIONS NAME...
"""

import os
import pickle
import subprocess
import sys
import time
import traceback
from dataclasses import replace

import torch

from tests.contract.cases import PLAIN, Case
from tests.helpers.jobs import kill_with_children
from tests.multi_gpu.cases import Options, Outcome, add, start

LIMIT_S = {"cuda": 90, "cpu": 900}
"""For all of them, which start together."""


def start_all(options: Options, names: list[str]) -> list[subprocess.Popen]:
    """One process for each name where there are cores enough."""
    count = min(len(names), max(1, (os.cpu_count() or 1) // 2))
    return [
        start(
            [
                *(sys.executable, "-m", "tests.multi_gpu.references"),
                *(pickle.dumps(options).hex(), *names[i::count]),
            ],
            {"CUDA_VISIBLE_DEVICES": gpu(i, options)},
        )
        for i in range(count)
    ]


def gpu(number: int, options: Options) -> str:
    return str(number % options.gpus) if options.device == "cuda" else ""


def finish(processes: list[subprocess.Popen], limit_s: float) -> None:
    """Ends those that outlast the limit: what needs their results fails and says so."""
    deadline = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            kill_with_children(process)
            print(f"killed: {' '.join(process.args[4:])}", flush=True)  # type: ignore[index]


def main(options: Options, names: list[str]) -> None:
    from mixtron.launch.train import quiet_libraries
    from tests.multi_gpu import parity

    quiet_libraries()
    torch.set_num_threads(1)
    subjects = parity.subjects(options)
    for name in names:
        started, error, values = time.perf_counter(), "", {}
        try:
            values = parity.keep_reference(name, subjects[name], options)
        except Exception:
            error = traceback.format_exc()
        seconds = time.perf_counter() - started
        outcome = Outcome("parity", f"one rank: {name}", not error, seconds, error, [values])
        add(options.results, outcome)
        if name.endswith("triton") and not error:
            parity.train(halved(subjects[name]), parity.spread("one rank", PLAIN, 1), bf16=True)


def halved(subject: Case) -> Case:
    """With half of the heads, as tensor-parallel ranks will launch its kernels."""
    overrides = tuple(o.replace("heads=4", "heads=2") for o in subject.overrides)
    return replace(subject, overrides=overrides)


if __name__ == "__main__":
    main(pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2:])
