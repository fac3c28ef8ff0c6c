"""Runs as `mixtron train` makes them, in ranks that are already running: no torchrun, no import."""

import contextlib
import hashlib
import io
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mixtron.data_prep.build import build
from mixtron.launch import loop
from mixtron.launch.config import load_config
from mixtron.launch.data import open_data
from mixtron.launch.setup_run import prepare
from mixtron.launch.signals import StopFlag
from tests.data_prep.corpora import speeches
from tests.helpers.jobs import small_config, write_config
from tests.helpers.ranks import run_on_ranks

BATCH = 4
"""Sequences a step, each a micro-batch of its own on one data rank."""
ONE_RANK = ["parallel.tensor=1", "parallel.sequence=false"]


@dataclass
class Outcome:
    """How a run went, as one rank saw it."""

    code: int
    said: str
    error: str = ""
    weights: str = ""
    samples: list = field(default_factory=list)
    """What each step trained on, in order."""
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def make_epochs(corpus: Path, folder: Path) -> tuple[list[str], int]:
    """A small corpus of which a whole number of steps makes an epoch: overrides, samples in it."""
    text = Path(speeches()[0]).read_text()[:2500]
    source = folder / "small.txt"
    source.write_text(text)
    build([source], corpus / "tok.model", folder / "small", progress=False)
    return epochs_of(folder / "small")


def epochs_of(prefix: Path) -> tuple[list[str], int]:
    from mixtron.data_prep.shards import Shard

    shard = Shard(str(prefix))
    tokens = int(shard.offsets_of(np.array([shard.documents]))[0])
    for length in range(24, 96, 2):
        samples = (tokens - 1) // length
        if samples % BATCH == 0 and 8 <= samples <= 24:
            return [
                f"data.train=[{{path: {prefix}}}]",
                f"data.sequence_length={length}",
                f"training.global_batch_tokens={BATCH * length}",
            ], samples
    raise AssertionError(f"{tokens} tokens give no whole number of steps")


def write(corpus: Path, folder: Path) -> Path:
    """A config whose run folder is `folder`/run."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_config(folder / "config.yaml", small_config(corpus, folder / "run"))


def run_ranks(world: int, config: Path, overrides: list[str], stop_at: int | None = None):
    """The outcomes by rank, alike but for what is said and for the weights each holds."""
    outcomes = run_on_ranks(world, trained, str(config), overrides, stop_at)
    assert len({(o.code, o.error) for o in outcomes}) == 1, outcomes
    return outcomes


def trained(config_path: str, overrides: list[str], stop_at: int | None) -> Outcome:
    """Trains; a signal arrives on the last rank during step `stop_at` (0: saves at once)."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            config = load_config(config_path, overrides)
            run = prepare(config, *open_data(config)[1:])
            if stop_at == 0:
                run.saver.save(0, run.wrapped, run.optimizer, run.state(), config)
                run.saver.finish()
                return Outcome(75, said.getvalue())
            with watched(run, stop_at) as (outcome, stop):
                outcome.code = loop.train(run, stop)
        except Exception as error:
            if not hasattr(error, "exit_code"):
                raise
            return Outcome(error.exit_code, said.getvalue(), str(error))  # type: ignore
    outcome.said = said.getvalue()
    digest = hashlib.sha256()
    for chunk in run.wrapped:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
    outcome.weights = digest.hexdigest()
    return outcome


@contextlib.contextmanager
def watched(run, stop_at: int | None) -> Iterator[tuple[Outcome, StopFlag]]:
    """Records what each step does, and sends the signal to the flag."""
    outcome, stop = Outcome(-1, ""), StopFlag()
    plain_step, plain_next = loop.train_step, run.data.next

    def step(run):
        values = plain_step(run)
        outcome.rates.append(values["train/lr"])
        outcome.losses.append(values["train/loss"])
        if run.progress.step == stop_at and run.ranks.world_rank == run.ranks.world_size - 1:
            stop.signal = signal.SIGTERM
        return values

    def next_samples(count):
        samples = plain_next(count)
        outcome.samples.append(samples)
        return samples

    loop.train_step, run.data.next = step, next_samples
    try:
        yield outcome, stop
    finally:
        loop.train_step = plain_step
