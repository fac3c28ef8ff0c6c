"""The pool that the multi-rank tests stand on: results, tracebacks, hangs, dead processes."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import CALLS_A_PROCESS, RankFailure, renew_ranks, run_on_ranks


def describe(value):
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), float(total), value


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def wait_for_ever():
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def die_on_rank_0():
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(("world_size", "total"), [(1, 1.0), (2, 3.0), (4, 10.0)])
def test_every_world_size_gives_results_by_rank(world_size, total):
    results = run_on_ranks(world_size, describe, "x")
    assert [r[1:] for r in results] == [(rank, total, "x") for rank in range(world_size)]


def test_processes_are_reused_for_a_while():
    ids = [run_on_ranks(1, describe, 0)[0][0] for _ in range(CALLS_A_PROCESS + 1)]
    assert len(set(ids)) == 2


def compiler() -> tuple[bool, str]:
    """Whether it was imported, and where `torch.compile` is from."""
    return "torch._inductor.compile_fx" in sys.modules, torch.compile.__module__


def test_a_rank_has_no_compiler_until_it_asks_for_one():
    renew_ranks()
    assert run_on_ranks(1, compiler) == [(False, "torch")]


@pytest.mark.parametrize(
    ("function", "timeout_s", "said"),
    [
        (raise_on_rank_1, 60, "ValueError: only here"),
        (wait_for_ever, 2, "in wait_for_ever"),
        (die_on_rank_0, 60, "rank 0: died"),
    ],
)
def test_a_failed_rank_is_named_hangs_nobody_and_leaves_a_clean_pool(function, timeout_s, said):
    started = time.monotonic()
    with pytest.raises(RankFailure, match=said):
        run_on_ranks(2, function, timeout_s=timeout_s)
    assert time.monotonic() - started < 10
    assert [r[2] for r in run_on_ranks(2, describe, 0)] == [3.0, 3.0]
