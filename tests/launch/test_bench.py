"""`mixtron bench` on a CPU: what it prints, and what it refuses."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from typer.testing import CliRunner

from mixtron.launch.bench.account import MIXER_KINDS, account, products_and_mixers
from mixtron.launch.bench.curves import Curve, bench_curves, parse_forms, report
from mixtron.launch.bench.lengths import bench_lengths
from mixtron.launch.bench.ops import benches, run_benches
from mixtron.launch.bench.overhead import report as shares_of
from mixtron.launch.bench.overhead import spread
from mixtron.launch.bench.profile import idle_before, kind_of, own_kernels
from mixtron.launch.config import load_config
from mixtron.launch.estimate import training_flops_per_token
from mixtron.launch.metrics_files import whole_rows
from mixtron.megatron_ext.errors import ConfigError
from tests.helpers.jobs import ENVIRONMENT, small_config, write_config
from tests.helpers.ranks import run_on_ranks

ROOT = Path(__file__).parents[2]


def step_report(path: str, options: dict) -> tuple[str, list[float]]:
    """What `bench step` prints, and the losses of its model's steps."""
    import contextlib
    import io

    from mixtron.launch.bench import step

    losses, plain = [], step.train_step

    def train_step(run):
        values = plain(run)
        losses.append(values["train/loss"])
        return values

    step.train_step, printed = train_step, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            step.bench_step(load_config(path), step.Options(**options))
    finally:
        step.train_step = plain
    return printed.getvalue(), losses


def test_step_reports_tokens_of_the_steps_it_took():
    options = {"steps": 2, "warm_up": 1, "micro_batches": 2, "documents": 3, "profiled_steps": 1}
    config = ROOT / "configs/debug_kla.yaml"
    [(printed, losses)] = run_on_ranks(1, step_report, str(config), options)
    assert len(losses) == 4
    loaded = load_config(config)
    tokens = 2 * loaded.training.micro_batch_sequences * loaded.data.sequence_length
    row = next(line for line in printed.splitlines() if "debug_kla" in line)
    _, _, _, found, ms, speed, *_ = (cell.strip().replace(",", "") for cell in row.split("|"))
    assert int(found) == tokens
    assert float(speed) == pytest.approx(1000 * tokens / float(ms), rel=0.01)
    shares = [float(x) for x in re.findall(r"\| ([\d.]+)% \|", printed)]
    assert shares[-1] == 100.0
    assert shares[:-1] == sorted(shares[:-1], reverse=True)


def test_data_reports_a_speed(corpus, tmp_path):
    path = write_config(tmp_path / "config.yaml", small_config(corpus, tmp_path / "run"))
    [printed] = run_on_ranks(1, data_report, str(path))
    assert re.search(r"\| together \| [\d,]+ \| [\d.]+% \|", printed)


def data_report(path: str) -> str:
    import contextlib
    import io

    from mixtron.launch.bench.data import bench_data

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench_data(load_config(path), 2, 1e6)
    return printed.getvalue()


def test_curves_compare_forms_on_the_same_data(corpus, tmp_path):
    """The same form again has the same losses; another micro-batch rounds differently."""
    small = small_config(corpus, tmp_path / "run")
    small |= {"parallel": {}, "mixers": {"kla": small["mixers"]["kla"]}}
    small["model"] |= {"dropout": 0.0, "layers": 1, "pattern": ["kla"]}
    path, plot = write_config(tmp_path / "config.yaml", small), tmp_path / "made" / "curves.png"
    forms = parse_forms(["a", "other optimizer.lr=2e-2"], "training.micro_batch_sequences=2")
    options = {"plot": plot, "steps": 3, "limit_s": 0, "at_once": 2}
    assert bench_curves(path, [], forms, **options) == 0
    written = json.loads(plot.with_suffix(".json").read_text())
    losses = {name: [row["loss"] for row in form["rows"]] for name, form in written.items()}
    assert list(losses) == ["a", "noise", "other"]
    assert [row["step"] for row in written["a"]["rows"]] == [1, 2, 3]
    assert losses["noise"] == pytest.approx(losses["a"], rel=1e-4)
    assert losses["other"][0] == losses["a"][0]
    assert losses["other"][2] != pytest.approx(losses["a"][2], rel=1e-4)
    assert plot.stat().st_size > 10_000


