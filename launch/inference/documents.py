"""Documents to take a perplexity on, one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import Tokenizer
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.data import check_against_tokenizer, check_vocabulary
from mixtron.launch.inference.source import Source
from mixtron.launch.sample_order import document_runs
from mixtron.launch.sample_stream import splits_of
from mixtron.megatron_ext.errors import ConfigError

Choice = Literal["all", "long", "joined"]
"""Every document; those that reach the largest length; all of them as one, without boundaries."""


@dataclass(frozen=True)
class Document:
    ids: np.ndarray
    """int64 [n]. The first is not predicted."""
    bytes: int
    """Of the text of all that is predicted, in UTF-8; an end of document has none."""


def documents_of(
    source: Source,
    *,
    name: str | None = None,
    shard: Path | None = None,
    text: Path | None = None,
    choice: Choice = "all",
    longest: int = 0,
) -> list[Document]:
    """The documents of one of the run's validation sets, of a shard, or a text as one document.

    Args:
        name: of the validation set; the first by default.
        longest: the largest length, for `choice="long"`.

    Raises:
        ConfigError: there are none, or more than one of `name`, `shard` and `text`.
        DataError: a shard that is missing, damaged or of another tokenizer.
    """
    given = [x for x in (name, shard, text) if x is not None]
    if len(given) > 1:
        raise ConfigError("give one of --set, --data and --text")
    tokenizer = source.tokenizer
    if text is not None:
        ids = [_ids_of_text(text, tokenizer)]
    else:
        ids = list(_ids_of_set(source, name) if shard is None else _of_shard(source, str(shard)))
    if choice == "joined":
        ids = [np.concatenate(ids)]
    found = [x for x in ids if len(x) > (longest if choice == "long" else 1)]
    if not found:
        most = max(map(len, ids))
        raise ConfigError(
            f"no document has more than {longest if choice == 'long' else 1} tokens, the longest "
            f"{most}: give smaller --lengths, or join them by --documents joined"
        )
    return [Document(x, _bytes(x, tokenizer)) for x in found]


def _ids_of_text(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from None
    return tokenizer.encode_batch([text])[0]


def _ids_of_set(source: Source, name: str | None) -> Iterator[np.ndarray]:
    data = source.config.data
    assert isinstance(data, DataConfig)
    if not data.validation:
        raise ConfigError(f"{source.config.name}: no data.validation; give --data or --text")
    name = name if name is not None else next(iter(data.validation))
    if name not in data.validation:
        raise ConfigError(f"--set {name}: the run has {', '.join(data.validation)}")
    chosen = data.validation[name]
    split = splits_of(data.split)[chosen.split] if chosen.split else None
    return _of_shard(source, chosen.path, (split.start, split.stop) if split else None)


def _of_shard(
    source: Source, prefix: str, hashes: tuple[float, float] | None = None
) -> Iterator[np.ndarray]:
    shard = Shard(prefix)
    check_against_tokenizer([shard], source.tokenizer)
    check_vocabulary([shard], source.config.model.vocab_size)
    runs = [(0, shard.documents)] if hashes is None else document_runs(shard.documents, *hashes)
    for start, stop in runs:
        for number in range(start, stop):
            yield shard.document(number).astype(np.int64)


def _bytes(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    text = ids[ids != tokenizer.eod_id]
    whole, first = (len(tokenizer.decode(x).encode()) for x in (text, text[:1]))
    return whole - first
