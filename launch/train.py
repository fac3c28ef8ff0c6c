"""Entry point of one rank: config, process groups, model, data, resume, loop.

Started by `mixtron train` (which starts torchrun itself for several ranks), by torchrun or by srun.
"""

import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

from mixtron.launch import exit_codes, heartbeat
from mixtron.launch.checks import check
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.data import AnyTraining, AnyValidation, open_data
from mixtron.launch.lifetime import die_with_torchrun
from mixtron.launch.signals import StopFlag
from mixtron.launch.slurm.bad_nodes import report_hardware_fault


def main(argv: list[str] | None = None) -> int:
    """`python -m mixtron.launch.train CONFIG [key.path=value ...] [--debug]`; returns the code."""
    stop = begin_rank()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    path, *overrides = [a for a in arguments if a != "--debug"]
    first = int(os.environ.get("RANK", 0)) == 0
    run_dir = None
    try:
        config = load_config(path, overrides)
        run_dir = Path(config.run_dir)
        heartbeat.set_limits(config.watchdog.limits_s())
        stop.limit_duration(config.training.max_duration_s)
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
        _, data, validation = open_data(config)
        code = run_rank(config, data, validation, stop)
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        report_hardware_fault(error)
        # What all ranks meet alike is said once; a fault that may be this rank's alone, by it.
        if first or code not in (exit_codes.BAD_INPUT, exit_codes.PREEMPTED):
            rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and not first else ""
            print(f"mixtron: {rank}{_one_line(error)}", file=sys.stderr, flush=True)
            if debug or code == exit_codes.FAILED:
                traceback.print_exc()
        # Whichever rank failed: torchrun ends the others before they could say anything.
        if run_dir is not None and code != exit_codes.RETRYABLE:
            run_dir.mkdir(parents=True, exist_ok=True)
            exit_codes.write_exit_file(run_dir, code)
        return code
    return code


def begin_rank() -> StopFlag:
    """Hears signals, writes to the rank's own log, gives signs of life: before all slow imports."""
    stop = StopFlag()
    rank = int(os.environ.get("RANK", 0))
    if heartbeat.LOGS_VARIABLE in os.environ:
        log = heartbeat.rank_log(Path(os.environ[heartbeat.LOGS_VARIABLE]), rank)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, sys.stdout.fileno())
        os.dup2(file, sys.stderr.fileno())
    heartbeat.begin(rank)
    if heartbeat.stop_requested():
        stop.signal = signal.SIGUSR1
    return stop


def run_rank(
    config: RunConfig,
    data: AnyTraining,
    validation: dict[str, AnyValidation],
    stop: StopFlag,
) -> int:
    """Trains on this rank of an already described world; returns the exit code."""
    die_with_torchrun()
    quiet_libraries()
    import torch
    import torch.distributed as dist

    from mixtron.megatron_ext import cpu_backend

    cpu_backend.install()  # first: without a GPU it leaves Megatron's compiler out
    from mixtron.launch.loop import train
    from mixtron.launch.setup_run import prepare
    from mixtron.megatron_ext.layer_graphs import release_recordings

    # Results must not depend on how the job was started: torchrun sets this, srun does not.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if config.training.deterministic:
        choose_deterministic_kernels()
    run = prepare(config, data, validation, stop)
    code = train(run, stop)
    heartbeat.beat("done", run.progress.step)
    dist.barrier()
    if run.ranks.is_first:
        exit_codes.write_exit_file(Path(config.run_dir), code)
        run.say("finished" if code == exit_codes.FINISHED else f"exit code {code}")
    dist.barrier()
    release_recordings()
    dist.destroy_process_group()
    return code


def choose_deterministic_kernels() -> None:
    """Of those that torch and cuBLAS offer; before the GPU is first used.

    Warns, unlike its strict form, of a running sum, which refuses although it varies in one
    dimension alone, where no model has one. Our own kernels add in a fixed order always.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    known = hasattr(error, "exit_code")
    return (
        text
        if known and text
        else f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    )


def quiet_libraries() -> None:
    """Keeps other projects' notes to their developers out of the run's output."""
    warnings.filterwarnings("ignore")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    code = main()
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    # torchrun would report a saved, preempted run as a crash; exit.json carries its code.
    sys.exit(0 if under_torchrun and code == exit_codes.PREEMPTED else code)
