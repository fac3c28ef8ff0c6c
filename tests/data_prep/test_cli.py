import json
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mixtron.data_prep.cli import app
from mixtron.data_prep.errors import DataError
from tests.data_prep.corpora import speeches


def prep(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_train_build_inspect(tmp_path):
    first, second, third = speeches()[:3]
    tokenizer, prefix = tmp_path / "t.model", tmp_path / "out" / "corpus"
    inputs = ("--input", first, second, "--input", third)
    said = prep("train-tokenizer", *inputs, "--vocab-size", 600, "--output", tokenizer)
    assert "600 ids, end of document 2" in said
    assert "(100.0%)" in said
    said = prep("build", *inputs, "--tokenizer", tokenizer, "--output", prefix, "--workers", 2)
    manifest = json.loads(prep("inspect", prefix))
    assert f"│         3 │ {manifest['tokens']:,} │ 100.0% │" in said
    assert [entry["file"] for entry in manifest["inputs"]] == list(map(str, speeches()[:3]))
    text = prep("inspect", prefix, "--document", 1, "--tokenizer", tokenizer)
    assert text == second.read_text() + "\n"
    assert prep("inspect", prefix, "--document", 1).split()[-1] == "2"

    prep("train-tokenizer", *inputs, "--vocab-size", 500, "--output", tmp_path / "other.model")
    with pytest.raises(DataError, match=r"other\.model: not the tokenizer that"):
        prep("inspect", prefix, "--document", 1, "--tokenizer", tmp_path / "other.model")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, sentencepiece_model):
    corpus = tmp_path / "a.jsonl"
    corpus.write_text('{"text":"a b"}\nnot json\n{"text":"c"}\n')
    command = ["-m", "mixtron.launch.cli", "prep", "build", "--input", corpus, "--quiet"]
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, *command, "--tokenizer", sentencepiece_model, "--output", tmp_path / "b"],
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - started < 60
    assert run.returncode == 2
    assert run.stderr == f"mixtron: {corpus}:2: byte 1: invalid literal, expected 'null'\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.parts", "b.plan.json"]
