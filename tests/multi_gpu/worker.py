"""One rank: runs the cases of all parts one after the other in one process.

    RANK=... WORLD_SIZE=... python -m tests.multi_gpu.worker OPTIONS

A case that raises on all ranks is noted, and the next one runs. When it raises on some only, the
others may wait for it for ever: all end, and are started again for the cases that are left.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import math
import os
import pickle
import re
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mixtron.launch.train import quiet_libraries
from mixtron.megatron_ext.layer_graphs import release_recordings
from mixtron.megatron_ext.parallel import init_distributed
from tests.multi_gpu import tables
from tests.multi_gpu.cases import (
    CASE_LIMIT_S,
    Case,
    Differs,
    Options,
    Outcome,
    add,
    read,
    wait_until,
)

GRACE_S = 20
"""How long the other ranks of a failed case may take to fail as well."""
MUST_END = {
    "alone": "references",
    "parity": "references",
    "context": "runs",
    "scaling": "runs",
    "deepspeed": "references",
}
"""Before a part that measures, or needs it."""
END_LIMIT_S = {"cuda": 60, "cpu": 900}


class World:
    """The process group that a case runs in: all ranks, or one of each rank's own."""

    def __init__(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(
            host, port, self.size, is_master=self.rank == 0, timeout=timedelta(seconds=120)
        )
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
            release_recordings()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        self.alone = None

    def agreed(self, name: str, first_says: bool) -> bool:
        """What rank 0 says."""
        if self.rank == 0:
            self.store.set(name, json.dumps(first_says))
        return json.loads(self.store.get(name))

    def exchange(self, name: str, mine: dict, limit_s: float) -> list[dict]:
        """What each rank says of a case. Raises dist.DistStoreError when one stays silent."""
        self.store.set(f"{name}/{self.rank}", json.dumps(mine))
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.store.wait(keys, timedelta(seconds=limit_s))
        return [json.loads(self.store.get(key)) for key in keys]


def main(options: Options) -> None:
    quiet_libraries()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    done = {(outcome.part, outcome.case) for outcome in read(options.results)}
    world = World()
    # What imports made stays: it need not be searched for garbage after each case.
    gc.freeze()
    for part in options.parts:
        if part in MUST_END:
            others = options.busy(MUST_END[part])
            if not wait_until(lambda o=others: not o.exists(), END_LIMIT_S[options.device]):
                print(f"{part} begins beside {others.name}", flush=True)
        until_s = min(options.until_s, time.time() + options.part_limits_s.get(part, math.inf))
        for case in importlib.import_module(f"tests.multi_gpu.{part}").cases(options):
            if (part, case.name) in done or not re.search(options.only, case.name):
                continue
            if world.agreed(f"{part}/{case.name}/late", time.time() > until_s):
                outcome = Outcome(part, case.name, False, error="not run: out of time")
            else:
                outcome = run(part, case, world, options)
            if world.rank == 0:
                add(options.results, outcome)
                status = "passed" if outcome.passed else f"FAILED\n{outcome.error}"
                print(f"{part}: {case.name}: {outcome.seconds:.1f} s {status}", flush=True)
                (options.out / "report.txt").write_text(tables.report(read(options.results)))
    world.leave()


def run(part: str, case: Case, world: World, options: Options) -> Outcome:
    """Ends the process when the ranks no longer agree."""
    if world.rank == 0:
        options.under_way.write_text(json.dumps([part, case.name]))
    started = time.perf_counter()
    error, values, sound = "", {}, True
    # A rank that hangs says where, and ends all.
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        world.enter(case.alone)
        values = case.run()
        error = values.pop("error", "")
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as caught:
        error, sound = traceback.format_exc(), isinstance(caught, Differs)
    faulthandler.cancel_dump_traceback_later()
    limit_s = GRACE_S if error else CASE_LIMIT_S
    try:
        mine = {"error": error, "values": values, "sound": sound}
        all_said = world.exchange(f"{part}/{case.name}", mine, limit_s)
    except dist.DistError:
        print(f"rank {world.rank}: {case.name}: {error or 'another rank is silent'}", flush=True)
        os._exit(1)
    errors = [f"rank {r}: {said['error']}" for r, said in enumerate(all_said) if said["error"]]
    if not all(said["sound"] for said in all_said):
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
    main(pickle.loads(bytes.fromhex(sys.argv[1])))
