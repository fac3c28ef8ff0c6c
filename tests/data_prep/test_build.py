import hashlib
import json
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from mixtron.data_prep import readers
from mixtron.data_prep.build import build
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import load_tokenizer
from tests.data_prep.corpora import speeches, write_jsonl

MALFORMED = b'{"text":"a b"}\n{"text": "c\n{"text":"d"}\n\n{"body":"x"}\n{"text":null}\n'


def run_build(inputs, tokenizer, output, **options):
    return build(inputs, tokenizer, output, **{"progress": False, **options})


def test_documents_come_out_as_they_went_in(tmp_path, sentencepiece_model):
    files = speeches()[:6]
    manifest = run_build(files, sentencepiece_model, tmp_path / "a")
    shard, tokenizer = Shard(tmp_path / "a"), load_tokenizer(sentencepiece_model)
    for i, file in enumerate(files):
        ids = shard.document(i)
        assert ids[-1] == tokenizer.eod_id
        assert tokenizer.decode(ids[:-1]) == file.read_text()
    assert np.count_nonzero(shard.tokens(0, shard.total_tokens) == tokenizer.eod_id) == 6
    assert manifest == shard.manifest
    assert manifest.tokenizer == {
        "type": "sentencepiece",
        "sha256": tokenizer.sha256,
        "vocab_size": 1000,
    }
    assert manifest.inputs == [
        {
            "file": str(file),
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in files
    ]


def test_the_same_bytes_for_any_number_of_workers(tmp_path, monkeypatch, sentencepiece_model):
    monkeypatch.setattr(readers, "UNIT_BYTES", 2_000)
    words = speeches()[1].read_text().split()
    texts = [f"document {i} {' '.join(words[i : 3 * i])}" for i in range(101)]
    write_jsonl(tmp_path / "b.jsonl", texts[:60])
    write_jsonl(tmp_path / "c.jsonl", texts[60:])
    (tmp_path / "a.txt").write_text("first of all")
    (tmp_path / "d.txt").write_text("last of all")
    inputs = [tmp_path / "c.jsonl", f"{tmp_path}/[abd].*"]
    content = set()
    for workers in (1, 2, 4):
        prefix = tmp_path / f"out{workers}"
        manifest = run_build(inputs, sentencepiece_model, prefix, workers=workers)
        content.add(tuple((tmp_path / f"out{workers}.{s}").read_bytes() for s in ("bin", "idx")))
        content.add((tmp_path / f"out{workers}.json").read_bytes())
    assert len(content) == 2
    names = [entry["file"].rpartition("/")[2] for entry in manifest.inputs]
    assert names == ["a.txt", "b.jsonl", "c.jsonl", "d.txt"]
    shard, tokenizer = Shard(tmp_path / "out4"), load_tokenizer(sentencepiece_model)
    decoded = [tokenizer.decode(shard.document(i)[:-1]) for i in range(shard.documents)]
    assert decoded == ["first of all", *texts, "last of all"]


def test_a_bad_line_ends_the_build(tmp_path, monkeypatch, sentencepiece_model):
    """The first in the order of the input is named, also when it is far into the file."""
    monkeypatch.setattr(readers, "UNIT_BYTES", 64)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text":"good"}\n' * 40 + MALFORMED + MALFORMED)
    with pytest.raises(DataError) as caught:
        run_build([file], sentencepiece_model, tmp_path / "out", workers=2)
    assert str(caught.value) == f"{file}:42: byte 12: unexpected end of data"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_bad_lines_are_counted_and_quarantined(tmp_path, monkeypatch, sentencepiece_model):
    monkeypatch.setattr(readers, "UNIT_BYTES", 32)
    file, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    file.write_bytes(MALFORMED)
    text.write_bytes(b"caf\xe9")
    for policy in ("skip", "quarantine"):
        prefix = tmp_path / policy
        manifest = run_build([file, text], sentencepiece_model, prefix, on_bad_line=policy)
        assert manifest.documents == 2
        assert manifest.counts == {"empty": 0, "rejected": 5}
    assert not (tmp_path / "skip.rejected.jsonl").exists()
    rejected = [json.loads(x) for x in (tmp_path / "quarantine.rejected.jsonl").open()]
    assert [(bad["file"], bad["line"]) for bad in rejected] == [
        *((str(file), line) for line in (2, 4, 5, 6)),
        (str(text), None),
    ]
    assert rejected[0]["raw"] == '{"text": "c'
    assert rejected[2]["reason"] == "no key 'text'; keys here: body"


def test_empty_documents_are_dropped_and_counted(tmp_path, sentencepiece_model):
    file = write_jsonl(tmp_path / "a.jsonl", ["", "a real one", " \n\t", "and another", ""])
    manifest = run_build([file], sentencepiece_model, tmp_path / "out")
    assert (manifest.documents, manifest.counts["empty"]) == (2, 3)
    shard = Shard(tmp_path / "out")
    assert manifest.tokens == shard.document_offsets[-1] == shard.total_tokens


@pytest.mark.parametrize("texts", [[], ["", ""], [" ", "\n"]])
def test_a_corpus_without_text_is_refused(tmp_path, sentencepiece_model, texts):
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    with pytest.raises(DataError, match=rf"no document with text \({len(texts)} empty, 0 rej"):
        run_build([file], sentencepiece_model, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_special_token_text_stays_text(tmp_path, bytelevel_folder):
    file = write_jsonl(tmp_path / "a.jsonl", ["x<|endoftext|>y"])
    run_build([file], bytelevel_folder, tmp_path / "out")
    tokenizer, shard = load_tokenizer(bytelevel_folder), Shard(tmp_path / "out")
    ids = shard.document(0)
    assert np.flatnonzero(ids == tokenizer.eod_id).tolist() == [len(ids) - 1]
    assert tokenizer.decode(ids[:-1]) == "x<|endoftext|>y"


def test_without_end_of_document_token(tmp_path, sentencepiece_model):
    file = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    manifest = run_build([file], sentencepiece_model, tmp_path / "out", append_eod=False)
    assert manifest.eod_id is None
    tokenizer, shard = load_tokenizer(sentencepiece_model), Shard(tmp_path / "out")
    assert [tokenizer.decode(shard.document(i)) for i in range(2)] == ["one", "two"]
    assert tokenizer.eod_id not in shard.tokens(0, shard.total_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0: at least 1"),
        ({"text_keys": "text"}, "text_keys='text': a list"),
        ({"on_bad_line": "ignore"}, "on_bad_line='ignore': fail, skip, quarantine"),
    ],
)
def test_options_that_do_not_exist(tmp_path, sentencepiece_model, options, message):
    with pytest.raises(DataError, match=message):
        run_build([speeches()[0]], sentencepiece_model, tmp_path / "out", **options)


def _start_long_build(tmp_path, tokenizer) -> subprocess.Popen:
    """A long build in a process of its own, returned when its two workers are at work."""
    text = speeches()[100].read_text()
    corpus = write_jsonl(tmp_path / "long.jsonl", [text] * 1000)
    command = ["-m", "mixtron.launch.cli", "prep", "build", "--workers", "2", "--input", corpus]
    process = subprocess.Popen(
        [sys.executable, *command, "--tokenizer", tokenizer, "--output", tmp_path / "out"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (started := list(tmp_path.glob("out.bin.*.tmp"))) or started[0].stat().st_size == 0:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def _workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_a_killed_worker_ends_the_build_within_seconds(tmp_path, sentencepiece_model):
    process = _start_long_build(tmp_path, sentencepiece_model)
    workers = _workers_of(process)
    assert len(workers) == 2
    workers[0].send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 76
    assert "a tokenising worker died" in errors
    assert [p.name for p in tmp_path.iterdir()] == ["long.jsonl"]


def test_workers_do_not_outlive_a_killed_parent(tmp_path, sentencepiece_model):
    process = _start_long_build(tmp_path, sentencepiece_model)
    workers = _workers_of(process)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    for suffix in ("bin", "idx", "json"):
        assert not (tmp_path / f"out.{suffix}").exists()
