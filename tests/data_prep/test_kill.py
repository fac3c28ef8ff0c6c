"""Builds that are killed anywhere, started again, and shared out over an array."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mixtron.data_prep import plan as plan_module
from mixtron.data_prep.build import build_all, plan_to
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.merge import merge
from mixtron.data_prep.plan import Recipe
from mixtron.data_prep.report import status_lines
from mixtron.data_prep.run import Share, share_of_array
from mixtron.data_prep.verify import verify
from tests.data_prep.corpora import speeches, write_jsonl
from tests.data_prep.test_build import shards_in

KILLS = 20
DRIVER = """
import os, random, signal, sys
from mixtron.data_prep import plan
from mixtron.data_prep.build import build_all
from mixtron.data_prep.plan import Recipe

plan.SMALLEST_UNIT_BYTES = 4_000
tokenizer, corpus, straight, killed, seed, kills = sys.argv[1:]
recipe = Recipe(tokenizer, on_bad_line="quarantine", deduplicate=True, held_out=0.2)
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir"}
events, last = 0, None

def watch(name, arguments):
    global events
    if name in EVENTS and killed_folder in str(arguments[0]):
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)

killed_folder = os.path.dirname(straight)
sys.addaudithook(watch)
build_all([corpus], recipe, straight, progress=False)
total, killed_folder = events, os.path.dirname(killed)
points = sorted(random.Random(int(seed)).sample(range(1, total + 1), int(kills)))
for point in points:
    prefix = killed + str(point)
    if (child := os.fork()) == 0:
        events, last = 0, point
        build_all([corpus], recipe, prefix, progress=False)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)
    build_all([corpus], recipe, prefix, progress=False)
    print(point, total)
"""


def make_corpus(tmp_path):
    words = speeches()[2].read_text().split()
    texts = [" ".join(words[i % 50 : i % 50 + 20]) for i in range(200)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", texts)
    corpus.write_bytes(corpus.read_bytes() + b"bad\n")
    return corpus


def test_killed_at_random_points_and_started_again(tmp_path, sentencepiece_model):
    """SIGKILL before any operation on files, in any phase."""
    corpus = make_corpus(tmp_path)
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    arguments = (sentencepiece_model, corpus, tmp_path / "straight/x", tmp_path / "killed/x")
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, arguments), "1", str(KILLS)],
        capture_output=True,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )
    assert run.returncode == 0, run.stderr
    expected = shards_in(tmp_path / "straight")
    assert len(expected) == 7
    found = shards_in(tmp_path / "killed")
    assert len(found) == KILLS * len(expected)
    for line in run.stdout.splitlines():
        point = line.split()[0]
        for name, digest in expected.items():
            assert found[name.replace("x", f"x{point}", 1)] == digest
    assert not list((tmp_path / "killed").glob("*.tmp"))
    assert not list((tmp_path / "killed").glob("*.parts"))


def test_an_array_with_two_killed_elements_equals_one_machine(
    tmp_path, monkeypatch, sentencepiece_model
):
    monkeypatch.setattr(plan_module, "SMALLEST_UNIT_BYTES", 800_000)
    text = speeches()[100].read_text()
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [f"{i} {text}" for i in range(80)])
    recipe = Recipe(str(sentencepiece_model), held_out=0.1)
    (tmp_path / "one").mkdir()
    (tmp_path / "array").mkdir()
    plan = plan_to(tmp_path / "array" / "x", [corpus], recipe)
    assert len(plan.units) == 8

    def start(index: int) -> subprocess.Popen:
        element = {"ID": index + 3, "MIN": 3, "COUNT": 8, "STEP": 1}
        variables = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in element.items()}
        command = [sys.executable, "-m", "mixtron.launch.cli", "prep", "run", "--array", "--quiet"]
        return subprocess.Popen(
            [*command, str(tmp_path / "array" / "x")], env={**os.environ, **variables}
        )

    elements = [start(index) for index in range(8)]
    parts = tmp_path / "array" / "x.parts"
    alive = {0, 1}
    while alive:  # killed in the middle of their unit
        for index in list(alive):
            assert elements[index].poll() is None
            if list(parts.glob(f"{plan.units[index].key}.bin.*.tmp")):
                elements[index].kill()
                alive.discard(index)
        time.sleep(0.001)
    assert [e.wait() for e in elements] == [-signal.SIGKILL] * 2 + [0] * 6
    assert "not done: 0 1" in status_lines(tmp_path / "array" / "x")[1]
    with pytest.raises(DataError, match=r"2 of \d+ units are not done"):
        merge(tmp_path / "array" / "x", progress=False)
    assert [start(index).wait() for index in (0, 1)] == [0, 0]
    for one in merge(tmp_path / "array" / "x", progress=False):
        verify(one.output.prefix, progress=False)
    (said,) = status_lines(tmp_path / "array" / "x")
    assert "all 8 units are done and merged" in said
    build_all([corpus], recipe, tmp_path / "one" / "x", workers=2, progress=False)
    assert shards_in(tmp_path / "array") == shards_in(tmp_path / "one")
    assert len(shards_in(tmp_path / "one")) == 6


def test_a_signal_stops_and_the_same_command_continues(tmp_path, sentencepiece_model):
    text = speeches()[100].read_text()
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [f"{i} {text}" for i in range(250)])
    plan_to(tmp_path / "x", [corpus], Recipe(str(sentencepiece_model)))
    command = [sys.executable, "-m", "mixtron.launch.cli", "prep", "run", "--workers", "2"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "x"), "--quiet"], stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob("x.parts/*.bin.*.tmp")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 75
    assert errors.startswith("mixtron: stopped by SIGUSR1; finished units are kept")


def _array(**values: int) -> dict[str, str]:
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def test_an_elements_share():
    assert share_of_array(_array(ID=0, MIN=0, COUNT=8)) == Share(0, 8)
    assert share_of_array(_array(ID=14, MIN=10, COUNT=3, STEP=2)) == Share(2, 3)
    assert share_of_array(_array(ID=5, MIN=5, COUNT=1)) == Share(0, 1)
    assert Share.parse("3/8") == Share(3, 8)
    for environment in (
        {},
        _array(ID=5),
        _array(ID=9, MIN=3, COUNT=2),
        _array(ID=4, MIN=3, COUNT=4, STEP=2),
    ):
        with pytest.raises(DataError, match="--array: "):
            share_of_array(environment)
    for text in ("8/8", "x", "-1/3", "1"):
        with pytest.raises(DataError, match="element"):
            Share.parse(text)
