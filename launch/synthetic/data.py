"""Synthetic tasks as training and validation data: sample i is computed when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mixtron.launch.synthetic.task import Task
from mixtron.megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from mixtron.launch.config_sections import SyntheticDataConfig

BLOCK = 64
"""Samples that are generated together."""


@dataclass(frozen=True)
class SyntheticSample:
    """One sequence of L tokens, whose labels need not be its next tokens."""

    inputs: np.ndarray
    """int64 [L]."""
    labels: np.ndarray
    """int64 [L]."""
    label_mask: np.ndarray
    """bool [L]: where something is to be answered."""
    document_starts: np.ndarray
    """int64 [1]: 0."""


class Reader:
    """The samples of one split of a task by number."""

    def __init__(self, task: Task, seed: int, split: str, length: int) -> None:
        self.task, self.seed, self.split, self.length = task, seed, split, length
        self._block = lru_cache(maxsize=4)(self._make_block)

    def __getitem__(self, index: int) -> SyntheticSample:
        block, row = divmod(index, BLOCK)
        made = self._block(block)
        return SyntheticSample(
            made.inputs_NT[row],
            made.labels_NT[row],
            made.mask_NT[row],
            np.zeros(1, dtype=np.int64),
        )

    def _make_block(self, block: int):
        indices = np.arange(block * BLOCK, (block + 1) * BLOCK)
        return self.task.examples(self.seed, self.split, indices, self.length)


class SyntheticTraining:
    """Samples that never repeat. Its state is how many were trained."""

    def __init__(self, config: SyntheticDataConfig) -> None:
        config.synthetic.check(config.sequence_length, "data.synthetic")
        self.task, self.seed = config.synthetic, config.seed
        self.sequence_length = config.sequence_length
        self.consumed = 0
        self._reader = Reader(self.task, self.seed, "train", self.sequence_length)

    def next(self, count: int) -> list[tuple[int, int]]:
        """The next `count` samples, the same on every rank; they count as trained."""
        plan = self.upcoming(count)
        self.consumed += count
        return plan

    def upcoming(self, count: int) -> list[tuple[int, int]]:
        """What `next` would give; they do not count."""
        return [(0, index) for index in range(self.consumed, self.consumed + count)]

    def read(self, reference: tuple[int, int]) -> SyntheticSample:
        return self._reader[reference[1]]

    def state_dict(self) -> dict:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict) -> None:
        """Continues; a task that was changed begins at its first sample."""
        self.consumed = state.get("consumed", 0)

    def realised_shares(self) -> dict[str, float]:
        """None: there is one source."""
        return {}

    def record(self) -> dict:
        """What the samples depend on, of JSON types."""
        return {
            "synthetic": self.task.model_dump(mode="json"),
            "sequence_length": self.sequence_length,
            "seed": self.seed,
        }


class SyntheticValidation:
    """The first samples of a split of its own."""

    def __init__(self, task: Task, seed: int, split: str, length: int, sequences: int) -> None:
        self._reader = Reader(task, seed, split, length)
        self._sequences = sequences

    @classmethod
    def open_all(cls, config: SyntheticDataConfig) -> dict[str, SyntheticValidation]:
        """Opens every set of `data.validation`."""
        length, opened = config.sequence_length, {}
        for name, source in config.validation.items():
            source.synthetic.check(length, f"data.validation.{name}.synthetic")
            split = f"validation.{name}"
            opened[name] = cls(source.synthetic, config.seed, split, length, source.sequences)
        return opened

    def __len__(self) -> int:
        return self._sequences

    def read(self, index: int) -> SyntheticSample:
        if not 0 <= index < self._sequences:
            raise IndexError(f"validation sample {index} of {self._sequences}")
        return self._reader[index]


def open_synthetic(
    config: SyntheticDataConfig, vocab_size: int
) -> tuple[SyntheticTraining, dict[str, SyntheticValidation]]:
    """Opens what the config names and holds it against the model's vocabulary.

    Raises:
        ConfigError: ids that the model has no embedding for, or a length that a task cannot have.
    """
    named = {"data.synthetic": config.synthetic}
    named |= {f"data.validation.{n}.synthetic": s.synthetic for n, s in config.validation.items()}
    for key, task in named.items():
        if task.vocabulary() > vocab_size:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is less than the {task.vocabulary()} ids of {key} "
                f"({task.task}); set it to {task.vocabulary()}"
            )
    return SyntheticTraining(config), SyntheticValidation.open_all(config)


def compare_synthetic(saved: dict, current: dict) -> list[str]:
    """What differs between two `record()`s of which at least one is synthetic, a line each."""
    keys = ("synthetic", "sequence_length", "seed")
    if "synthetic" not in saved or "synthetic" not in current:
        was, now = ("a synthetic task" if "synthetic" in r else "corpora" for r in (saved, current))
        return [f"data were {was}, are {now}"]
    return [f"data.{k} was {saved[k]}, is {current[k]}" for k in keys if saved[k] != current[k]]
