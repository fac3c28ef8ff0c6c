"""Runs as a person starts them: stopped by a signal and resumed, on fewer GPUs or the same one."""

import re
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
            add(options.out / "runs.jsonl", outcome_of(name, check, options))


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
    straight = job(folder / "straight", options.gpus, "fp32", all_gpus).start()
    stopped_at, run = stopped(job(folder / "resumed", options.gpus, "fp32", all_gpus))
    resumed = job(run.run_dir, options.gpus // 2, "fp32", []).start()
    assert resumed.wait() == FINISHED, resumed.log()[-5000:]
    assert straight.wait() == FINISHED, straight.log()[-5000:]
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
    if options.device == "cuda":
        overrides += triton_kernels(job(folder / "straight", 1, "bf16", []).config)
    straight = job(folder / "straight", 1, "bf16", overrides).start()
    stopped_at, run = stopped(job(folder / "resumed", 1, "bf16", overrides))
    resumed = run.start()
    assert resumed.wait() == FINISHED, resumed.log()[-5000:]
    assert straight.wait() == FINISHED, straight.log()[-5000:]
    expected, found = history(straight.run_dir), history(resumed.run_dir)
    assert len(expected) == STEPS
    first = next((a[0] for a, b in zip(expected, found, strict=True) if a != b), None)
    assert first is None, f"stopped after step {stopped_at}; step {first} differs"
    return {"stopped after step": stopped_at, "equal steps": STEPS}


def stopped(job: Job) -> tuple[int, Job]:
    """The step after which a run saved and ended at SIGUSR1."""
    job.start().wait_for_step(STOP_AT)
    job.process.send_signal(signal.SIGUSR1)
    code = job.wait()
    assert code == PREEMPTED, f"exit code {code} instead of {PREEMPTED}\n{job.log()[-5000:]}"
    step = last_step(job.run_dir)
    assert STOP_AT <= step < STEPS, f"stopped after step {step}"
    return step, job


def job(run_dir: Path, ranks: int, precision: str, overrides: list[str]) -> Job:
    """A small model of several mixers on a synthetic task."""
    config = {
        "name": "job",
        "run_dir": str(run_dir),
        "model": {
            "layers": 6,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "vocab_size": 64,
            "pattern": ["kla", "attention", "path", "sa", "log_linear", "gla"],
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
        "training": {"steps": STEPS, "global_batch_tokens": 16 * 128, "precision": precision},
        "checkpoint": {"save_every_steps": 1000},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    run_dir.mkdir(parents=True, exist_ok=True)
    return Job(write_config(run_dir / "job.yaml", config), run_dir, ranks, overrides)


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
