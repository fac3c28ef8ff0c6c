"""The training loop, top to bottom."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer

from mixtron.data_prep.errors import DataError
from mixtron.launch import exit_codes, heartbeat
from mixtron.launch.agreement import any_rank
from mixtron.launch.checkpoint_identity import tokenizer_sha256
from mixtron.launch.config import RunConfig
from mixtron.launch.data import AnyTraining, AnyValidation
from mixtron.launch.estimate import peak_flops, training_flops_per_token
from mixtron.launch.evaluate import evaluate
from mixtron.launch.metrics import Metrics, step_line
from mixtron.launch.micro_batch import MicroBatch, collate, run_micro_batches
from mixtron.launch.saver import Saver
from mixtron.launch.schedule import learning_rate
from mixtron.launch.signals import StopFlag
from mixtron.launch.stragglers import compare_ranks
from mixtron.megatron_ext.host_copy import HostCopy
from mixtron.megatron_ext.optimizer import clip_and_step, set_learning_rate
from mixtron.megatron_ext.parallel import Ranks
from mixtron.megatron_ext.scalars import Scalars


class TrainingError(Exception):
    """Training that cannot go on, and would not after a restart."""

    exit_code = exit_codes.FAILED


@dataclasses.dataclass
class Progress:
    """What a resumed run continues from, beside model, optimizer, random states and data."""

    step: int = 0
    samples: int = 0
    """Sequences consumed so far, those of skipped steps among them."""
    tokens: int = 0
    """Valid tokens trained on so far."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclasses.dataclass(frozen=True)
class Prepared:
    """This rank's data of one step, on its device."""

    config: RunConfig
    data: AnyTraining
    step: int
    plan: list
    """What the data gives for the whole step."""
    micro_batches: list[MicroBatch]
    scalars: Scalars | None
    """Where layers report, if this step is logged."""

    def fits(self, run: "Run", step: int, plan: list) -> bool:
        made_for = self.config is run.config and self.data is run.data
        return made_for and (self.step, self.plan) == (step, plan)


