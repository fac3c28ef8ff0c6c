"""Whole shards held against their manifests, and manifests for shards of others."""

import json
import shutil

import numpy as np
import pytest

from mixtron.data_prep import verify as verify_module
from mixtron.data_prep.adopt import adopt
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.verify import verify
from tests.data_prep.corpora import write_shard

DOCUMENTS = [[1, 2, 9], [9], [3, 9], [4, 5, 6, 9]]


def _write(path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(content)


def _edit(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize("cardinality", [10, 70_000])
def test_a_sound_shard(tmp_path, monkeypatch, block, cardinality):
    monkeypatch.setattr(verify_module, "BLOCK", block)
    manifest = write_shard(tmp_path / "a", DOCUMENTS, cardinality, eod_id=9)
    assert verify(tmp_path / "a", progress=False) == manifest


LENGTHS, POINTERS, INDICES = 34, 34 + 4 * 4, 34 + 12 * 4
DAMAGE = {
    "a token": (lambda d: _write(d / "a.bin", 2, b"\x03"), r"a\.bin: its SHA-256 is not"),
    "document end": (lambda d: _write(d / "a.bin", 4, b"\x03"), r"must end with id 9, not \{"),
    "large id": (lambda d: _write(d / "a.bin", 2, b"\x0b"), r"a\.json: max_id 9, but .* 11"),
    "pointer": (lambda d: _write(d / "a.idx", POINTERS + 8, b"\x07"), "pointer of document 1"),
    "last pointer": (lambda d: _write(d / "a.idx", POINTERS + 24, b"\x08"), r"a\.bin: 20 bytes"),
    "length": (lambda d: _write(d / "a.idx", LENGTHS, b"\x02"), "pointer of document 1"),
    "document index": (lambda d: _write(d / "a.idx", INDICES + 8, b"\x03"), "one sequence each"),
    "longest": (lambda d: _edit(d / "a.json", longest_document=5), "longest_document 5, but"),
    "cardinality": (lambda d: _edit(d / "a.json", cardinality=5), "id 9 beyond the 5 ids"),
    "beginning": (lambda d: _edit(d / "a.json", bos_id=1), "must begin with id 1"),
    "idx hash": (lambda d: _edit(d / "a.json", idx_sha256="0"), r"a\.idx: its SHA-256"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(tmp_path, name):
    damage, message = DAMAGE[name]
    write_shard(tmp_path / "a", DOCUMENTS, 10, eod_id=9)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        verify(tmp_path / "a", progress=False)


def _megatron(prefix, documents, dtype) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype=dtype), [len(document)] if document else [])
    builder.finalize(f"{prefix}.idx")


def test_adopting_megatrons_shards(tmp_path, sentencepiece_model, bytelevel_folder):
    tokenizer = load_tokenizer(sentencepiece_model)
    texts = ["The people of the United States", "a second document", "", "and a last one"]
    documents = [[*ids.tolist(), tokenizer.eod_id] for ids in tokenizer.encode_batch(texts)]
    _megatron(tmp_path / "theirs", documents, np.int32)  # as Megatron does when it knows no size
    before = (tmp_path / "theirs.bin").read_bytes()
    manifest = adopt(tmp_path / "theirs", sentencepiece_model, None, progress=False)
    assert (manifest.dtype, manifest.documents, manifest.eod_id) == ("int32", 4, tokenizer.eod_id)
    assert verify(tmp_path / "theirs", progress=False) == manifest
    assert (tmp_path / "theirs.bin").read_bytes() == before
    shard = Shard(tmp_path / "theirs")
    assert [tokenizer.decode(shard.document(i)[:-1]) for i in range(4)] == texts
    with pytest.raises(DataError, match=r"theirs\.json exists"):
        adopt(tmp_path / "theirs", sentencepiece_model, None, progress=False)

    _megatron(tmp_path / "open", [d[:-1] for d in documents if len(d) > 1], np.uint16)
    assert adopt(tmp_path / "open", sentencepiece_model, None, progress=False).eod_id is None


def test_what_cannot_be_adopted(tmp_path, sentencepiece_model):
    refuse = {
        "beyond": ([[1, 1000]], np.uint16, "holds id 1000, but .* only 1000: another tokenizer"),
        "negative": ([[1, -1]], np.int32, "a negative id, -1"),
        "sentences": ([[1], []], np.uint16, "1 sequences in 2 documents; only one"),
    }
    for name, (documents, dtype, message) in refuse.items():
        _megatron(tmp_path / name, documents, dtype)
        with pytest.raises(DataError, match=message):
            adopt(tmp_path / name, sentencepiece_model, None, progress=False)
        assert not (tmp_path / f"{name}.json").exists()
    _megatron(tmp_path / "cut", [[1, 2, 3]], np.uint16)
    content = (tmp_path / "cut.bin").read_bytes()
    for size in (4, 5):
        (tmp_path / "cut.bin").write_bytes(content[:size])
        with pytest.raises(DataError, match=r"cut\.bin: .* bytes"):
            adopt(tmp_path / "cut", sentencepiece_model, None, progress=False)
    with pytest.raises(DataError, match=r"absent\.bin: no such file"):
        adopt(tmp_path / "absent", sentencepiece_model, None, progress=False)


def test_a_moved_shard_is_the_same(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS, 10, eod_id=9)
    (tmp_path / "b").mkdir()
    for suffix in ("bin", "idx", "json"):
        shutil.move(tmp_path / f"a.{suffix}", tmp_path / "b" / f"c.{suffix}")
    verify(tmp_path / "b" / "c", progress=False)
