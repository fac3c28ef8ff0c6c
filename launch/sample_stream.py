"""Token streams cut into samples.

The documents of a shard, or of a split of it, one after another in file order, are a token stream;
sample i is its tokens [i L, i L + L + 1). A tail that fills no sample is left out.
"""

from dataclasses import dataclass

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import Shard
from mixtron.launch.sample_order import document_runs


@dataclass(frozen=True)
class Sample:
    """One training sequence of L tokens and their labels."""

    tokens: np.ndarray
    """int64 [L + 1]: tokens [:-1] are the input, [1:] the labels."""
    document_starts: np.ndarray
    """int64, ascending, positions in [0, L) at which a document begins, and 0 in any case."""
    label_mask: np.ndarray
    """bool [L]: False where the label is another document's first token."""

    @property
    def inputs(self) -> np.ndarray:
        return self.tokens[:-1]

    @property
    def labels(self) -> np.ndarray:
        return self.tokens[1:]


@dataclass(frozen=True)
class Split:
    """A part of a shard's documents: those whose hash lies in [start, stop)."""

    name: str
    start: float
    stop: float


def splits_of(fractions: dict[str, float]) -> dict[str, Split]:
    """Neighbouring ranges of [0, 1) in the order given: a split added last moves no document."""
    splits, start = {}, 0.0
    for name, fraction in fractions.items():
        splits[name] = Split(name, start, start + fraction)
        start += fraction
    return splits


class SampleStream:
    """The samples of one shard, or of one split of it.

    Raises:
        DataError: fewer tokens than one sample needs.
    """

    def __init__(self, shard: Shard, split: Split | None, sequence_length: int) -> None:
        self.shard, self.split, self.sequence_length = shard, split, sequence_length
        runs = np.array([[0, shard.documents]])
        if split is not None:
            runs = document_runs(shard.documents, split.start, split.stop)
        self.documents = int((runs[:, 1] - runs[:, 0]).sum())
        self._starts_R = shard.offsets_of(runs[:, 0])
        lengths_R = shard.offsets_of(runs[:, 1]) - self._starts_R
        self._ends_R = np.cumsum(lengths_R)
        self.tokens = int(lengths_R.sum())
        if self.tokens < sequence_length + 1:
            part = f"split {split.name!r} holds" if split else "the shard holds"
            raise DataError(
                f"{shard.prefix}: {part} {self.documents} documents with {self.tokens} tokens, "
                f"but one sample needs {sequence_length + 1}; use a larger split or corpus, or a "
                "shorter data.sequence_length"
            )

    def __len__(self) -> int:
        return (self.tokens - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.shard.prefix}: sample {index} of {len(self)}")
        start = index * self.sequence_length
        stop = start + self.sequence_length + 1
        tokens, starts = [], []
        run = int(np.searchsorted(self._ends_R, start, side="right"))
        position = start
        while position < stop:
            run_end = int(self._ends_R[run])
            # From a position in this stream to the one in the shard.
            shift = int(self._starts_R[run]) - (int(self._ends_R[run - 1]) if run else 0)
            piece_stop = min(run_end, stop)
            tokens.append(self.shard.tokens(position + shift, piece_stop + shift))
            begins = self.shard.document_starts(position + shift, piece_stop + shift)
            starts.append(begins - shift - start)
            position, run = piece_stop, run + 1
        return _make_sample(np.concatenate(tokens), np.concatenate(starts))


def _make_sample(tokens: np.ndarray, starts: np.ndarray) -> Sample:
    """`starts`: positions in [0, L] at which a document begins."""
    length = len(tokens) - 1
    label_mask = np.ones(length, dtype=bool)
    label_mask[starts[starts > 0] - 1] = False
    return Sample(tokens, np.union1d([0], starts[starts < length]).astype(np.int64), label_mask)


def open_stream(
    path: str, split: str | None, splits: dict[str, Split], sequence_length: int
) -> SampleStream:
    """Opens one shard, or the split of it with this name."""
    if split is not None and split not in splits:
        raise DataError(f"{path}: no split {split!r} in data.split ({', '.join(splits) or 'none'})")
    return SampleStream(Shard(path), splits[split] if split else None, sequence_length)
