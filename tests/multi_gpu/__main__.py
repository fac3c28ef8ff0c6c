"""Checks and measures on the GPUs of one host what the other tests cannot see on CPUs.

    python -m tests.multi_gpu --out OUT [--gpus 2] [--parts parity,runs,scaling,context,large]

parity: every mixer under every kind of parallelism through NCCL, bf16, against one GPU.
runs: `mixtron train` stopped by a signal on all GPUs, resumed on half of them; deterministic mode.
scaling: tokens/s, MFU and bytes sent of the 0.4B models on one GPU and on all of them.
context: KLA at 32k and 128k tokens over context ranks, by exchange of states and of heads.
large: as scaling, with models of 1.3B.

Ends with a table of all cases and exit code 1 if one failed; results lie in OUT as JSON lines.
`--device cpu` tries the script out with the debug models on gloo.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.helpers.jobs import kill_with_children
from tests.multi_gpu import runs, tables
from tests.multi_gpu.cases import Options, Outcome, add, read

PARTS = ("parity", "runs", "scaling", "context", "large")
ATTEMPTS = 4
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # Multicast over NVLink can put the GPUs of a shared host out of service.
    "NCCL_NVLS_ENABLE": "0",
    # All ranks are on this host, which may have no name that resolves.
    "GLOO_SOCKET_IFNAME": "lo",
    # Collectives start in the order in which they were queued, before the products that hide them.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.multi_gpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=240, help="for each part")
    parser.add_argument("--only", default="", help="a pattern in the names of cases")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options = Options(arguments.gpus, arguments.device, out, arguments.only)
    outcomes: list[Outcome] = []
    for part in parts:
        for kind in ("jsonl", "running"):
            (out / f"{part}.{kind}").unlink(missing_ok=True)
        started = time.perf_counter()
        run_part(part, options, arguments.limit_s)
        print(f"part {part}: {time.perf_counter() - started:.0f} s", flush=True)
        outcomes += read(out / f"{part}.jsonl")
    print(tables.report(outcomes))
    return int(not outcomes or any(not outcome.passed for outcome in outcomes))


def run_part(part: str, options: Options, limit_s: float) -> None:
    if part == "runs":
        runs.run_all(options)
        return
    deadline = time.monotonic() + limit_s
    for _ in range(ATTEMPTS):
        if start_ranks(part, options, deadline) == 0:
            return
        path, running = options.out / f"{part}.jsonl", case_under_way(part, options)
        if running not in {outcome.case for outcome in read(path)}:
            error = "the ranks ended, or ran out of time, without an outcome; see above"
            add(path, Outcome(part, running, False, 0.0, error))
        if running == "start":
            return
        if time.monotonic() > deadline:
            add(path, Outcome(part, "all cases", False, limit_s, "the part ran out of time"))
            return


def case_under_way(part: str, options: Options) -> str:
    path = options.out / f"{part}.running"
    return path.read_text() if path.exists() else "start"


def start_ranks(part: str, options: Options, deadline: float) -> int:
    """Runs torchrun to its end, or to the deadline."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(options.gpus)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("-m", "tests.multi_gpu.worker", part, *options.for_worker()),
        ]
    )
    try:
        return process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        kill_with_children(process)
        return process.returncode


if __name__ == "__main__":
    sys.exit(main())
