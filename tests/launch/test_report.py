"""`mixtron report`: a page that a browser draws without an error, and its figures as PNGs."""

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from mixtron.launch.config import dump_config, load_config
from mixtron.launch.report.diagnostics import cascade_figures, mixer_figures
from mixtron.launch.report.figures import progress_figures, thinned
from mixtron.launch.report.page import write_page
from mixtron.launch.report.runs import read_runs
from mixtron.megatron_ext.errors import ConfigError

REPORTED = {
    "kla_step_size/layer_1",
    "kla_decay/layer_1",
    "path_beta/layer_2",
    "forget_gate/layer_2",
    "sa_gate/layer_3",
    "swa_gate/layer_3",
    "sd_damping/layer_4",
    "lambda_all/layer_5/level_0",
}


@pytest.fixture
def run(every_mixer_run) -> Path:
    return every_mixer_run


def report(*arguments: object) -> str:
    from mixtron.launch.cli import app, mount_parts

    if not any(command.name == "ckpt" for command in app.registered_groups):
        mount_parts()
    found = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def data_of(page: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])


def test_report_shows_what_was_logged(run, tmp_path):
    report(run, "--output", tmp_path)
    data = data_of(tmp_path / "report.html")
    figures = {figure["name"]: figure for figure in data["figures"]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "train/loss" in row]
    assert logged[-1].keys() >= REPORTED
    (loss,) = figures["loss"]["lines"]
    assert loss["x"] == [1, 2, 3, 4, 5, 6]
    assert loss["y"] == [row["train/loss"] for row in logged]
    assert loss["tokens"] == [row["train/tokens"] for row in logged]
    (mark,) = figures["loss"]["marks"]
    assert (mark["x"], mark["label"]) == (4, "job: went on after step 4, had reached 6")
    (decay,) = figures["kla_decay_by_layer"]["lines"]
    assert (decay["x"], decay["y"]) == ([1], [logged[-1]["kla_decay/layer_1"]])
    (levels,) = figures["lambda_all_by_level"]["lines"]
    assert levels["y"] == [logged[-1][f"lambda_all/layer_5/level_{i}"] for i in levels["x"]]
    assert len(figures["lambda_all_over_steps_0"]["lines"]) == len(levels["x"]) == 6
    assert figures["cascade_rank"]["lines"][0]["x"] == [4, 6]
    assert {path.stem for path in tmp_path.glob("*.png")} == figures.keys()
    assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))


def long_run(run: Path, folder: Path, steps: int) -> Path:
    """A run folder with this many logged steps, one of them not finite."""
    folder.mkdir()
    config = load_config(run / "config.yaml", ["name=long", f"training.steps={steps}"])
    dump_config(config, folder / "config.yaml")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = math.nan if step == 7 else 2 + 8 / math.sqrt(step) + 0.1 * math.sin(step)
            row = {
                "step": step,
                "train/loss": loss,
                "train/lr": 1e-3,
                "train/grad_norm": 1.0,
                "train/tokens": 4096 * step,
                "train/skipped_steps": step >= 7,
                "speed/tokens_per_s": 1e5,
                "speed/tflops_per_gpu": 100.0,
                "memory/peak_gib": 40.0,
            }
            file.write(json.dumps(row) + "\n")
    return folder


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip(
            "NO BROWSER: `make browser` installs Debian's chromium; the page was not opened"
        )
    return found


def test_page_of_100k_steps_opens_in_a_browser(run, tmp_path):
    browser = chromium()
    runs = read_runs([run, long_run(run, tmp_path / "long", 100_000)])
    figures = progress_figures(runs) + mixer_figures(runs) + cascade_figures(runs, Console())
    page = tmp_path / "report.html"
    write_page(page, "two runs", runs, figures)
    assert page.stat().st_size < 2**21
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page.read_text())
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--virtual-time-budget=5000", "--dump-dom", page.as_uri()),
    ]
    environment = os.environ | {"HOME": str(tmp_path)}
    opened = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    said = [line for line in opened.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    data = data_of(page)
    plots = re.findall(r"<svg[^>]*class=\"plot\".*?</svg>", opened.stdout, re.S)
    assert len(plots) == len(data["figures"])
    for figure, plot in zip(data["figures"], plots, strict=True):
        lines = re.findall(r'class="line" d="(M[^"]+)"', plot)
        assert len(lines) == len(figure["lines"]), figure["name"]
        assert all(line != "M0 0" for line in lines), figure["name"]
    assert len(re.findall('class="mark"', plots[0])) == 1
    assert "100,000 of 100,000" in opened.stdout


def test_thinning_keeps_the_range_and_leaves_out_what_is_not_finite():
    steps = np.arange(1, 10_001)
    values = np.sin(steps / 500) + 0.1 * (steps == 5_000) * 70
    values[3] = np.inf
    values[8_000:8_100] = np.nan
    x, mean, low, high = thinned(steps, values, points=100)
    assert len(x) == len(mean) == 100
    assert np.nanmax(high) == values[4_999]
    assert np.isnan(mean[80])
    assert np.isfinite(mean[0])
    whole = np.delete(np.arange(100), [0, 80])
    expected = values.reshape(100, 100)
    np.testing.assert_allclose(mean[whole], expected.mean(1)[whole], rtol=1e-12)
    np.testing.assert_array_equal(low[whole], expected.min(1)[whole])
    np.testing.assert_allclose(x, steps.reshape(100, 100).mean(1))


def test_not_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        read_runs([tmp_path])
