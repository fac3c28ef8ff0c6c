"""What training reads: samples cut from shards, in an order that is a function of counters alone.

Epoch e of a source visits all its samples in the order `permuted(seed, e)`; sources are blended by
weight. Every rank opens the same files and computes the same order: nothing is built or sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import Tokenizer, load_tokenizer
from mixtron.launch.config import RunConfig
from mixtron.launch.config_sections import DataConfig, SyntheticDataConfig
from mixtron.launch.sample_order import blend, permuted
from mixtron.launch.sample_stream import Sample, SampleStream, open_stream, splits_of
from mixtron.launch.synthetic.data import (
    SyntheticSample,
    SyntheticTraining,
    SyntheticValidation,
    compare_synthetic,
    open_synthetic,
)
from mixtron.megatron_ext.errors import ConfigError

__all__ = [
    "AnySample",
    "AnyTraining",
    "AnyValidation",
    "Sample",
    "SampleRef",
    "TrainingData",
    "ValidationData",
    "check_against_tokenizer",
    "check_vocabulary",
    "compare_records",
    "open_data",
]

SampleRef = tuple[int, int]
"""Number of the source, number of the sample in its stream."""


@dataclass
class Source:
    """One stream of a blend, with its place in it."""

    stream: SampleStream
    weight: float
    consumed: int = 0
    """Samples taken from it since training began."""
    consumed_in_blend: int = 0
    """Samples taken from it since the blend last changed."""


class TrainingData:
    """A blend of streams. Its state says what was trained; reading a sample changes nothing.

    Args:
        sources: streams and their weights.
        seed: of the order of samples.

    Raises:
        DataError: a weight that is not a number above 0, or a stream given twice.
    """

    def __init__(self, sources: Sequence[tuple[SampleStream, float]], seed: int) -> None:
        if not sources:
            raise DataError("data.train: at least one source")
        for i, (stream, weight) in enumerate(sources):
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(
                    f"data.train.{i}: weight {weight} of {stream.shard.prefix}; a weight is a "
                    "number above 0; leave the source out instead of giving it 0"
                )
        self.seed = seed
        self.sources = [Source(stream, float(weight)) for stream, weight in sources]
        self.sequence_length = sources[0][0].sequence_length
        weights = np.array([source.weight for source in self.sources])
        self._weights = weights / weights.sum()
        self._refuse_duplicates()

    @classmethod
    def open(cls, config: DataConfig) -> TrainingData:
        """Opens `data.train`."""
        splits = splits_of(config.split)
        return cls(
            [
                (open_stream(s.path, s.split, splits, config.sequence_length), s.weight)
                for s in config.train
            ],
            seed=config.seed,
        )

    @property
    def shards(self) -> list[Shard]:
        return [source.stream.shard for source in self.sources]

    def next(self, count: int) -> list[SampleRef]:
        """The next `count` samples of training, the same on every rank; they count as trained.

        Each rank reads its own share of them with `read`.
        """
        plan = self.upcoming(count)
        for number, source in enumerate(self.sources):
            taken = sum(chosen == number for chosen, _ in plan)
            source.consumed += taken
            source.consumed_in_blend += taken
        return plan

    def upcoming(self, count: int) -> list[SampleRef]:
        """What `next` would give; they do not count."""
        taken = np.array([source.consumed_in_blend for source in self.sources])
        chosen = blend(self._weights, taken, count)
        samples = np.empty(count, dtype=np.int64)
        for number, source in enumerate(self.sources):
            mine = np.flatnonzero(chosen == number)
            size = len(source.stream)
            position = source.consumed + np.arange(len(mine))
            samples[mine] = permuted(self.seed, position // size, size, position % size)
        return list(zip(chosen.tolist(), samples.tolist(), strict=True))

    def read(self, reference: SampleRef) -> Sample:
        source, sample = reference
        return self.sources[source].stream[sample]

    def realised_shares(self) -> dict[str, float]:
        """Of several sources, each one's share of the samples since the blend last changed."""
        total = sum(source.consumed_in_blend for source in self.sources)
        if len(self.sources) == 1 or total == 0:
            return {}
        shares = [source.consumed_in_blend / total for source in self.sources]
        return {f"data/share.train.{number}": share for number, share in enumerate(shares)}

    def state_dict(self) -> dict:
        """What was trained, to be saved with the model: small, of JSON types."""
        return {
            "sources": [
                {
                    "order": self._order(source),
                    "weight": source.weight,
                    "consumed": source.consumed,
                    "consumed_in_blend": source.consumed_in_blend,
                }
                for source in self.sources
            ]
        }

    def load_state_dict(self, state: dict) -> None:
        """Continues from a saved state.

        A source whose content, split, sequence length and seed are as they were continues its own
        order, wherever its files are now; any other begins its order. When the sources or their
        weights are others than before, the shares count from here on.
        """
        saved = {_key(entry["order"]): entry for entry in state["sources"]}
        for source in self.sources:
            entry = saved.get(_key(self._order(source)), {})
            source.consumed = entry.get("consumed", 0)
            source.consumed_in_blend = entry.get("consumed_in_blend", 0)
        before = {key: entry["weight"] for key, entry in saved.items()}
        now = {_key(self._order(source)): source.weight for source in self.sources}
        if _shares_differ(before, now):
            for source in self.sources:
                source.consumed_in_blend = 0

    def record(self) -> dict:
        """What the order of samples depends on, to be compared on resume; of JSON types."""
        used = [source.stream.split for source in self.sources]
        return {
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "split": {split.name: [split.start, split.stop] for split in used if split},
            "sources": [
                {
                    "path": source.stream.shard.prefix,
                    "fingerprint": source.stream.shard.fingerprint,
                    "weight": source.weight,
                    "split": source.stream.split.name if source.stream.split else None,
                }
                for source in self.sources
            ],
        }

    def _order(self, source: Source) -> list:
        """What one source's own order depends on."""
        split = source.stream.split
        return [
            source.stream.shard.fingerprint,
            [split.start, split.stop] if split else None,
            self.sequence_length,
            self.seed,
        ]

    def _refuse_duplicates(self) -> None:
        seen: dict[str, int] = {}
        for number, source in enumerate(self.sources):
            key = _key(self._order(source))
            if key in seen:
                raise DataError(
                    f"data.train.{number}: {source.stream.shard.prefix} has the same content and "
                    f"split as data.train.{seen[key]}; give one entry with the sum of the weights"
                )
            seen[key] = number


