"""The script for one GPU, with commands that need none."""

import sys

import pytest
import typer

from mixtron.launch.bench.cli import app
from mixtron.launch.config import load_config
from tests import one_gpu

ROOT = one_gpu.Path(__file__).parent.parent


def started(monkeypatch, tmp_path, commands, parts) -> tuple[int, str]:
    monkeypatch.setattr(one_gpu, "commands", lambda arguments: commands)
    monkeypatch.setattr(sys, "argv", ["one_gpu", "--out", str(tmp_path), "--parts", parts])
    return one_gpu.main(), (tmp_path / "report.txt").read_text()


def test_what_commands_print_and_how_they_end_is_reported(monkeypatch, tmp_path):
    commands = {"a": [["-c", "print(6 * 7)"]], "b": [["-c", "exit(3)"]], "c": [["-c", "print(8)"]]}
    code, report = started(monkeypatch, tmp_path, commands, "a,b")
    assert code == 1
    assert "\n42\n" in report
    assert "| b | exit(3) | 3 |" in report
    assert "\n8\n" not in report


def test_a_command_that_outlasts_its_part_is_killed(monkeypatch, tmp_path):
    hangs = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    commands = {"a": [["-c", hangs]], "b": [["-c", "print('next')"]]}
    code, report = started(monkeypatch, tmp_path, commands, "a:1,b")
    assert code == 1
    assert "begun" in report
    assert "killed after 1 s" in report
    assert "next" in report


def test_every_command_is_one_that_exists(monkeypatch):
    """Its options are parsed, and its config with its overrides is read."""
    monkeypatch.chdir(ROOT)
    arguments = one_gpu.argparse.Namespace(at_once=1, corpus="c", tokenizer="t")
    commands: dict = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = [c[3:] for part in one_gpu.commands(arguments).values() for c in part if "bench" in c]
    for name, *options in found:
        given = commands[name].make_context(name, options).params
        for path in given.get("runs") or [given.get("config")]:
            if path is not None:
                load_config(path, [*(given.get("overrides") or []), *(given.get("change") or [])])
    assert {name for name, *_ in found} == set(commands) - {"data", "curves"}


def test_every_file_of_gpu_tests_is_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = one_gpu.argparse.Namespace(at_once=1, corpus="c", tokenizer="t")
    [command] = one_gpu.commands(arguments)["tests"]
    marked = {p for p in ROOT.glob("tests/*/test_*.py") if "mark.gpu" in p.read_text()}
    assert marked
    assert {ROOT / name for name in command if name.endswith(".py")} == marked


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("steps,walk", "no part walk"),
        ("overhead", "overhead needs --corpus and --tokenizer"),
        ("ops:soon", "could not convert string to float: 'soon'"),
    ],
)
def test_what_cannot_be_run_is_refused(parts, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["one_gpu", "--out", str(tmp_path), "--parts", parts])
    with pytest.raises(SystemExit) as error:
        one_gpu.main()
    assert error.value.code == 2
    assert said in capsys.readouterr().err
