import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from ruamel.yaml import YAML

from mixtron.data_prep import plan, pool, selection
from mixtron.data_prep.build import build, build_all, plan_to
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.merge import merge
from mixtron.data_prep.plan import Recipe, check_unchanged, load_plan
from mixtron.data_prep.report import print_result
from mixtron.data_prep.run import Share, run_units
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.data import TrainingData, ValidationData
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
            "lines": 1,
        }
        for file in files
    ]


@pytest.fixture
def small_units(monkeypatch):
    """Units so small that any input has several."""
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 2_000)


def shards_in(folder) -> dict[str, str]:
    """SHA-256 of every file of a shard."""
    found = [p for p in folder.iterdir() if p.suffix in (".bin", ".idx", ".json", ".jsonl")]
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in found
        if not p.name.endswith(".plan.json")
    }


def test_the_same_bytes_for_any_number_of_workers(tmp_path, small_units, sentencepiece_model):
    words = speeches()[1].read_text().split()
    texts = [f"document {i} {' '.join(words[i : 3 * i])}" for i in range(101)]
    write_jsonl(tmp_path / "b.jsonl", texts[:60])
    write_jsonl(tmp_path / "c.jsonl", texts[60:])
    (tmp_path / "a.txt").write_text("first of all")
    (tmp_path / "d.txt").write_text("last of all")
    inputs = [tmp_path / "c.jsonl", f"{tmp_path}/[abd].*"]
    content, ended = [], threading.Event()
    for workers in (1, 2, 7):
        manifest = run_build(
            inputs, sentencepiece_model, tmp_path / str(workers) / "out", workers=workers
        )
        content.append(shards_in(tmp_path / str(workers)))
        if workers == 2:  # a process with threads does not fork its workers
            thread = threading.Thread(target=ended.wait, daemon=True)
            thread.start()
            assert pool.has_threads()
    ended.set()
    assert len(content[0]) == 3
    assert content[0] == content[1] == content[2]
    names = dict.fromkeys(entry["file"].rpartition("/")[2] for entry in manifest.inputs)
    assert list(names) == ["a.txt", "b.jsonl", "c.jsonl", "d.txt"]
    ranges = [entry["range"] for entry in manifest.inputs if entry["file"].endswith("b.jsonl")]
    assert len(ranges) > 5
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    shard, tokenizer = Shard(tmp_path / "7" / "out"), load_tokenizer(sentencepiece_model)
    decoded = [tokenizer.decode(shard.document(i)[:-1]) for i in range(shard.documents)]
    assert decoded == ["first of all", *texts, "last of all"]
    assert not list(tmp_path.glob("*/out.parts"))


def test_the_same_tokens_from_every_format(tmp_path, small_units, sentencepiece_model):
    texts = [file.read_text()[:3000] for file in speeches()[:20]]
    lines = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    table = pa.table({"text": texts})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    names = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "saved")
    content = set()
    for i, name in enumerate((*names, f"file://{tmp_path}/a.jsonl")):
        file = name if "://" in name else tmp_path / name
        manifest = run_build([file], sentencepiece_model, tmp_path / f"out{i}")
        content.add((manifest.bin_sha256, manifest.idx_sha256))
    assert len(content) == 1