def _key(order: list) -> str:
    return repr(order)


def _shares_differ(before: dict[str, float], now: dict[str, float]) -> bool:
    if before.keys() != now.keys():
        return True
    scale = sum(now.values()) / sum(before.values())
    return any(not math.isclose(before[key] * scale, now[key], rel_tol=1e-9) for key in now)


class ValidationData:
    """The first samples of one stream, always the same, in file order.

    Args:
        sequences: how many; None takes all.

    Raises:
        DataError: more than there are.
    """

    def __init__(self, name: str, stream: SampleStream, sequences: int | None) -> None:
        if sequences is not None and sequences > len(stream):
            raise DataError(
                f"data.validation.{name}: sequences={sequences}, but {stream.shard.prefix} has "
                f"{len(stream)} samples; set it to at most that, or leave it out for all"
            )
        self._stream = stream
        self._length = len(stream) if sequences is None else sequences

    @classmethod
    def open_all(cls, config: DataConfig) -> dict[str, ValidationData]:
        """Opens every set of `data.validation`."""
        splits = splits_of(config.split)
        return {
            name: cls(
                name,
                open_stream(source.path, source.split, splits, config.sequence_length),
                source.sequences,
            )
            for name, source in config.validation.items()
        }

    @property
    def shards(self) -> list[Shard]:
        return [self._stream.shard]

    def __len__(self) -> int:
        return self._length

    def read(self, index: int) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(f"validation sample {index} of {self._length}")
        return self._stream[index]


AnySample = Sample | SyntheticSample
AnyTraining = TrainingData | SyntheticTraining
AnyValidation = ValidationData | SyntheticValidation


