"""Suites: the files, a kill in the middle, the table."""

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mixtron.launch.memory import memory_per_rank
from mixtron.launch.synthetic.suite import PROCESS_BYTES, room_for
from mixtron.launch.synthetic.suite_config import SuiteConfig, cells_of, load_suite, merged
from mixtron.launch.synthetic.suite_results import read_results
from mixtron.launch.synthetic.suite_table import summarise, write_table
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers import mixer_configs
from tests.helpers.jobs import ENVIRONMENT, write_config
from tests.helpers.ranks import run_on_ranks

SUITES = sorted((Path(__file__).parents[3] / "configs" / "suites").glob("*.yaml"))

SMALL = {
    "name": "small",
    "seeds": [1, 2],
    "sequences": 30,
    "run": {
        "optimizer": {"lr": 1e-2},
        "training": {
            "steps": 6,
            "global_batch_tokens": 128,
            "micro_batch_sequences": 8,
            "precision": "fp32",
        },
        "checkpoint": {"save_every_steps": 2},
        "logging": {"tensorboard": False},
    },
    "tasks": {
        "mqar": {
            "synthetic": {"task": "mqar", "pairs": 2, "vocab_size": 16},
            "sequence_length": 16,
            "evaluate": {"length": [16, 32], "pairs": [1, 2]},
        }
    },
    "sizes": {
        "d16": {
            "model": {
                "layers": 1,
                "hidden_size": 16,
                "ffn_hidden_size": 16,
                "vocab_multiple": 16,
            },
            "mixers": {"kla": {"key_dim": 4}},
        }
    },
    "mixers": {
        "kla": {"type": "kla", "heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8},
        "attention": {"type": "softmax_attention", "heads": 2, "kv_heads": 2, "head_dim": 8},
    },
    "tiny": {"seeds": [1], "mixers": {"attention": None}},
}


@pytest.fixture
def path(tmp_path) -> Path:
    return write_config(tmp_path / "small.yaml", SMALL)


def missing_mixers(suite: SuiteConfig) -> list[str]:
    return [n for n, options in suite.mixers.items() if options["type"] not in mixer_configs()]


@pytest.mark.parametrize("tiny", [False, True], ids=["whole", "tiny"])
@pytest.mark.parametrize("path", SUITES, ids=lambda p: p.stem)
def test_suite_files_can_be_run(path, tiny, tmp_path):
    """Those of mixers that are not there name the first of them; without them they can be run."""
    suite = load_suite(path, tiny=tiny)
    assert suite.name == path.stem
    missing = missing_mixers(suite)
    if missing:
        unknown = suite.mixers[missing[0]]["type"]
        with pytest.raises(ConfigError, match=f"no mixer '{unknown}'"):
            cells_of(suite, tmp_path)
        there = {n: options for n, options in suite.mixers.items() if n not in missing}
        suite = suite.model_copy(update={"mixers": there})
    cells = cells_of(suite, tmp_path)
    assert len(cells) == len(suite.seeds) * len(suite.tasks) * len(suite.sizes) * len(suite.mixers)
    assert len({cell.run_dir for cell in cells}) == len(cells)


def test_cells_carry_size_seed_and_vocabulary(path, tmp_path):
    cells = cells_of(load_suite(path, tiny=False), tmp_path)
    assert [cell.label for cell in cells] == [
        "mqar, d16, attention, seed 1",
        "mqar, d16, kla, seed 1",
        "mqar, d16, attention, seed 2",
        "mqar, d16, kla, seed 2",
    ]
    first, last = cells[1].config, cells[-1].config
    assert first.mixers["kla"].key_dim == 4
    assert first.model.vocab_size == 16
    assert (first.data.seed, first.training.seed) == (1, 1)
    assert (last.data.seed, last.training.seed) == (2, 2)
    assert [setting.label for setting in cells[0].settings] == [
        "length=16, pairs=1",
        "length=16, pairs=2",
        "length=32, pairs=1",
        "length=32, pairs=2",
    ]
    tiny = cells_of(load_suite(path, tiny=True), tmp_path)
    assert [cell.label for cell in tiny] == ["mqar, d16, kla, seed 1"]


def test_merging():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 4}
    assert merged(base, {"a": {"b": 2}, "d": None, "e": {"f": None}}) == {
        "a": {"b": 2, "c": [1, 2]},
        "e": {"f": None},
    }
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": {"mqar": {"synthetic": {"task": "mqr"}}}}, "tasks.mqar.synthetic.task: no task"),
        (
            {"tasks": {"mqar": {"synthetic": {"paris": 1}}}},
            "tasks.mqar.synthetic.paris: unknown key; did you mean 'pairs'?; mqar takes: pairs,",
        ),
        ({"seed": [1]}, "seed: unknown key; did you mean 'seeds'?"),
        (
            {"tasks": {"mqar": {"evaluate": {"paris": [1]}}}},
            "tasks.mqar.evaluate: mqar has no parameter 'paris'; it takes: length, pairs,",
        ),
        (
            {"tasks": {"mqar": {"evaluate": {"pairs": [8]}}}},
            "tasks.mqar.evaluate: mqar at length 16: pairs=8 need 32 tokens",
        ),
        (
            {"tasks": {"mqar": {"evaluate": {"length": ["x"]}}}},
            "length: input should be an integer",
        ),
        ({"models": {"both": ["kla", "klaa"]}}, "'klaa' is not defined under mixers"),
        ({"mixers": {"kla": {"type": "klaa"}}}, "mixers.kla.type: no mixer 'klaa'"),
        ({"run": {"training": {"stpes": 3}}}, "training.stpes: unknown key; did you mean 'steps'?"),
        ({"run": {"training": {"global_batch_tokens": 100}}}, "global_batch_tokens=100 is not a"),
    ],
)
def test_refusal_is_one_line_and_names_the_key(tmp_path, change, message):
    path = write_config(tmp_path / "small.yaml", merged(SMALL, change))
    with pytest.raises(ConfigError) as caught:
        cells_of(load_suite(path, tiny=False), tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_suite_without_a_tiny_variant(tmp_path):
    path = write_config(tmp_path / "small.yaml", SMALL | {"tiny": {}})
    with pytest.raises(ConfigError, match="has no `tiny` section"):
        load_suite(path, tiny=True)


def work(path: str, folder: str, signal_in_step: int | None) -> int:
    """What a worker process does; SIGTERM arrives in this step of every run."""
    from mixtron.launch import loop
    from mixtron.launch.synthetic.suite_run import Worker

    suite = load_suite(Path(path), tiny=False)
    plain = loop.train_step

    def signalled(run):
        if run.progress.step + 1 == signal_in_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(run)

    loop.train_step = signalled
    try:
        return Worker(suite, cells_of(suite, Path(folder))).work()
    finally:
        loop.train_step = plain


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mixtron.launch.cli", "eval", "synthetic", *arguments]


def rows_of(folder: Path) -> list[dict]:
    return json.loads((folder / "table.json").read_text())["rows"]


def kill_all(process: subprocess.Popen) -> None:
    victims = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    # The workers end by themselves: no run may go on beside the one that is started anew.
    _, alive = psutil.wait_procs(victims, timeout=60)
    assert not alive


def test_killed_stopped_and_straight_suites_have_the_same_table(path, tmp_path):
    suite, straight = load_suite(path, tiny=False), tmp_path / "straight"
    assert run_on_ranks(1, work, str(path), str(straight), None) == [0]
    cells = cells_of(suite, straight)
    write_table(suite, read_results(cells, suite), straight)

    folder = tmp_path / "killed"
    arguments = ["suite", str(path), "--dir", str(folder), "--workers", "1"]
    process = subprocess.Popen(command(*arguments), env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    first = folder / "runs" / "mqar" / "d16" / "attention" / "seed_1" / "result.json"
    deadline = time.monotonic() + 300
    while not first.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill_all(process)
    written = first.stat().st_mtime_ns
    assert run_on_ranks(1, work, str(path), str(folder), 5) == [75]
    run = subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "4 of 4 runs have results" in run.stdout
    assert first.stat().st_mtime_ns == written, "a finished run was trained again"
    assert rows_of(folder) == rows_of(straight)

    changed = write_config(tmp_path / "changed.yaml", SMALL | {"sequences": 31})
    run = subprocess.run(
        command("suite", str(changed), "--dir", str(folder)),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert "made with another configuration of this suite" in line


def test_as_many_runs_at_once_as_a_gpu_has_room_for(path, tmp_path, monkeypatch):
    cells = cells_of(load_suite(path, tiny=False), tmp_path)
    run_bytes = PROCESS_BYTES + max(sum(memory_per_rank(c.config, 1).values()) for c in cells)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert room_for(cells) == 16  # without a GPU, a run a core
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for free_bytes, runs in ((0, 1), (5.01 * run_bytes / 0.8, 5), (1e15, 16)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda n=free_bytes: (int(n), 10**15))
        assert room_for(cells) == runs


def result(model: str, seed: int, accuracies: list[float]) -> dict:
    rows = [
        {
            "setting": {"length": length, "pairs": 2},
            "accuracy": accuracy,
            "sequence_accuracy": accuracy / 2,
            "chance": 0.25,
            "sequences": 10,
            "answers": 20,
        }
        for length, accuracy in zip((16, 32), accuracies, strict=True)
    ]
    return {"task": "mqar", "size": "d16", "model": model, "seed": seed, "rows": rows}


def test_table_holds_mean_and_spread(path, tmp_path):
    results = [result("a", 1, [0.5, 0.1]), result("a", 2, [0.7, 0.3]), result("b", 1, [1.0, 0.9])]
    rows = summarise(results)
    assert [(r["model"], r["setting"], r["seeds"]) for r in rows] == [
        ("a", "length=16, pairs=2", 2),
        ("a", "length=32, pairs=2", 2),
        ("b", "length=16, pairs=2", 1),
        ("b", "length=32, pairs=2", 1),
    ]
    assert rows[0]["accuracy_mean"] == pytest.approx(0.6)
    assert rows[0]["accuracy_std"] == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert rows[2]["accuracy_std"] is None
    files = write_table(load_suite(path, tiny=False), results, tmp_path)
    assert [f.name for f in files] == ["table.json", "table.csv", "table.md", "table.png"]
    assert rows_of(tmp_path) == rows
    with open(tmp_path / "table.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(r["accuracy_mean"]) for r in read] == [r["accuracy_mean"] for r in rows]
    text = (tmp_path / "table.md").read_text()
    assert "| d16 | a | 60.0 ± 14.1 | 20.0 ± 14.1 |" in text
    assert "| d16 | b | 100.0 | 90.0 |" in text
    assert "## mqar (chance 25.0)" in text
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
