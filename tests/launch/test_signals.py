"""A signal to one rank at an awkward moment: before the model, in loading, evaluating, saving."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from mixtron.launch.checkpoint_files import list_checkpoints
from tests.helpers.ranks import run_on_ranks
from tests.launch.short_runs import write

ROOT = Path(__file__).parents[2]


def run_with_signal(config_path: str, moment: str) -> tuple[int, int, int, int]:
    """Exit code, last step, calls of save and rounds of evaluation, when rank 1 gets SIGUSR1."""
    import torch.distributed as dist

    from mixtron.launch import evaluate, loop, saver, setup_run
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.signals import StopFlag, Stopped

    counts = {"save": 0, "evaluate": 0}
    config = load_config(config_path, ["training.eval_every_steps=2"])
    stop = StopFlag()

    def reach(here: str) -> None:
        if here == moment and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def after_signal(plain, here: str):
        def call(*args, **kwargs):
            reach(here)
            if here in counts:
                counts[here] += 1
            return plain(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_run, "resume", after_signal(setup_run.resume, "load"))
        patch.setattr(loop, "train_step", after_signal(loop.train_step, "step"))
        patch.setattr(
            evaluate, "run_micro_batches", after_signal(evaluate.run_micro_batches, "evaluate")
        )
        patch.setattr(saver.Saver, "save", after_signal(saver.Saver.save, "save"))
        try:
            reach("open data")
            run = setup_run.prepare(config, *open_data(config)[1:], stop)
            if moment == "save":
                stop.signal = signal.SIGTERM if dist.get_rank() == 1 else None
            code = loop.train(run, stop)
        except Stopped as stopped:
            return stopped.exit_code, 0, counts["save"], counts["evaluate"]
        finally:
            stop.requested()  # takes the signal that came too late to be looked for
    return code, run.progress.step, counts["save"], counts["evaluate"]


@pytest.mark.parametrize(
    ("moment", "step", "saves", "rounds"),
    [
        ("open data", 0, 0, 0),
        ("load", 0, 0, 0),
        ("step", 1, 1, 0),
        ("evaluate", 2, 1, 1),  # of five: the rest would be waited for
        ("save", 1, 1, 0),  # the second signal
    ],
)
def test_a_signal_to_one_rank_is_heard_everywhere(corpus, tmp_path, moment, step, saves, rounds):
    config = write(corpus, tmp_path)
    expected = (75, step, saves, rounds)
    assert run_on_ranks(2, run_with_signal, str(config), moment) == [expected] * 2
    found = list_checkpoints(tmp_path / "run" / "checkpoints") if saves else []
    assert [(c.step, c.complete) for c in found] == [(step, True)] * saves


@triton.jit
def add_kernel(x_T, TOKENS: tl.constexpr):
    token_T = tl.arange(0, TOKENS)
    tl.store(x_T + token_T, tl.load(x_T + token_T) + 1)


def signal_after_a_compilation(number: int, cache: str) -> int | None:
    """What the flag was set by, in a process that has no other threads yet, as a rank."""
    from mixtron.launch.signals import StopFlag

    stop = StopFlag()
    signature = {"x_T": "*fp32", "TOKENS": "constexpr"}
    source = triton.compiler.ASTSource(add_kernel, signature, {"TOKENS": 32})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    os.kill(os.getpid(), number)
    stop.requested()
    return stop.signal


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_heard_though_triton_has_compiled_a_kernel(tmp_path, number):
    """Its LLVM puts handlers of its own in the place of all others."""
    program = (
        "import sys; from tests.launch.test_signals import signal_after_a_compilation as run; "
    )
    program += f"sys.exit(run({int(number)}, {str(tmp_path)!r}))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment)
    assert ended.returncode == number
