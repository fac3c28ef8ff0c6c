import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mixtron.data_prep import shard_writer
from mixtron.data_prep.background_digest import SMALLEST_BYTES, BackgroundDigest
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shard_writer import ShardWriter
from mixtron.data_prep.shards import HEADER, Shard
from tests.data_prep.corpora import TOKENIZER, write_shard

DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [99]]


@pytest.mark.parametrize("cardinality", [100, 70_000])
def test_megatron_reads_and_writes_the_same_bytes(tmp_path, cardinality):
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    write_shard(tmp_path / "ours", DOCUMENTS, cardinality)
    dataset = IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4, 5]

    dtype = np.uint16 if cardinality == 100 else np.int32
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(np.array(document, dtype=dtype), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours = (tmp_path / f"ours.{suffix}").read_bytes()
        assert ours == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("cardinality", [65499, 65500, 65520, 65535, 65536, 65537, 119_547])
def test_largest_ids_survive_at_every_vocabulary_size(tmp_path, cardinality):
    document = [0, cardinality - 1, 1]
    manifest = write_shard(tmp_path / "a", [document], cardinality)
    shard = Shard(tmp_path / "a")
    assert shard.tokens(0, 3).tolist() == document
    assert manifest.max_id == cardinality - 1
    assert manifest.dtype == ("uint16" if cardinality < 65500 else "int32")
    with pytest.raises(DataError, match=f"ids 0 to {cardinality}"):
        write_shard(tmp_path / "b", [[0, cardinality]], cardinality)
    assert not list(tmp_path.glob("b*"))


def test_manifest_says_what_the_files_hold(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS, eod_id=99)
    manifest = json.loads((tmp_path / "a.json").read_text())
    assert manifest["documents"] == 5
    assert manifest["tokens"] == 11 == os.path.getsize(tmp_path / "a.bin") // 2
    assert manifest["longest_document"] == 4
    assert (manifest["max_id"], manifest["cardinality"], manifest["eod_id"]) == (99, 100, 99)
    for suffix in ("bin", "idx"):
        digest = hashlib.sha256((tmp_path / f"a.{suffix}").read_bytes()).hexdigest()
        assert manifest[f"{suffix}_sha256"] == digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json"]


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_pointers_go_beyond_4_gib(tmp_path, monkeypatch, block):
    """Two documents of 2^30 tokens, holes in the file, before one of three."""
    monkeypatch.setattr(shard_writer, "BLOCK", block)
    with ShardWriter(tmp_path / "a", 100, None, TOKENIZER) as writer:
        writer.add(np.array([1, 2, 7, 8, 9]), np.array([1, 1, 3]))
        writer._bin.seek(2**32)
        writer._bin.write(np.array([7, 8, 9], dtype="<u2").data)
        writer._idx.seek(HEADER.size)
        writer._idx.write(np.array([2**30, 2**30, 3], dtype="<i4").data)
        writer.tokens = 2**31 + 3
        writer.publish([], {})
    shard = Shard(tmp_path / "a")
    assert shard.document_offsets.tolist() == [0, 2**30, 2**31, 2**31 + 3]
    assert shard.document(2).tolist() == [7, 8, 9]
    assert shard.document_starts(2**30 + 1, 2**31 + 1).tolist() == [2**31]


def test_index_is_the_same_whatever_the_block_size(tmp_path, monkeypatch):
    write_shard(tmp_path / "whole", DOCUMENTS)
    monkeypatch.setattr(shard_writer, "BLOCK", 2)
    write_shard(tmp_path / "blocks", DOCUMENTS)
    assert (tmp_path / "whole.idx").read_bytes() == (tmp_path / "blocks.idx").read_bytes()


def test_slices_documents_and_offsets(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS)
    shard = Shard(tmp_path / "a")
    stream = [token for document in DOCUMENTS for token in document]
    offsets = [0, 3, 4, 6, 10, 11]
    assert shard.document_offsets.tolist() == offsets
    for start in range(12):
        for stop in range(start, 12):
            assert shard.tokens(start, stop).tolist() == stream[start:stop]
            expected = [o for o in offsets[:-1] if start <= o < stop]
            assert shard.document_starts(start, stop).tolist() == expected
    assert [shard.document(i).tolist() for i in range(5)] == DOCUMENTS
    with pytest.raises(IndexError):
        shard.tokens(5, 12)
    with pytest.raises(DataError, match="document 5: there are 5"):
        shard.document(5)


def test_tokens_outlive_their_shard(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS)
    tokens = Shard(tmp_path / "a").tokens(0, 11)
    for path in tmp_path.iterdir():
        path.unlink()
    tokens[0] = 50
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [50, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99]


def _truncate(path, size):
    os.truncate(path, size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: _truncate(d / "a.bin", 12), r"a\.bin: 12 bytes, its index says 22"),
        (lambda d: _truncate(d / "a.bin", 0), r"a\.bin: 0 bytes, its index says 22"),
        (lambda d: _truncate(d / "a.idx", 60), r"a\.idx: 60 bytes, 142 expected for 5 documents"),
        (lambda d: _truncate(d / "a.idx", 9), r"a\.idx: not a Megatron index"),
        (lambda d: (d / "a.idx").write_bytes(b"{}" * 40), r"a\.idx: not a Megatron index"),
        (lambda d: (d / "a.json").unlink(), r"a\.json: the shard's manifest is missing"),
        (lambda d: (d / "a.json").write_text("{"), r"a\.json: not a shard manifest"),
        (lambda d: (d / "a.json").write_text("{}"), r"a\.json: manifest format None"),
        (lambda d: (d / "a.bin").unlink(), r"a\.bin: no such file"),
        (lambda d: (d / "a.idx").unlink(), r"a\.idx: no such file"),
        (lambda d: shutil.copy(d / "b.json", d / "a.json"), r"a\.json: documents 1, but .* hold 5"),
        (lambda d: shutil.copy(d / "c.json", d / "a.json"), r"a\.json: dtype int32, but"),
    ],
)
def test_damage_is_refused_at_open(tmp_path, damage, message):
    write_shard(tmp_path / "a", DOCUMENTS)
    write_shard(tmp_path / "b", DOCUMENTS[:1])
    write_shard(tmp_path / "c", DOCUMENTS, 70_000)
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        Shard(tmp_path / "a")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_fingerprint_follows_content_not_place(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS)
    before = Shard(tmp_path / "a").fingerprint
    (tmp_path / "elsewhere").mkdir()
    for suffix in ("bin", "idx", "json"):
        (tmp_path / f"a.{suffix}").rename(tmp_path / "elsewhere" / f"z.{suffix}")
    assert Shard(tmp_path / "elsewhere" / "z").fingerprint == before
    write_shard(tmp_path / "token", [*DOCUMENTS[:-1], [98]])
    write_shard(tmp_path / "boundary", [[1, 2], [3, 4], *DOCUMENTS[2:]])
    assert Shard(tmp_path / "token").fingerprint != before
    assert Shard(tmp_path / "boundary").fingerprint != before


