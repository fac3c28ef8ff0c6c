"""Faults of ranks and nodes: every interpreter that has this folder on its path imports it.

`MIXTRON_TEST_FAULTS` is a JSON list of {kind, step, rank, start}; a missing key means any.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder

FAULTS = json.loads(os.environ.get("MIXTRON_TEST_FAULTS", "[]"))


def _start() -> int:
    """Which start of the run this is: by requeue, or by link of a chain."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) + int(
        os.environ.get("MIXTRON_CHAIN_LINK", 1)
    )


def _applies(fault: dict, step: int) -> bool:
    here = {"step": step, "rank": int(os.environ["RANK"]), "start": _start()}
    return all(fault.get(key, value) == value for key, value in here.items())


def _commit(kind: str, stop) -> None:
    if kind == "raise":
        raise ValueError("a fault in the program")
    if kind == "sleep":
        time.sleep(3600)
    if kind == "wait for signal":
        while not stop.requested():
            time.sleep(0.1)
    if kind in ("SIGSEGV", "SIGKILL", "SIGUSR1"):
        os.kill(os.getpid(), getattr(signal, kind))


def _patch_loop(module) -> None:
    plain_train, plain_step = module.train, module.train_step

    def train(run, stop):
        def train_step(run):
            for fault in FAULTS:
                if _applies(fault, run.progress.step + 1):
                    _commit(fault["kind"], stop)
            return plain_step(run)

        module.train_step = train_step
        return plain_train(run, stop)

    module.train = train


def _patch_preflight(module) -> None:
    plain = module.check_node

    def check_node(task, config):
        bad = any(f["kind"] == "bad node" and f["start"] == _start() for f in FAULTS)
        return "it is broken" if bad else plain(task, config)

    module.check_node = check_node


PATCHES = {
    "mixtron.launch.loop": _patch_loop,
    "mixtron.launch.slurm.preflight": _patch_preflight,
}


class _Patcher(MetaPathFinder):
    """Patches a module once it is imported."""

    def find_spec(self, fullname, path, target=None):
        patch = PATCHES.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if FAULTS:
    sys.meta_path.insert(0, _Patcher())
