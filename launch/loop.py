"""The training loop, top to bottom."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from mixtron.launch import exit_codes
from mixtron.launch.checkpoint import remove_old, save_checkpoint
from mixtron.launch.config import RunConfig
from mixtron.launch.data import TrainingData, ValidationData
from mixtron.launch.estimate import peak_flops, training_flops_per_token
from mixtron.launch.evaluate import evaluate
from mixtron.launch.metrics import Metrics, step_line
from mixtron.launch.micro_batch import collate, run_micro_batches
from mixtron.launch.schedule import learning_rate
from mixtron.launch.signals import StopFlag
from mixtron.megatron_ext.optimizer import clip_and_step, set_learning_rate
from mixtron.megatron_ext.parallel import Ranks


class TrainingError(Exception):
    """Training that cannot go on, and would not after a restart."""

    exit_code = exit_codes.FAILED


@dataclasses.dataclass
class Progress:
    """What a resumed run continues from, beside model, optimizer, random states and data."""

    step: int = 0
    tokens: int = 0
    """Valid tokens trained on so far."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclasses.dataclass
class Run:
    """Everything one rank holds."""

    config: RunConfig
    ranks: Ranks
    wrapped: list
    optimizer: MegatronOptimizer
    data: TrainingData
    validation: dict[str, ValidationData]
    progress: Progress
    stop: StopFlag
    say: Callable[[str], None]
    """Prints on rank 0, does nothing on the others."""

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.run_dir) / "checkpoints"


def train(run: Run) -> int:
    """Trains from `run.progress` to the last step; returns the exit code."""
    config, ranks, progress = run.config, run.ranks, run.progress
    steps, training = config.training.steps, config.training
    metrics = None
    if ranks.is_first:
        metrics = Metrics(
            Path(config.run_dir),
            first_step=progress.step + 1,
            total_steps=steps,
            tensorboard=config.logging.tensorboard,
        )
    saved_step = progress.step
    while progress.step < steps:
        started = time.perf_counter()
        values = train_step(run)
        step = progress.step
        seconds = time.perf_counter() - started
        if metrics is not None and step % config.logging.every_steps == 0:
            values |= speed(config, ranks, seconds)
            metrics.log(step, values)
            run.say(step_line(step, steps, values))
        refuse_endless_skipping(run, saved_step)
        stopping = run.stop.agreed(ranks.device)
        every = training.eval_every_steps
        # Before the save, so that a run resumed at its last step has nothing left to do.
        if not stopping and (step == steps or (every and step % every == 0)):
            stopping = not validate(run, metrics)
        # In a row of skipped steps the run may be about to fail: nothing newer is worth keeping.
        due = step % config.checkpoint.save_every_steps == 0 and progress.skipped_in_a_row == 0
        if due or step == steps or stopping:
            save(run)
            saved_step = step
        if stopping and step < steps:
            run.say(f"stopped by signal after step {step}; resume with the same command")
            return exit_codes.PREEMPTED
    if metrics is not None:
        metrics.close()
    return exit_codes.FINISHED


def train_step(run: Run) -> dict[str, float]:
    """One optimizer step over the global batch; returns what is logged of it."""
    config, ranks, progress = run.config, run.ranks, run.progress
    step = progress.step + 1
    lr = learning_rate(step, config.training.steps, config.optimizer.lr, config.schedule)
    set_learning_rate(run.optimizer, lr, config.optimizer.weight_decay)
    for chunk in run.wrapped:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()

    plan = run.data.next(config.global_batch_sequences)
    per_micro = config.training.micro_batch_sequences
    micro_batches = []
    for first in range(ranks.data_rank * per_micro, len(plan), ranks.data_size * per_micro):
        samples = [run.data.read(entry) for entry in plan[first : first + per_micro]]
        micro_batches.append(collate(samples, step, ranks))
    loss_sum, tokens = run_micro_batches(run.wrapped, config, ranks, micro_batches, train=True)
    loss = loss_sum / max(tokens, 1)
    grad_norm, applied = math.nan, False
    if math.isfinite(loss):
        grad_norm, applied = clip_and_step(run.optimizer, config.optimizer.clip_grad_norm)

    progress.step = step
    progress.tokens += tokens
    progress.skipped_in_a_row = 0 if applied else progress.skipped_in_a_row + 1
    progress.skipped_steps += not applied
    return {
        "train/loss": loss,
        "train/lr": lr,
        "train/grad_norm": grad_norm,
        "train/tokens": progress.tokens,
        "train/skipped_steps": progress.skipped_steps,
        **run.data.realised_shares(),
    }


def speed(config: RunConfig, ranks: Ranks, seconds: float) -> dict[str, float]:
    """Throughput of the last step and this rank's peak memory."""
    tokens = config.global_batch_sequences * config.data.sequence_length
    flops = training_flops_per_token(config) * tokens / seconds / ranks.world_size
    values = {
        "speed/step_s": seconds,
        "speed/tokens_per_s": tokens / seconds,
        "speed/tflops_per_gpu": flops / 1e12,
    }
    if ranks.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name())
        if peak is not None and config.training.precision == "bf16":
            values["speed/mfu"] = flops / peak
        values["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    else:
        import resource

        values["memory/peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return values


def refuse_endless_skipping(run: Run, saved_step: int) -> None:
    """Stops a run whose steps are all skipped, before it wastes its allocation."""
    progress, limit = run.progress, run.config.training.max_skipped_steps
    if progress.skipped_in_a_row > limit:
        first = progress.step - progress.skipped_in_a_row + 1
        raise TrainingError(
            f"loss or gradient was not finite in steps {first} to {progress.step}, more than "
            f"training.max_skipped_steps={limit}; the newest checkpoint is of step {saved_step}: "
            "resume from it with a lower optimizer.lr or look at the data of these steps"
        )


def validate(run: Run, metrics: Metrics | None) -> bool:
    """Evaluates every validation set; False when a signal cut it short."""
    step = run.progress.step
    losses = evaluate(run.wrapped, run.config, run.ranks, run.validation, step, run.stop)
    if losses is None:
        return False
    if metrics is not None and losses:
        metrics.log(step, {f"validation/{name}": loss for name, loss in losses.items()})
    for name, loss in losses.items():
        run.say(
            f"step {step} | validation {name}: loss {loss:.4f}, perplexity {math.exp(loss):.2f}"
        )
    return True


def save(run: Run) -> None:
    """Writes a checkpoint and removes those beyond `checkpoint.keep`."""
    state = {
        "progress": dataclasses.asdict(run.progress),
        "data": run.data.state_dict(),
        "data_record": run.data.record(),
    }
    report = save_checkpoint(
        run.checkpoints,
        run.progress.step,
        run.wrapped,
        run.optimizer,
        run.ranks,
        state=state,
        config=run.config.model_dump(mode="json"),
    )
    run.say(
        f"step {run.progress.step} | saved {report.path} "
        f"({report.bytes / 2**20:,.1f} MiB, {report.seconds:.1f} s)"
    )
    remove_old(run.checkpoints, run.config.checkpoint.keep, run.ranks)