def test_a_taken_prefix_is_left_alone(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS)
    before = (tmp_path / "a.bin").read_bytes()
    with pytest.raises(DataError, match=r"a\.bin exists; remove it"):
        write_shard(tmp_path / "a", [[1]])
    assert (tmp_path / "a.bin").read_bytes() == before


def test_a_writer_that_did_not_publish_leaves_nothing(tmp_path):
    with ShardWriter(tmp_path / "a", 100, None, TOKENIZER) as writer:
        writer.add(np.array([1]), np.array([1]))
    assert not list(tmp_path.iterdir())


def test_memory_stays_flat_over_documents(tmp_path):
    code = f"""
import resource
import numpy as np
from mixtron.data_prep.shard_writer import ShardWriter
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
tokens, lengths = np.ones(10_000, dtype=np.int32), np.ones(10_000, dtype=np.int64)
with ShardWriter({str(tmp_path / "a")!r}, 100, None, {TOKENIZER!r}) as writer:
    writer.add(tokens, lengths)
    before = peak_bytes()
    for _ in range(500):
        writer.add(tokens, lengths)
    writing = peak_bytes()
    writer.publish([], {{"empty": 0, "rejected": 0}})
print((writing - before) / 5e6, (peak_bytes() - before) / 5e6)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    while_writing, with_index = map(float, run.stdout.split())
    assert while_writing < 1
    assert with_index < 24


def test_a_digest_beside_other_work():
    blocks = [bytes([size % 251]) * size for size in (10, SMALLEST_BYTES, 3 * SMALLEST_BYTES, 0, 7)]
    digest = BackgroundDigest()
    for block in blocks:
        digest.update(np.frombuffer(block, dtype=np.uint8).data)
    assert digest.hexdigest() == hashlib.sha256(b"".join(blocks)).hexdigest()
    assert digest.hexdigest() == digest.hexdigest()