@dataclasses.dataclass
class Run:
    """Everything one rank holds."""

    config: RunConfig
    ranks: Ranks
    wrapped: list
    optimizer: MegatronOptimizer
    data: AnyTraining
    validation: dict[str, AnyValidation]
    progress: Progress
    saver: Saver
    say: Callable[[str], None]
    """Prints on rank 0, does nothing on the others."""
    prepared: "Prepared | None" = None
    """The next step's data, read while the GPU is at work on this one's."""

    def state(self) -> dict:
        """What a checkpoint holds beside model, optimizer and random states."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "data": self.data.state_dict(),
            "data_record": self.data.record(),
            "tokenizer_sha256": tokenizer_sha256(self.data),
        }


def train(run: Run, stop: StopFlag | None = None) -> int:
    """Trains from `run.progress` to the last step; returns the exit code.

    Args:
        stop: one that has listened since before the run was built; None: it listens from here.
    """
    stop = stop or StopFlag()
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
    heartbeat.beat("first_step", progress.step + 1)
    while progress.step < steps:
        started = time.perf_counter()
        if training.skips(progress.step + 1):
            pass_over(run)
            values = None
        else:
            values = train_step(run)
        step = progress.step
        seconds = time.perf_counter() - started
        every = config.logging.ranks_every_steps
        if values is not None and every and step % every == 0:
            values |= compare_ranks(ranks.device, seconds, run.say)
        if metrics is not None and values is not None and step % config.logging.every_steps == 0:
            values |= speed(config, ranks, seconds) | run.saver.take_timings()
            metrics.log(step, values)
            run.say(step_line(step, steps, values))
        stopping, writing = any_rank(ranks.device, stop.requested(), run.saver.writing)
        if not writing:
            run.saver.finish()
        refuse_endless_skipping(run)
        every = training.eval_every_steps
        # Before the save, so that a run resumed at its last step has nothing left to do.
        if not stopping and (step == steps or (every and step % every == 0)):
            stopping = not validate(run, metrics, stop)
        # In a row of skipped steps the run may be about to fail: nothing newer is worth keeping.
        good = progress.skipped_in_a_row == 0
        due = step % config.checkpoint.save_every_steps == 0 and good
        if due or step == steps or stopping:
            heartbeat.beat("save", step)
            model = (run.wrapped, run.optimizer)
            run.saver.save(step, *model, run.state(), config, remove_others=good)
        if stopping and step < steps:
            run.saver.close()
            run.say(f"stopped on request after step {step}; resume with the same command")
            return exit_codes.PREEMPTED
        heartbeat.beat("step", step + 1)
    run.saver.close()
    if metrics is not None:
        metrics.close()
    return exit_codes.FINISHED


def pass_over(run: Run) -> None:
    """A step whose batch counts as consumed and is not trained on."""
    count = run.config.global_batch_sequences
    run.data.next(count)
    run.progress.step += 1
    run.progress.samples += count
    run.say(f"step {run.progress.step} | batch passed over (training.skip_steps)")


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
    now = run.prepared
    if now is None or not now.fits(run, step, plan):
        now = prepare(run, step, plan)
    scalars = now.scalars
    totals = run_micro_batches(run.wrapped, config, ranks, now.micro_batches, train=True)
    if scalars is not None:
        scalars.reduce(ranks.groups)
    run.prepared = None
    if step < config.training.steps:
        # It does not count yet: a checkpoint of this step knows nothing of it.
        upcoming = run.data.upcoming(config.global_batch_sequences)
        # What cannot be read is said by its own step, after what this one saves.
        with contextlib.suppress(DataError, OSError):
            run.prepared = prepare(run, step + 1, upcoming)
    clip = config.optimizer.clip_grad_norm
    read = HostCopy(totals)
    grad_norm, applied = clip_and_step(run.optimizer, clip, totals[0])
    loss_sum, tokens = read.tolist()

    progress.step = step
    progress.samples += len(plan)
    progress.tokens += int(tokens)
    progress.skipped_in_a_row = 0 if applied else progress.skipped_in_a_row + 1
    progress.skipped_steps += not applied
    return {
        "train/loss": loss_sum / max(tokens, 1),
        "train/lr": lr,
        "train/grad_norm": grad_norm,
        "train/tokens": progress.tokens,
        "train/skipped_steps": progress.skipped_steps,
        **({} if scalars is None else scalars.means(ranks.groups)),
        **run.data.realised_shares(),
    }


def prepare(run: Run, step: int, plan: list) -> Prepared:
    """Reads this rank's share of a plan."""
    config, ranks = run.config, run.ranks
    per_micro = config.training.micro_batch_sequences
    scalars = Scalars() if step % config.logging.every_steps == 0 else None
    micro_batches = []
    for first in range(ranks.data_rank * per_micro, len(plan), ranks.data_size * per_micro):
        samples = [run.data.read(entry) for entry in plan[first : first + per_micro]]
        micro_batches.append(collate(samples, step, ranks, scalars))
    return Prepared(config, run.data, step, plan, micro_batches, scalars)


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


def refuse_endless_skipping(run: Run) -> None:
    """Stops a run whose steps are all skipped, before it wastes its allocation."""
    progress, limit = run.progress, run.config.training.max_skipped_steps
    if progress.skipped_in_a_row > limit:
        run.saver.close()
        first, newest = progress.step - progress.skipped_in_a_row + 1, run.saver.newest_step
        good = "there is no checkpoint" if newest is None else f"the last good step is {newest}"
        raise TrainingError(
            f"loss or gradient was not finite in steps {first} to {progress.step}, more than "
            f"training.max_skipped_steps={limit}; {good}: resume with a lower optimizer.lr, or "
            "pass over the data of these steps with training.skip_steps"
        )


def validate(run: Run, metrics: Metrics | None, stop: StopFlag) -> bool:
    """Evaluates every validation set; False when a signal cut it short."""
    step = run.progress.step
    losses = evaluate(run.wrapped, run.config, run.ranks, run.validation, stop)
    if losses is None:
        return False
    if metrics is not None and losses:
        metrics.log(step, {f"validation/{name}": loss for name, loss in losses.items()})
    for name, loss in losses.items():
        run.say(
            f"step {step} | validation {name}: loss {loss:.4f}, perplexity {math.exp(loss):.2f}"
        )
    return True
