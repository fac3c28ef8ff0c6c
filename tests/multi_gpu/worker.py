"""One rank of a part: runs its cases one after the other in one process, under torchrun.

    python -m torch.distributed.run --nproc-per-node N -m tests.multi_gpu.worker PART OPTIONS...

A case that raises on all ranks is noted, and the next one runs. When it raises on some only, the
others may wait for it for ever: all end, and are started again for the cases that are left.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mixtron.launch.train import quiet_libraries
from mixtron.megatron_ext.parallel import init_distributed
from tests.multi_gpu.cases import Case, Options, Outcome, add, read

CASE_LIMIT_S = 75
GRACE_S = 20
"""How long the other ranks of a failed case may take to fail as well."""


class World:
    """The process group that a case runs in: all ranks, or one of each rank's own."""

    def __init__(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self.alone: bool | None = None
        self.count = 0

    def enter(self, alone: bool) -> None:
        if self.alone == alone:
            return
        self.leave()
        self.alone = alone
        store, rank, size = dist.HashStore(), 0, 1
        if not alone:
            store = dist.PrefixStore(f"world-{self.count}", self.store)
            rank, size = self.rank, self.size
        self.count += 1
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        init_distributed()

    def leave(self) -> None:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        self.alone = None

    def exchange(self, name: str, mine: dict, limit_s: float) -> list[dict]:
        """What each rank says of a case. Raises dist.DistStoreError when one stays silent."""
        self.store.set(f"{name}/{self.rank}", json.dumps(mine))
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.store.wait(keys, timedelta(seconds=limit_s))
        return [json.loads(self.store.get(key)) for key in keys]


def main(part: str, options: Options) -> None:
    quiet_libraries()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    module = importlib.import_module(f"tests.multi_gpu.{part}")
    path = options.out / f"{part}.jsonl"
    done = {outcome.case for outcome in read(path)}
    world = World()
    # Worlds of one first: changing between them and the world of all takes seconds.
    cases = sorted(module.cases(options), key=lambda case: not case.alone)
    for number, case in enumerate(cases):
        if case.name not in done and re.search(options.only, case.name):
            outcome = run(part, number, case, world, options)
            if world.rank == 0:
                add(path, outcome)
                status = "passed" if outcome.passed else f"FAILED\n{outcome.error}"
                print(f"{part}: {case.name}: {outcome.seconds:.1f} s {status}", flush=True)
    world.leave()


def run(part: str, number: int, case: Case, world: World, options: Options) -> Outcome:
    """Ends the process when the ranks no longer agree."""
    if world.rank == 0:
        (options.out / f"{part}.running").write_text(case.name)
    started = time.perf_counter()
    error, values = "", {}
    # A rank that hangs says where, and ends all.
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        world.enter(case.alone)
        values = case.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        error = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    limit_s = GRACE_S if error else CASE_LIMIT_S
    try:
        all_said = world.exchange(f"case-{number}", {"error": error, "values": values}, limit_s)
    except dist.DistError:
        print(f"rank {world.rank}: {case.name}: {error or 'another rank is silent'}", flush=True)
        os._exit(1)
    errors = [f"rank {r}: {said['error']}" for r, said in enumerate(all_said) if said["error"]]
    if errors:
        forget_groups(world, "\n".join(errors))
    gc.collect()  # models are full of cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - started
    return Outcome(
        part, case.name, not errors, seconds, "\n".join(errors), [s["values"] for s in all_said]
    )


def forget_groups(world: World, error: str) -> None:
    """After a failure: an error of the device that stays ends the process."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        print(f"rank {world.rank}: the GPU is lost after {error}", flush=True)
        os._exit(1)
    with contextlib.suppress(Exception):
        world.leave()
    world.alone = None


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    main(name, Options.of_worker(arguments))
