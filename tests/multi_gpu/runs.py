"""Runs as a person starts them: stopped by a signal and resumed, on other GPUs or the same one."""

import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from mixtron.launch.config import load_config
from mixtron.launch.exit_codes import FINISHED, PREEMPTED
from tests.helpers.jobs import Job, history, last_step, rows, write_config
from tests.multi_gpu.cases import Options, Outcome, Values, add

STEPS = {"cuda": 400, "cpu": 40}
"""On a GPU 40 of them are over before a signal is heard."""
LIMIT_S = {"cuda": 150, "cpu": 600}
"""For a run."""
STOP_AT = 8
"""The signal is sent when this step is logged; some more go by until it is heard."""
FOLLOWED = 12
"""Steps after the resume whose losses are compared."""
TOLERANCE = 1e-4
"""Of a loss in fp32: layouts differ by 1e-6 of it in one step, and training makes more of it."""
PAIR = ("parallel={tensor: 2, sequence: true}",)


def run(options: Options, checks: dict[str, Callable[[Options], Values]]) -> None:
    """Those whose names `options.only` matches, all at once."""
    chosen = {name: check for name, check in checks.items() if re.search(options.only, name)}
    with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
        futures = [pool.submit(outcome_of, *item, options) for item in chosen.items()]
        for future in as_completed(futures):
            add(options.results, future.result())


def outcome_of(name: str, check: Callable[[Options], Values], options: Options) -> Outcome:
    started, error, values = time.perf_counter(), "", {}
    try:
        values = check(options)
    except Exception:
        error = traceback.format_exc()
    return Outcome("runs", name, not error, time.perf_counter() - started, error, [values])


