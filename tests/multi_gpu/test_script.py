"""What the script makes of its parts' outcomes."""

import sys

import pytest

from tests.multi_gpu import __main__ as script
from tests.multi_gpu.cases import Outcome, add
from tests.multi_gpu.tables import report


def run(monkeypatch, out, ranks) -> int:
    monkeypatch.setattr(script, "start_ranks", lambda options: [])
    monkeypatch.setattr(script, "all_end_well", lambda started, options: ranks(options) == 0)
    monkeypatch.setattr(script.os, "environ", {})
    arguments = ["multi_gpu", "--out", str(out), "--parts", "alone:60", "--gpus", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    return script.main()


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_exit_code_tells_whether_all_cases_passed(passed, code, tmp_path, monkeypatch, capsys):
    def ranks(options):
        add(options.results, Outcome("parity", "kla: tp2", passed, 1.0, "why", [{"a": 1}]))
        return 0

    assert run(monkeypatch, tmp_path, ranks) == code
    said = capsys.readouterr().out
    assert f"{int(passed)} of 1 cases passed" in said
    assert ("why" in said) != passed


def test_ranks_that_die_are_started_again_for_the_other_cases(tmp_path, monkeypatch, capsys):
    started = []

    def ranks(options):
        started.append(options.parts)
        if len(started) == 1:
            options.under_way.write_text('["alone", "first"]')
            return 1
        add(options.results, Outcome("alone", "second", True, 1.0))
        return 0

    assert run(monkeypatch, tmp_path, ranks) == 1
    assert started == [("alone",), ("alone",)]
    assert "1 of 2 cases passed" in capsys.readouterr().out


def test_ranks_that_never_start_are_a_failure(tmp_path, monkeypatch, capsys):
    started = []
    assert run(monkeypatch, tmp_path, lambda options: started.append(options) or 1) == 1
    assert len(started) == 1
    assert "FAILED" in capsys.readouterr().out


def test_tables_hold_speed_and_traffic():
    alone = {
        "model": "kla",
        "layout": "one GPU",
        "ranks": 1,
        "step s": 0.5,
        "tokens/s": 100.0,
        "MFU": 0.4,
        "peak GiB": 3.0,
    }
    pair = alone | {
        "layout": "dp2",
        "ranks": 2,
        "tokens/s": 190.0,
        "computing s": 0.4,
        "NCCL s": {"data": 0.01},
        "exposed s": {"data": 0.002},
        "kernels s": {"gemm": 0.3, "norm": 0.1},
        "predicted bytes": {"data": 2.0**21},
        "counted bytes": {"data": 2.0**20, "other": 2.0**20},
    }
    outcomes = [
        Outcome("alone", "x", True, 1.0, "", [alone, alone | {"model": "path"}]),
        Outcome("scaling", "x", True, 1.0, "", [pair, pair]),
    ]
    said = report(outcomes)
    assert "| kla | dp2 | 2 | 500 | 190 | 95.0% | 40.0% | 3 | 400 | data 10.0 | data 2.0 |" in said
    assert "| kla | dp2 | data | 2 | 1 |  |  |" in said
    assert "| kla | dp2 | other | 0 | 1 |  |  |" in said
    assert "| path | one GPU | 1 |" in said
    assert said.count("| kla | dp2 | 2 |") == 1
    assert "kla, dp2, kernels in ms: 300.0 gemm; 100.0 norm" in said
