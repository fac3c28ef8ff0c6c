"""Checks and measures on one GPU what the other tests cannot see on CPUs, for the READMEs' tables.

    python -m tests.one_gpu --out OUT [--parts tests,ops:300,...] [--corpus PREFIX --tokenizer FILE]

tests: every test that needs a GPU, several at once.
self-test: every Triton form on packed documents, as before a run.
ops: the ops' tables, beside their peers with the `bench` extra.
steps: training steps of the 0.4B models, with their accounts and peers.
lengths: how steps grow with the sequence, mixer by mixer.
overhead: what data, logging and saving add to a run; needs --corpus and --tokenizer.

Parts are run in the order given; seconds behind one: none of its commands takes longer. What they
print is in OUT/report.txt as soon as they print it, a table of all commands is at its end. Exit
code 1 if one failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TextIO

from mixtron.kernels.measure import table
from mixtron.launch.lifetime import die_with_parent

RECORDED = "training.layer_graphs=true"
SMALLER = "training.recompute=[norm,conv,gate,mlp_act]"
# The peer's own default, beside the config's heads.
HEADS_OF_64 = [f"mixers.path.{key}" for key in ("heads=16", "kv_heads=16", "head_dim=64")]
MODELS = ("kla", "path", "attention", "sa_swa", "log_linear")


def commands(arguments: argparse.Namespace) -> dict[str, list[list[str]]]:
    """By part."""
    files = sorted(map(str, Path("tests").glob("*/test_gpu*.py")))
    several = ["-n", str(arguments.at_once), "--dist", "worksteal"]
    four_layers = ["--change", "model.layers=4"]
    corpus = [f"data.tokenizer={arguments.tokenizer}", f"data.train.0.path={arguments.corpus}"]
    return {
        "tests": [["-m", "pytest", *several, *files]],
        "self-test": [bench("self-test")],
        "ops": [bench("ops")],
        "steps": [
            bench("step", config("kla"), RECORDED, SMALLER),
            bench("step", config("path"), RECORDED),
            bench("peer", config("path"), *HEADS_OF_64),
            bench("step", config("attention")),
            bench("step", config("sa_swa"), RECORDED),
        ],
        "lengths": [bench("lengths", config(model), *four_layers) for model in MODELS],
        "overhead": [bench("overhead", config("kla"), RECORDED, *corpus)],
    }


def bench(*arguments: str) -> list[str]:
    return ["-m", "mixtron.launch.cli", "bench", *arguments]


def config(name: str) -> str:
    return f"configs/{name}_400m.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.one_gpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="tests,self-test,ops,steps,lengths")
    parser.add_argument("--at-once", type=int, default=min(8, os.cpu_count() or 1), help="tests")
    parser.add_argument("--corpus", help="prefix of a shard")
    parser.add_argument("--tokenizer", help="of that shard")
    arguments = parser.parse_args()
    if not Path("configs").is_dir():
        parser.error("it is run in the repository's root, and there is no configs/ here")
    try:
        limits = {
            part: float(seconds) if seconds else None
            for part, _, seconds in (x.partition(":") for x in arguments.parts.split(","))
        }
    except ValueError as error:
        parser.error(f"--parts: {error}")
    known = commands(arguments)
    if unknown := set(limits) - set(known):
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; parts: {', '.join(known)}")
    if "overhead" in limits and not (arguments.corpus and arguments.tokenizer):
        parser.error("--parts: overhead needs --corpus and --tokenizer")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (arguments.out / "report.txt").open("w", buffering=1) as report:
        for part, limit in limits.items():
            for command in known[part]:
                rows.append((part, *run(command, limit, report)))
        summary = table(("part", "command", "exit code", "seconds"), rows)
        print(f"\n{summary}", file=report)
    print(summary)
    return int(any(code for _, _, code, _ in rows))


def run(command: list[str], limit_s: float | None, report: TextIO) -> tuple[str, int, str]:
    """The command, its exit code and seconds; what it prints goes to the report and on. After the
    limit it and its children are killed."""
    name, started = " ".join(command[1:]), time.perf_counter()
    print(f"\n## {name}\n", file=report)
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=report,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        print(f"\nkilled after {limit_s:g} s", file=report)
    seconds = f"{time.perf_counter() - started:.0f}"
    print(f"{name}: exit code {code}, {seconds} s", flush=True)
    return name, code, seconds


if __name__ == "__main__":
    sys.exit(main())