def resumed(options: Options) -> Values:
    """In fp32: a straight run on one GPU; one stopped on all GPUs, tensor-parallel, and resumed on
    half of them; one stopped on one and resumed on all, data-parallel. The losses are the same."""
    folder, half = options.out / "resumed", max(1, options.gpus // 2)
    limit_s = LIMIT_S[options.device]
    names = ("straight", "to fewer", "to more")
    write_configs(folder, options, "fp32", names)
    straight, fewer, more = (Job(folder / f"{name}.yaml", folder / name) for name in names)
    straight.ranks = 1
    with ThreadPoolExecutor(3) as pool:
        expected = pool.submit(finish, straight, limit_s)
        stops = [
            pool.submit(stop_and_resume, fewer, options.gpus, PAIR, half, limit_s),
            pool.submit(stop_and_resume, more, 1, (), options.gpus, limit_s),
        ]
        wait([expected, *stops])
    expected.result()
    values: Values = {}
    for job, stopped in zip((fewer, more), stops, strict=True):
        name, stopped_at = job.run_dir.name, stopped.result()
        last = min(stopped_at + FOLLOWED, STEPS[options.device])
        errors = loss_errors(job.run_dir, straight.run_dir, last)
        wrong = {step: error for step, error in errors.items() if not error <= TOLERANCE}
        assert not wrong, f"{name}: relative errors of the loss, by step: {wrong}"
        values[f"{name}: stopped after step"] = stopped_at
        values[f"{name}: largest error"] = max(errors.values())
    return values


def finish(job: Job, limit_s: float) -> None:
    code = job.start().wait(limit_s)
    assert code == FINISHED, f"exit code {code}\n{job.log()[-5000:]}"


def stop_and_resume(
    job: Job, ranks: int, overrides: tuple[str, ...], resumed_on: int, limit_s: float
) -> int:
    """The step after which it was stopped; exit code 75, and then 0."""
    job.ranks, job.overrides = ranks, list(overrides)
    stopped_at = stop(job, limit_s)
    job.ranks, job.overrides = resumed_on, []
    finish(job, limit_s)
    said = [line for line in job.log().splitlines() if line.startswith("resumed ")]
    assert said, job.log()
    return stopped_at


def loss_errors(run_dir: Path, straight: Path, last: int) -> dict[int, float]:
    losses, expected = losses_of(run_dir), losses_of(straight)
    return {step: abs(losses[step] / expected[step] - 1) for step in range(1, last + 1)}


def bit_equal(options: Options) -> Values:
    """In bf16 on one GPU, with Triton's kernels and dropout: stopped and resumed, the run is the
    same."""
    folder, overrides = options.out / "deterministic", ["training.deterministic=true"]
    limit_s = LIMIT_S[options.device]
    names = ("straight", "resumed")
    write_configs(folder, options, "bf16", names)
    if options.device == "cuda":
        overrides += triton_kernels(folder / "straight.yaml")
    overrides.append("model.dropout=0.1")
    straight, run = (Job(folder / f"{n}.yaml", folder / n, 1, overrides) for n in names)
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(finish, straight, limit_s)
        stopped_at = stop(run, limit_s)
        finish(run, limit_s)
        expected.result()
    wanted, found = history(straight.run_dir), history(run.run_dir)
    assert len(wanted) == STEPS[options.device]
    first = next((a[0] for a, b in zip(wanted, found, strict=True) if a != b), None)
    assert first is None, f"stopped after step {stopped_at}; step {first} differs"
    return {"stopped after step": stopped_at, "equal steps": len(wanted)}


def stop(job: Job, limit_s: float) -> int:
    """Starts a run and stops it by SIGUSR1; the step after which it was saved."""
    try:
        job.start().wait_for_step(STOP_AT, limit_s)
        job.process.send_signal(signal.SIGUSR1)
        code = job.wait(limit_s)
    finally:
        job.kill()
    assert code == PREEMPTED, f"exit code {code} instead of {PREEMPTED}\n{job.log()[-5000:]}"
    step = last_step(job.run_dir)
    assert step >= STOP_AT, f"stopped after step {step}"
    return step


def write_configs(folder: Path, options: Options, precision: str, names: tuple[str, ...]) -> None:
    """Of like runs: a small model of several mixers on a synthetic task."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Two layers to try the script out on CPUs; Triton's kernels where runs are in bf16.
    layers = 2 if options.device == "cpu" else 4 if precision == "fp32" else 3
    pattern = ["kla", "attention", "sa", "log_linear"][:layers]
    training = {
        "steps": STEPS[options.device],
        "global_batch_tokens": 8 * 128,
        "micro_batch_sequences": max(1, 8 // options.gpus),
        "precision": precision,
    }
    config = {
        "name": "job",
        "model": {
            "layers": len(pattern),
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "vocab_size": 64,
            "pattern": pattern,
        },
        "mixers": {
            "kla": {"type": "kla", "heads": 2, "value_heads": 2, "key_dim": 64, "value_dim": 64},
            "attention": attention("softmax_attention"),
            "sa": {
                **attention("stochastic"), "paths": "sa+swa", "window": 32, "decode_capacity": 128
            },
            "log_linear": {
                "type": "log_linear", "heads": 2, "value_heads": 2, "key_dim": 64, "value_dim": 64
            },
        },
        "data": {
            "sequence_length": 128,
            "synthetic": {"task": "mqar", "pairs": 8, "vocab_size": 64},
        },
        # Adam's epsilon lies above the rounding error of gradients.
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
        "training": training,
        "checkpoint": {"save_every_steps": 1000},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    for name in names:
        write_config(folder / f"{name}.yaml", config | {"run_dir": str(folder / name)})


def attention(kind: str) -> dict:
    return {"type": kind, "heads": 2, "kv_heads": 2, "head_dim": 64}


def triton_kernels(config: Path) -> list[str]:
    """Overrides that choose them for the mixers that have them."""
    return [
        f"mixers.{name}.kernel=triton"
        for name, mixer in load_config(config).mixers.items()
        if "kernel" in type(mixer).model_fields
    ]


def losses_of(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in rows(run_dir)}


RESUMED = {"stopped by SIGUSR1, resumed on other numbers of GPUs": resumed}
DETERMINISTIC = {"deterministic: resumed run bit-equal on one GPU": bit_equal}