def open_data(
    config: RunConfig,
) -> tuple[Tokenizer | None, AnyTraining, dict[str, AnyValidation]]:
    """Opens what the config names and holds it against the tokenizer and the model's vocabulary.

    Raises:
        ConfigError: the tokenizer has ids that the model has no embedding for.
        DataError: tokenizer or shards are missing, damaged or do not belong together.
    """
    if isinstance(config.data, SyntheticDataConfig):
        synthetic, sets = open_synthetic(config.data, config.model.vocab_size)
        return None, synthetic, {**sets}
    tokenizer = load_tokenizer(config.data.tokenizer, eod_token=config.data.eod_token)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the {tokenizer.vocab_size} "
            f"ids of {config.data.tokenizer}; set it to {tokenizer.vocab_size}"
        )
    data = TrainingData.open(config.data)
    validation = ValidationData.open_all(config.data)
    shards = [*data.shards, *(shard for v in validation.values() for shard in v.shards)]
    check_against_tokenizer(shards, tokenizer)
    check_vocabulary(shards, config.model.vocab_size)
    return tokenizer, data, {**validation}


def check_against_tokenizer(shards: Iterable[Shard], tokenizer: Tokenizer) -> None:
    """Raises DataError when a shard was built with another tokenizer."""
    for shard in shards:
        built_with = shard.manifest.tokenizer
        if built_with["sha256"] != tokenizer.sha256:
            raise DataError(
                f"{shard.prefix}: built with a {built_with['type']} tokenizer of "
                f"{built_with['vocab_size']} ids (sha256 {built_with['sha256'][:12]}), but "
                f"data.tokenizer is a {tokenizer.type} one of {tokenizer.vocab_size} "
                f"({tokenizer.sha256[:12]}); set data.tokenizer and data.eod_token to those of "
                "the build, or build the shard again"
            )


def check_vocabulary(shards: Iterable[Shard], vocab_size: int) -> None:
    """Raises DataError when a shard holds ids that the model has no embedding for."""
    for shard in shards:
        if shard.manifest.max_id >= vocab_size:
            raise DataError(
                f"{shard.prefix}: holds id {shard.manifest.max_id}, but model.vocab_size="
                f"{vocab_size}; set it to {shard.manifest.cardinality}"
            )


def compare_records(saved: dict, current: dict) -> list[str]:
    """What differs between two of the data's `record()`s, a line each; files may have moved."""
    if "synthetic" in saved or "synthetic" in current:
        return compare_synthetic(saved, current)
    differences = [
        f"data.{key} was {saved[key]}, is {current[key]}: every source begins its order anew"
        for key in ("sequence_length", "seed")
        if saved[key] != current[key]
    ]
    before, now = _by_content(saved), _by_content(current)
    gone = {_place(source): source for key, source in before.items() if key not in now}
    for key, source in now.items():
        place, fingerprint = _place(source), source["fingerprint"][:12]
        if key in before:
            old, new = _share(before[key], saved), _share(source, current)
            if not math.isclose(old, new, rel_tol=1e-9):
                differences.append(
                    f"{place}: its share of the blend was {old:.6g}, is {new:.6g}; it continues "
                    "its own order"
                )
        elif place in gone:
            was = gone.pop(place)["fingerprint"][:12]
            what = "range of documents" if was == fingerprint else "content"
            differences.append(
                f"{place}: another {what} (fingerprint was {was}, is {fingerprint}); it begins "
                "its order anew"
            )
        else:
            differences.append(f"{place}: new in the blend (fingerprint {fingerprint})")
    return differences + [f"{place}: no longer in the blend" for place in gone]


def _by_content(record: dict) -> dict[str, dict]:
    """Sources by fingerprint and by the range of hashes that their split takes."""
    ranges = record["split"]
    return {_key([s["fingerprint"], ranges.get(s["split"])]): s for s in record["sources"]}


def _share(source: dict, record: dict) -> float:
    return source["weight"] / sum(s["weight"] for s in record["sources"])


def _place(source: dict) -> str:
    return source["path"] + (f" (split {source['split']})" if source["split"] else "")
