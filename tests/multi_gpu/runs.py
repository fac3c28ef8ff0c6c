"""Runs as a person starts them: stopped by a signal and resumed, on fewer GPUs or the same one."""

import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mixtron.launch.config import load_config
from mixtron.launch.exit_codes import FINISHED, PREEMPTED
from tests.helpers.jobs import Job, history, last_step, rows, write_config
from tests.multi_gpu.cases import Options, Outcome, Values, add

STEPS = 60
LIMIT_S = 180
"""For a run."""
STOP_AT = 10
"""The signal is sent when this step is logged; some more go by until it is heard."""
FOLLOWED = 20
"""Steps after the resume whose losses are compared."""
TOLERANCE = 1e-4
"""Of a loss in fp32: layouts differ by 1e-6 of it in one step, and training makes more of it."""


def run_all(options: Options) -> None:
    """Each of the cases that `options.only` names."""
    for name, check in {
        "saved at SIGUSR1 on all GPUs, resumed on half": resumed_on_half,
        "deterministic: resumed run bit-equal on one GPU": bit_equal,
    }.items():
        if re.search(options.only, name):
            add(options.results, outcome_of(name, check, options))


def outcome_of(name: str, check: Callable[[Options], Values], options: Options) -> Outcome:
    started, error, values = time.perf_counter(), "", {}
    try:
        values = check(options)
    except Exception:
        error = traceback.format_exc()
    return Outcome("runs", name, not error, time.perf_counter() - started, error, [values])


def resumed_on_half(options: Options) -> Values:
    """In fp32, tensor-parallel on all GPUs; data-parallel on half of them. The losses go on."""
    all_gpus = ["parallel={tensor: 2, sequence: true}"]
    folder = options.out / "half"
    write_configs(folder, options, "fp32")
    straight = Job(folder / "straight.yaml", folder / "straight", options.gpus, all_gpus).start()
    # Not beside the other: two jobs of NCCL on the same GPUs wait for each other's turns.
    assert straight.wait(LIMIT_S) == FINISHED, straight.log()[-5000:]
    run = Job(folder / "resumed.yaml", folder / "resumed", options.gpus, all_gpus)
    stopped_at = stop(run)
    resumed = Job(run.config, run.run_dir, options.gpus // 2).start()
    assert resumed.wait(LIMIT_S) == FINISHED, resumed.log()[-5000:]
    losses, expected = losses_of(resumed.run_dir), losses_of(straight.run_dir)
    followed = range(1, stopped_at + FOLLOWED + 1)
    errors = {step: abs(losses[step] / expected[step] - 1) for step in followed}
    wrong = {step: error for step, error in errors.items() if not error <= TOLERANCE}
    assert not wrong, f"relative errors of the loss, by step: {wrong}"
    said = [line for line in resumed.log().splitlines() if line.startswith("resumed ")]
    assert said, resumed.log()
    return {"stopped after step": stopped_at, "largest error": max(errors.values())}


def bit_equal(options: Options) -> Values:
    """In bf16 on one GPU, with Triton's kernels: stopped and resumed, the run is the same."""
    folder, overrides = options.out / "deterministic", ["training.deterministic=true"]
    write_configs(folder, options, "bf16")
    if options.device == "cuda":
        overrides += triton_kernels(folder / "straight.yaml")
    straight = Job(folder / "straight.yaml", folder / "straight", 1, overrides).start()
    run = Job(folder / "resumed.yaml", folder / "resumed", 1, overrides)
    try:
        stopped_at = stop(run)
        assert run.start().wait(LIMIT_S) == FINISHED, run.log()[-5000:]
        assert straight.wait(LIMIT_S) == FINISHED, straight.log()[-5000:]
    finally:
        straight.kill()
    expected, found = history(straight.run_dir), history(run.run_dir)
    assert len(expected) == STEPS
    first = next((a[0] for a, b in zip(expected, found, strict=True) if a != b), None)
    assert first is None, f"stopped after step {stopped_at}; step {first} differs"
    return {"stopped after step": stopped_at, "equal steps": STEPS}


def stop(job: Job) -> int:
    """Starts a run and stops it by SIGUSR1; the step after which it was saved."""
    try:
        job.start().wait_for_step(STOP_AT, LIMIT_S)
        job.process.send_signal(signal.SIGUSR1)
        code = job.wait(LIMIT_S)
    finally:
        job.kill()
    assert code == PREEMPTED, f"exit code {code} instead of {PREEMPTED}\n{job.log()[-5000:]}"
    step = last_step(job.run_dir)
    assert STOP_AT <= step < STEPS, f"stopped after step {step}"
    return step


def write_configs(folder: Path, options: Options, precision: str) -> None:
    """Of two like runs: a small model of several mixers on a synthetic task."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pattern = ["kla", "attention", "path", "sa", "log_linear", "gla"]
    if options.device == "cpu":
        pattern = pattern[:2]
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
            "path": attention("path"),
            "sa": {
                **attention("stochastic"), "paths": "sa+swa", "window": 32, "decode_capacity": 128
            },
            "log_linear": {
                "type": "log_linear", "heads": 2, "value_heads": 2, "key_dim": 64, "value_dim": 64
            },
            "gla": {"type": "gla", "heads": 2, "key_dim": 64, "value_dim": 64},
        },
        "data": {
            "sequence_length": 128,
            "synthetic": {"task": "mqar", "pairs": 8, "vocab_size": 64},
        },
        # Adam's epsilon lies above the rounding error of gradients.
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
        "training": {"steps": STEPS, "global_batch_tokens": 8 * 128, "precision": precision},
        "checkpoint": {"save_every_steps": 1000},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    for name in ("straight", "resumed"):
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