def test_a_bad_line_ends_the_build(tmp_path, small_units, sentencepiece_model):
    """It is named by its line in the file, also when it is far into it."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text":"good"}\n' * 400 + MALFORMED + MALFORMED)
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            run_build([file], sentencepiece_model, tmp_path / "out", workers=workers)
        assert str(caught.value) == f"{file}:402: byte 12: unexpected end of data"
        assert not shards_in(tmp_path).keys() - {"a.jsonl"}
    file.write_bytes(b'{"text":"good"}\n' * 400)
    assert run_build([file], sentencepiece_model, tmp_path / "out").documents == 400


def test_bad_lines_are_counted_and_quarantined(tmp_path, small_units, sentencepiece_model):
    file, text, table = tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "c.parquet"
    file.write_bytes(b'{"text":"good"}\n' * 400 + MALFORMED)
    text.write_bytes(b"caf\xe9")
    pa.parquet.write_table(pa.table({"text": ["a", None, "b", None] * 50}), table, row_group_size=4)
    for policy in ("skip", "quarantine"):
        prefix = tmp_path / policy
        manifest = run_build(
            [tmp_path / "[abc].*"], sentencepiece_model, prefix, on_bad_line=policy
        )
        assert manifest.documents == 402 + 100
        assert manifest.counts["rejected"] == 5 + 100
        assert sum(entry["lines"] for entry in manifest.inputs) == 502 + 105
    assert not (tmp_path / "skip.rejected.jsonl").exists()
    rejected = [json.loads(x) for x in (tmp_path / "quarantine.rejected.jsonl").open()]
    assert [(bad["file"], bad["line"]) for bad in rejected] == [
        *((str(file), line) for line in (402, 404, 405, 406)),
        (str(text), None),
        *((str(table), row) for row in range(2, 201, 2)),
    ]
    assert rejected[0]["raw"] == '{"text": "c'
    assert rejected[2]["reason"] == "no key 'text'; keys here: body"


def test_too_many_bad_lines_end_the_build(tmp_path, small_units, sentencepiece_model):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text":"good"}\n' * 400 + MALFORMED * 3)
    recipe = Recipe(str(sentencepiece_model), on_bad_line="skip", max_bad_lines=12)
    assert build_all([file], recipe, tmp_path / "a", progress=False)[0].manifest.documents == 406
    recipe = dataclasses.replace(recipe, max_bad_lines=11)
    with pytest.raises(DataError, match=r"12 bad lines or more, above max_bad_lines=11"):
        build_all([file], recipe, tmp_path / "b", progress=False)
    assert not (tmp_path / "b.json").exists()
    plan_to(tmp_path / "c", [file], recipe)
    for index in range(2):  # neither element of an array alone meets too many
        with contextlib.suppress(DataError):
            run_units(tmp_path / "c", share=Share(index, 2), progress=False)
    with pytest.raises(DataError):
        merge(tmp_path / "c", progress=False)


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
    assert shards_in(tmp_path).keys() == {"a.jsonl"}


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


def test_changed_input_is_done_again_and_the_rest_is_kept(
    tmp_path, monkeypatch, sentencepiece_model
):
    """Units are known by the state of their files: nothing old gets into the output."""
    a = write_jsonl(tmp_path / "a.jsonl", ["old"] * 4)
    b = write_jsonl(tmp_path / "b.jsonl", ["other"] * 3)
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", a.stat().st_size)
    inputs, recipe = [a, b], Recipe(str(sentencepiece_model))
    plan_to(tmp_path / "out", inputs, recipe)
    assert run_units(tmp_path / "out", progress=False) == 2
    write_jsonl(a, ["new"] * 4)
    os.utime(a, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.jsonl: changed since it was planned"):
        check_unchanged(load_plan(tmp_path / "out").units[0])
    plan_to(tmp_path / "out", inputs, recipe)
    with pytest.raises(DataError, match=r"1 of 2 units are not done .the first is number 0"):
        merge(tmp_path / "out", progress=False)
    assert run_units(tmp_path / "out", progress=False) == 1
    (merged,) = merge(tmp_path / "out", progress=False)
    run_build(inputs, sentencepiece_model, tmp_path / "fresh")
    assert merged.manifest == Shard(tmp_path / "fresh").manifest


def test_a_finished_build_is_left_alone(tmp_path, sentencepiece_model):
    file = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    first = run_build([file], sentencepiece_model, tmp_path / "out")
    state = {p: p.stat().st_mtime_ns for p in tmp_path.glob("out*")}
    assert run_build([file], sentencepiece_model, tmp_path / "out") == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("out*")} == state
    with pytest.raises(DataError, match=r"out\.json exists, built from other inputs or options"):
        run_build([file], sentencepiece_model, tmp_path / "out", append_eod=False)
    (tmp_path / "out.plan.json").unlink()
    with pytest.raises(DataError, match=r"out\.bin exists, built from other"):
        run_build([file], sentencepiece_model, tmp_path / "out")


def test_damaged_parts_are_not_merged(tmp_path, small_units, sentencepiece_model):
    file = write_jsonl(tmp_path / "a.jsonl", [f"number {i}" for i in range(300)])
    made = plan_to(tmp_path / "out", [file], Recipe(str(sentencepiece_model)))
    run_units(tmp_path / "out", progress=False)
    part = tmp_path / "out.parts" / f"{made.units[1].key}.bin"
    content = bytearray(part.read_bytes())
    content[5] ^= 1
    part.write_bytes(content)
    with pytest.raises(DataError, match=rf"{part.name}: damaged .its SHA-256"):
        merge(tmp_path / "out", progress=False)
    part.write_bytes(content[:-1])  # of another size: it counts as not done
    assert run_units(tmp_path / "out", progress=False) == 1
    merge(tmp_path / "out", progress=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_exact_duplicates_are_left_out(
    tmp_path, monkeypatch, small_units, sentencepiece_model, workers
):
    monkeypatch.setattr(selection, "BLOCK", 7)
    texts = [f"text number {i * i % 37}" for i in range(300)]
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    recipe = Recipe(str(sentencepiece_model), deduplicate=True)
    (merged,) = build_all([file], recipe, tmp_path / "out", workers, progress=False)
    kept = list(dict.fromkeys(texts))
    shard, tokenizer = Shard(tmp_path / "out"), load_tokenizer(sentencepiece_model)
    assert [tokenizer.decode(shard.document(i)[:-1]) for i in range(shard.documents)] == kept
    assert merged.manifest.counts["duplicates"] == 300 - len(kept)


def test_held_out_documents_by_hash_of_their_text(tmp_path, small_units, sentencepiece_model):
    texts = [f"text number {i % 500}" for i in range(800)]
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    other = write_jsonl(tmp_path / "b.jsonl", texts[::-1])
    recipe = Recipe(str(sentencepiece_model), held_out=0.2)
    tokenizer = load_tokenizer(sentencepiece_model)

    def documents(inputs, name):
        train, held = build_all(inputs, recipe, tmp_path / name, progress=False)
        assert held.output.prefix == str(tmp_path / f"{name}-held-out")
        shards = [Shard(one.output.prefix) for one in (train, held)]
        return [[tokenizer.decode(s.document(i)[:-1]) for i in range(s.documents)] for s in shards]

    train, held = documents([file], "x")
    assert sorted(train + held) == sorted(texts)
    assert not set(train) & set(held)
    assert 60 < len(set(held)) < 140
    assert [t for t in texts if t in set(held)] == held
    # A text's side depends on nothing but the text.
    assert set(documents([file, other], "y")[1]) == set(held)


def test_sources_blend_and_data_block(tmp_path, small_units, sentencepiece_model, capsys):
    (tmp_path / "code").mkdir()
    words = speeches()[0].read_text().split()
    write_jsonl(tmp_path / "web.jsonl", [" ".join(words[i : i + 40]) for i in range(400)])
    for i in range(60):
        (tmp_path / "code" / f"{i}.txt").write_text(" ".join(words[3 * i : 3 * i + 60]))
    recipe = Recipe(str(sentencepiece_model), held_out=0.1)
    inputs = [f"web={tmp_path}/*.jsonl", f"code={tmp_path}/code"]
    merged = build_all(inputs, recipe, tmp_path / "out", workers=2, progress=False)
    names = [one.output.prefix.rpartition("/")[2] for one in merged]
    assert names == ["out-web", "out-web-held-out", "out-code", "out-code-held-out"]
    print_result(tmp_path / "out", merged)
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    block = YAML(typ="safe").load(said[said.index("data:") :])["data"] | {"sequence_length": 16}
    config = DataConfig.model_validate(block)
    data = TrainingData.open(config)
    assert [s.weight for s in data.sources] == [
        merged[0].manifest.tokens,
        merged[2].manifest.tokens,
    ]
    assert ValidationData.open_all(config).keys() == {"web", "code"}


def test_beginning_of_document_and_special_text(tmp_path, bytelevel_folder):
    text = "x<|endoftext|>y"
    file = write_jsonl(tmp_path / "a.jsonl", [text, "", "plain"])
    tokenizer = load_tokenizer(bytelevel_folder)
    recipe = Recipe(str(bytelevel_folder), bos_token="<|endoftext|>", append_eod=False)
    (merged,) = build_all([file], recipe, tmp_path / "bos", progress=False)
    shard = Shard(tmp_path / "bos")
    assert (shard.manifest.bos_id, shard.manifest.eod_id) == (tokenizer.eod_id, None)
    assert shard.document(0)[0] == tokenizer.eod_id
    assert tokenizer.decode(shard.document(0)[1:]) == text
    assert merged.manifest.counts["eod_in_text"] == 1
    recipe = Recipe(str(bytelevel_folder), special_text=True)
    build_all([file], recipe, tmp_path / "ids", progress=False)
    shard = Shard(tmp_path / "ids")
    assert np.flatnonzero(shard.document(0) == tokenizer.eod_id).tolist() == [1, 3]
    assert shard.manifest.special_text
    recipe = Recipe(str(bytelevel_folder), bos_token="<s>")
    with pytest.raises(DataError, match=r"'<s>' is not a special token \(<\|endoftext\|>\)"):
        build_all([file], recipe, tmp_path / "c", progress=False)


def _start_long_build(tmp_path, tokenizer) -> subprocess.Popen:
    """A long build in a process of its own, returned when its two workers are at work."""
    text = speeches()[100].read_text()
    corpus = write_jsonl(tmp_path / "long.jsonl", [text] * 250)
    command = ["-m", "mixtron.launch.cli", "prep", "build", "--workers", "2", "--input", corpus]
    process = subprocess.Popen(
        [sys.executable, *command, "--tokenizer", tokenizer, "--output", tmp_path / "out"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out.parts/*.bin.*.tmp"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def _workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The forked children of the process that loads what they need, itself a fork of the build."""
    build = psutil.Process(process.pid)
    (foreman,) = build.children()
    assert foreman.cmdline() == build.cmdline()
    return foreman.children()


def test_a_killed_worker_ends_the_build_within_seconds(tmp_path, sentencepiece_model):
    process = _start_long_build(tmp_path, sentencepiece_model)
    workers = _workers_of(process)
    assert len(workers) == 2
    workers[0].send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 76
    assert "a tokenising worker died" in errors
    assert shards_in(tmp_path).keys() == {"long.jsonl"}


def test_workers_do_not_outlive_a_killed_parent(tmp_path, sentencepiece_model):
    process = _start_long_build(tmp_path, sentencepiece_model)
    workers = _workers_of(process)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    for suffix in ("bin", "idx", "json"):
        assert not (tmp_path / f"out.{suffix}").exists()