def test_a_bench_ends_by_sigterm(corpus, tmp_path):
    """With the process that it started, in the middle of its steps."""
    small = small_config(corpus, tmp_path / "run") | {"parallel": {}}
    path, plot = write_config(tmp_path / "config.yaml", small), tmp_path / "curves.png"
    arguments = ["bench", "curves", str(path), "--form", "a", "--form", "b", "--plot", str(plot)]
    command = [sys.executable, "-m", "mixtron.launch.cli", *arguments, "--steps", "1000000"]
    with subprocess.Popen(command, env=ENVIRONMENT) as process:
        deadline = time.monotonic() + 120
        while not list(whole_rows(tmp_path / "curves.a.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        trained_by = psutil.Process(process.pid).children()
        try:
            process.terminate()
            assert process.wait(10) == -signal.SIGTERM
            assert psutil.wait_procs(trained_by, timeout=10) == (trained_by, [])
        finally:
            for left in (process, *trained_by):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def test_curves_refuse_forms_that_cannot_be_told_apart():
    with pytest.raises(ConfigError, match="--form: a, a; at least two"):
        parse_forms(["a", "a optimizer.lr=1"], None)
    with pytest.raises(ConfigError, match="--form: a; at least two"):
        parse_forms(["a"], None)


def test_curves_report_distance_in_units_of_the_noise():
    def curve(name: str, offset: float) -> Curve:
        rows = [
            {"step": i, "seconds": i / 10, "loss": 3 + offset, "grad_norm": i, "skipped_steps": 0}
            for i in (1, 2)
        ]
        return Curve(name, 0, rows)

    printed = report([curve("a", 0.0), curve("noise", 0.01), curve("b", -0.03)])
    cells = [cell.strip() for cell in printed.splitlines()[-1].split("|")][1:-1]
    assert cells == ["b", "2", "2.9700", "0.03", "0.03", "0.03", "3.00", "1.5", "2", "0", "100"]


SLOWER_S = {"data": 0.15, "logging": 0.3, "saving": 0.6}
"""What a sample, a logged step and a save are made to take longer."""


def overhead_report(path: str, slower_s: dict[str, float]) -> str:
    import io

    from mixtron.launch.bench.overhead import bench_overhead
    from mixtron.launch.data import TrainingData
    from mixtron.launch.metrics import Metrics
    from mixtron.launch.saver import Saver

    def slowed(plain, seconds):
        def slow(*arguments, **options):
            time.sleep(seconds)
            return plain(*arguments, **options)

        return slow

    printed = io.StringIO()
    with contextlib.ExitStack() as changes:
        for owner, name, part in (
            (TrainingData, "read", "data"),
            (Metrics, "log", "logging"),
            (Saver, "save", "saving"),
        ):
            slow = slowed(getattr(owner, name), slower_s[part])
            changes.enter_context(mock.patch.object(owner, name, slow))
        changes.enter_context(contextlib.redirect_stdout(printed))
        bench_overhead(load_config(path), steps=2, rounds=2, micro_batches=2)
    return printed.getvalue()


def test_overhead_tells_what_each_part_costs(corpus, tmp_path):
    small = small_config(corpus, tmp_path / "run") | {"parallel": {}}
    path = write_config(tmp_path / "config.yaml", small)
    [printed] = run_on_ranks(1, overhead_report, str(path), SLOWER_S)
    rows = re.findall(r"^\| (\w+) \| (-?[\d.,]+)? *\|.*\| (-?[\d.]+)% \|$", printed, re.MULTILINE)
    assert [name for name, *_ in rows] == ["data", "logging", "saving", "together"]
    shares = [float(share) for *_, share in rows]
    assert shares[-1] == pytest.approx(sum(shares[:-1]), abs=0.02)
    found_s = {name: float(ms) / 1000 for name, ms, _ in rows[:-1]}
    a_step_s = SLOWER_S | {"data": 2 * SLOWER_S["data"]}  # of two samples
    # The rest is what a part really takes, and what a busy machine adds.
    for part, slower in a_step_s.items():
        assert 0.8 * slower < found_s[part] < 1.5 * slower + 0.2, printed


def test_overhead_is_spread_over_the_configs_own_steps():
    """0.1 s for each of 4 timed steps of 2 s; the config's own step is twice as long."""
    config = load_config(ROOT / "configs/debug_kla.yaml", ["logging.every_steps=5"])
    cost_s = {"data": 0.4, "logging": 0.4, "saving": 8.0}
    own = 2 * config.training.global_batch_tokens
    lines = shares_of(config, cost_s, steps=4, step_s=2.0, own=own).splitlines()
    shares = [line.split("|")[-2].strip() for line in lines[-4:]]
    assert shares == ["5.00%", "0.50%", "10.00%", "15.50%"]


def test_overhead_says_how_far_rounds_lie_apart():
    said = spread({"data": [0.3, -0.1, 0.2], "saving": [1.0]}, steps_s=10.0)
    assert said.endswith(": data -1.00% to 3.00%, saving 10.00% to 10.00%")


def test_lengths_need_a_gpu():
    with pytest.raises(ConfigError, match="needs a GPU"):
        bench_lengths([str(ROOT / "configs/debug_kla.yaml")], [], [64], 64, 1)


def test_ops_refuses_what_it_has_not():
    assert {"norms", "short_convolution", "linear_cross_entropy"} <= set(benches())
    with pytest.raises(ConfigError, match=r"no bench for op 'nothing'; ops: .*norms"):
        run_benches(["nothing"])


def test_commands_are_listed():
    from mixtron.launch.bench.cli import app

    listed = CliRunner().invoke(app, ["--help"]).output
    assert all(name in listed for name in ("step", "ops", "data"))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopB_TNT", "matrix product"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copy or cast"),
        ("ncclDevKernel_AllReduce_Sum_f32", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise of torch"),
        ("scan_kernel", "other"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert kind_of(kernel) == kind


def test_kernels_are_told_by_their_op():
    import mixtron.kernels.delta_rule.triton_forward
    import mixtron.kernels.gated_linear_attention.triton_forward
    import mixtron.kernels.norms.triton_kernels  # noqa: F401

    own = own_kernels()
    assert own["scan_kernel"] == "own: delta_rule"
    assert own["gla_scan_kernel"] == "own: gated_linear_attention"
    assert own["norm_forward_kernel"] == "own: norms"
    ops = {path.name for path in (ROOT / "kernels").iterdir() if path.is_dir()}
    assert {kind.removeprefix("own: ") for kind in MIXER_KINDS} - {"attention"} <= ops


@pytest.mark.parametrize("name", ["kla_400m", "path_400m", "sa_swa_400m"])
def test_what_a_step_loses_adds_up_to_100_percent_less_the_mfu(name):
    config, peak, step_ms = load_config(ROOT / f"configs/{name}.yaml"), 989e12, 3000.0
    kinds_ms = {"matrix product": 1600.0, "own: delta_rule": 480.0, "copy or cast": 100.0}
    printed = account(config, kinds_ms, step_ms, 1, peak)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows[:3]] == ["matrix products", "no kernel runs", *rows[2][:1]]
    lost = [float(row[4].rstrip("%")) for row in rows]
    tokens = config.training.global_batch_tokens
    mfu = training_flops_per_token(config) * tokens / (step_ms / 1000) / peak
    assert lost[-1] == pytest.approx(100 * (1 - mfu), abs=0.1)
    assert sum(lost[:-1]) == pytest.approx(lost[-1], abs=0.3)
    products, mixers = products_and_mixers(config)
    assert 0 < mixers < products


def test_idle_time_is_told_by_the_kernel_that_was_waited_for():
    ran = [(10.0, 12.0, "a"), (15.0, 20.0, "b"), (16.0, 18.0, "c"), (21.0, 22.0, "b")]
    assert idle_before(ran) == [("b", 4.0, 2)]
