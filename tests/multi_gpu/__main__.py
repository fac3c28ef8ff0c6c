"""Checks and measures on the GPUs of one host what the other tests cannot see on CPUs.

    python -m tests.multi_gpu --out OUT [--parts parity,scaling:60,...] [--only PATTERN]

alone: tokens/s and MFU of models on one GPU, what the others are compared with.
parity: every mixer under every kind of parallelism through NCCL, bf16, against one GPU.
runs: `mixtron train` stopped by a signal and resumed on other numbers of GPUs, beside parity.
recorded: layers recorded as CUDA graphs with what ranks send, bit-equal to plain ones.
scaling: tokens/s, MFU and bytes sent of the same models on all GPUs.
context: long sequences over context ranks, KLA by each exchange, and the exchanges alone.
deepspeed: ZeRO 2 and 3 against one GPU.
deterministic: a run stopped and resumed on one GPU is bit-equal to the straight one.

Parts are run in the order given; seconds behind one: no case of it begins later. Ends with a table
of all cases, which is also written after each, and exit code 1 if one failed; OUT has results as
JSON lines. `--device cpu` tries the script out with the debug models on gloo.
"""

import argparse
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.multi_gpu.cases import (
    CASE_LIMIT_S,
    Options,
    Outcome,
    add,
    read,
    start,
    wait_until,
)

RANK_PARTS = (
    *("warm", "alone", "parity", "recorded"),
    *("scaling", "context", "deepspeed"),
)
BESIDE = ("runs", "deterministic")
PARTS = (*RANK_PARTS, *BESIDE)
NEED_REFERENCES = {"parity", "deepspeed"}
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
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--parts", default=",".join(p for p in PARTS if p != "deterministic"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=600, help="no case begins after it")
    parser.add_argument("--only", default="", help="a pattern in the names of cases")
    arguments = parser.parse_args()
    limits = dict(part.partition(":")[::2] for part in arguments.parts.split(","))
    if unknown := set(limits) - set(PARTS):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    os.environ.update(ENVIRONMENT)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options = Options(
        arguments.gpus,
        arguments.device,
        arguments.out.resolve(),
        tuple(part for part in limits if part in RANK_PARTS),
        arguments.only,
        time.time() + arguments.limit_s,
        {part: float(seconds) for part, seconds in limits.items() if seconds},
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for path in (options.results, options.under_way):
        path.unlink(missing_ok=True)
    jobs = {
        **({"references": refer} if NEED_REFERENCES & set(limits) else {}),
        **({"runs": run_beside} if "runs" in limits else {}),
    }
    for name in jobs:
        options.busy(name).touch()
    # First of all: what follows takes as long as their imports.
    ranks = start_ranks(options) if options.parts else []
    threads = [threading.Thread(target=work, args=(name, jobs[name], options)) for name in jobs]
    for thread in threads:
        thread.start()
    if options.parts:
        see_through(ranks, options)
    for thread in threads:
        thread.join()
    from tests.multi_gpu import runs, tables

    if "deterministic" in limits:
        runs.run(options, runs.DETERMINISTIC)
    outcomes = read(options.results)
    report = tables.report(outcomes)
    (options.out / "report.txt").write_text(report + "\n")
    print(report)
    return int(not outcomes or any(not outcome.passed for outcome in outcomes))


def work(name: str, job: Callable[[Options], None], options: Options) -> None:
    """The GPUs are busy until it is done."""
    try:
        job(options)
    finally:
        options.busy(name).unlink()


def refer(options: Options) -> None:
    from tests.multi_gpu import references, subjects

    every = list(subjects.subjects(options))
    names = [name for name in every if re.search(options.only, name)] or every
    references.finish(references.start_all(options, names), references.LIMIT_S[options.device])


def run_beside(options: Options) -> None:
    """While ranks check and time nothing."""
    from tests.multi_gpu import runs

    def is_their_turn() -> bool:
        return not {"warm", "alone"} & set(options.parts) or under_way(options)[0] not in (
            "warm",
            "alone",
        )

    wait_until(is_their_turn, limit_s=options.until_s - time.time())
    runs.run(options, runs.RESUMED)


def see_through(ranks: list[subprocess.Popen], options: Options) -> None:
    """Starts the ranks again for the cases that are left, when one of them ends all."""
    for attempt in range(ATTEMPTS):
        if attempt:
            ranks = start_ranks(options)
        if all_end_well(ranks, options):
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


def start_ranks(options: Options) -> list[subprocess.Popen]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(options.gpus), "LOCAL_WORLD_SIZE": str(options.gpus)}
    command = [sys.executable, "-m", "tests.multi_gpu.worker", pickle.dumps(options).hex()]
    return [
        start(command, shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(options.gpus))
    ]


def all_end_well(ranks: list[subprocess.Popen], options: Options) -> bool:
    """Kills all when one has failed, or when a case has outlasted the limit by far."""
    until_s = options.until_s + 2 * CASE_LIMIT_S
    try:
        while None in (codes := [rank.poll() for rank in ranks]):
            if any(codes) or time.time() > until_s:
                return False
            time.sleep(0.2)
        return not any(codes)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main())
