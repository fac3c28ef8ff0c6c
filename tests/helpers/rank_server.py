"""The process that rank processes are forked from. Started by `ranks.py`; never imported by a test.

Importing torch and Megatron-core costs seconds, a fork of a process that has done it milliseconds.
A fork copies only the calling thread, so the server must have no other.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client

import torch
import torch._dynamo  # checkpointing imports it
import torch.distributed as dist

from mixtron.megatron_ext import cpu_backend

cpu_backend.install()  # first, as a run does

from megatron.core import parallel_state  # noqa: E402

# Imported before the fork, for all ranks.
import mixtron.launch.loop  # noqa: E402
import mixtron.launch.setup_run  # noqa: E402
import mixtron.megatron_ext.model  # noqa: E402
import mixtron.megatron_ext.optimizer  # noqa: E402, F401
from mixtron.megatron_ext.mixers import mixer_configs, mixer_module  # noqa: E402


def serve(address: str) -> None:
    """Forks the ranks that it is told to, until the test session closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps killed ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session
    for mixer in mixer_configs():
        mixer_module(mixer)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads; a fork would copy only one"
    torch.set_num_threads(1)
    control = Client(address)
    with contextlib.suppress(EOFError):
        while True:
            rank = control.recv()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                _serve_rank(address, rank)
                os._exit(0)


def _serve_rank(address: str, rank: int) -> None:
    """Runs one call after the other, each in a world of its own."""
    connection = Client(address)
    connection.send((rank, os.getpid()))
    with contextlib.suppress(EOFError):
        while True:
            connection.send_bytes(_run(rank, *connection.recv()))


def _run(
    rank: int, world_size: int, store: str, stack: str, timeout_s: float, call: bytes
) -> bytes:
    """The pickled outcome: (True, result) or (False, traceback)."""
    with open(stack, "w") as stack_file:
        # Says where the rank hangs and ends it, also when the test session is gone by then.
        faulthandler.dump_traceback_later(timeout_s, file=stack_file, exit=True)
        try:
            function, args = pickle.loads(call)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
            with _groups_shared():
                result = function(*args)
            dist.barrier()  # no rank leaves while another still talks to it
            return pickle.dumps((True, result))
        except BaseException:
            return pickle.dumps((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextlib.contextmanager
def _groups_shared() -> Iterator[None]:
    """Megatron's groups of the same ranks are one, until the world is another: each of some sixty
    has a thread and a connection to every other rank."""
    create, found = parallel_state.create_group, {}

    def create_once(ranks, **options):
        if options.get("backend") == "gloo":  # one that Megatron itself destroys
            return create(ranks, **options)
        key = dist.group.WORLD, *ranks
        if key not in found:
            found[key] = create(ranks, **options)
        return found[key]

    parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


if __name__ == "__main__":
    serve(sys.argv[1])
