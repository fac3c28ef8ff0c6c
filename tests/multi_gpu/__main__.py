"""Checks and measures on the GPUs of one host what the other tests cannot see on CPUs.

    python -m tests.multi_gpu --out OUT [--parts scaling,context,parity,slower,large,runs]

parity: every mixer under every kind of parallelism through NCCL, bf16, against one GPU.
runs: `mixtron train` stopped by a signal on all GPUs, resumed on half of them; deterministic mode.
scaling: tokens/s, MFU and bytes sent, of 0.4B models on one GPU and on all of them.
context: KLA at 32k and 128k tokens over context ranks, by exchange of states and of heads.
slower: as scaling, with SA+SWA and PaTH. large: as scaling, with models of 1.3B.

Ends with a table of all cases and exit code 1 if one failed; results lie in OUT as JSON lines.
`--device cpu` tries the script out with the debug models on gloo.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import torch

from tests.helpers.jobs import kill_with_children
from tests.multi_gpu import runs, tables
from tests.multi_gpu.cases import CASE_LIMIT_S, Options, Outcome, add, read

PARTS = ("scaling", "context", "parity", "slower", "large", "runs")
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
    parser.add_argument("--limit-s", type=float, default=300, help="no case begins after it")
    parser.add_argument("--only", default="", help="a pattern in the names of cases")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    os.environ.update(ENVIRONMENT)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options = Options(
        arguments.gpus,
        arguments.device,
        arguments.out.resolve(),
        tuple(part for part in parts if part != "runs"),
        arguments.only,
        time.time() + arguments.limit_s,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for path in (options.results, options.under_way):
        path.unlink(missing_ok=True)
    if options.parts:
        run_ranks(options)
    if "runs" in parts:
        runs.run_all(options)
    outcomes = read(options.results)
    print(tables.report(outcomes))
    return int(not outcomes or any(not outcome.passed for outcome in outcomes))


def run_ranks(options: Options) -> None:
    """Starts the ranks again for the cases that are left, when one of them ends all."""
    for _ in range(ATTEMPTS):
        if start_ranks(options) == 0:
            return
        part, case = under_way(options)
        if (part, case) not in {(o.part, o.case) for o in read(options.results)}:
            error = "the ranks ended without an outcome; see above"
            add(options.results, Outcome(part, case, False, error=error))
        if case == "start" or time.time() > options.until_s:
            return


def under_way(options: Options) -> tuple[str, str]:
    path = options.under_way
    return tuple(json.loads(path.read_text())) if path.exists() else (options.parts[0], "start")


def start_ranks(options: Options) -> int:
    """Runs torchrun to its end, or until a case has outlasted the limit by far."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(options.gpus)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("-m", "tests.multi_gpu.worker", pickle.dumps(options).hex()),
        ]
    )
    try:
        return process.wait(max(options.until_s - time.time(), 0) + 2 * CASE_LIMIT_S)
    except subprocess.TimeoutExpired:
        kill_with_children(process)
        return process.returncode


if __name__ == "__main__":
    sys.exit(main())
