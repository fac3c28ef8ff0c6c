"""`mixtron submit` and what it refuses, without SLURM."""

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mixtron.data_prep.build import plan_to
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.plan import Recipe
from mixtron.launch.config import load_config
from mixtron.launch.slurm import queue
from mixtron.launch.slurm.config import SlurmConfig, load_profile
from mixtron.launch.slurm.submit import plan, sweep_points
from mixtron.megatron_ext.errors import ConfigError
from tests.data_prep.corpora import speeches
from tests.helpers.jobs import small_config, write_config
from tests.slurm.scenario import mixtron

PROFILES = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml"))


@pytest.fixture
def config(corpus, tmp_path) -> Path:
    content = small_config(corpus, tmp_path / "run")
    content["slurm"] = {"nodes": 2, "gpus_per_node": 2, "time_limit": "01:00:00"}
    return write_config(tmp_path / "config.yaml", content)


def refused(config: Path, *overrides: str, **options) -> str:
    with pytest.raises((ConfigError, DataError)) as error:
        plan(config, list(overrides), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slurm.tasks_per_node=8", "launcher=torchrun needs one task a node"),
        ("slurm.gpus_per_node=0", "gpus_per_node=0 needs ranks_per_node"),
        ("slurm.port_range=[3000,2000]", "the first is above the last"),
        ("slurm.nodes=3", "not a multiple of 3 data-parallel ranks"),
        ("slurm={nodes: 1, gpus_per_node: 1}", "1 ranks cannot hold parallel.tensor=2"),
        ("slurm.time_limit=tomorrow", "slurm.time_limit"),
        ("slurm.time_limit=00:05:00", "slurm.signal_lead_s=300 is not below"),
        ("slurm.environment={A B: x}", "slurm.environment"),
        ('slurm.partition="a\\nb"', "slurm.partition"),
        ("slurm.container={type: docker, image: x}", "slurm.container.type"),
        ("slurm.lancher=srun", "did you mean 'launcher'"),
        ("data.tokenizer=nowhere.model", "nowhere.model"),
        ("data.train.0.path=nowhere", "nowhere"),
    ],
)
def test_refusals(config, override, message):
    assert message in refused(config, override)


def test_a_config_without_slurm_needs_a_cluster(corpus, tmp_path):
    config = write_config(tmp_path / "c.yaml", small_config(corpus, tmp_path / "run"))
    assert "choose a --cluster profile" in refused(config)
    assert plan(config, [], cluster="h100", nodes=1).slurm.gpu_type == "h100"


def test_an_unknown_cluster_names_those_there_are(config):
    assert "a100, cpu, h100" in refused(config, cluster="h1000")


def test_a_bad_profile_names_its_file_and_key(config, tmp_path):
    profile = write_config(tmp_path / "mine.yaml", {"partitoin": "gpu"})
    message = refused(config, cluster=str(profile))
    assert "mine.yaml" in message
    assert "partitoin" in message


def test_a_run_replaces_its_profile_key_by_key(config, tmp_path):
    profile = write_config(
        tmp_path / "mine.yaml",
        {"partition": "gpu", "gpus_per_node": 8, "environment": {"A": "1", "B": "1"}},
    )
    overrides = ["slurm.environment.B=2", "slurm.account=me"]
    slurm = plan(config, ['slurm.environment={B: "1"}', "slurm.account=me"], cluster=str(profile))
    assert slurm.slurm.environment["B"] == "1"
    content = YAML(typ="safe").load(config)
    content["slurm"]["environment"] = {"B": "2"}
    write_config(config, content)
    merged = plan(config, overrides[1:], cluster=str(profile)).slurm
    assert merged.environment == {"A": "1", "B": "2"}
    assert (merged.partition, merged.account, merged.gpus_per_node) == ("gpu", "me", 2)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_that_are_shipped(path):
    text = path.read_text()
    assert text.startswith("#")
    slurm = SlurmConfig.model_validate(load_profile(path.stem))
    for variable in slurm.environment:
        assert text.index("#") < text.index(variable)


def test_the_resolved_config_loads_without_its_profile(config, tmp_path):
    from mixtron.launch.config import dump_config

    submission = plan(config, [], cluster="a100", nodes=2)
    dump_config(submission.runs[0], tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == submission.runs[0]


def test_the_time_limit_of_the_partition(config, monkeypatch):
    monkeypatch.setattr(queue, "call", lambda *command: "gpu*|1-00:00:00\n")
    assert "above the limit of partition (default), 1-00:00:00" in refused(
        config, "slurm.time_limit=1-00:00:01"
    )
    plan(config, ["slurm.time_limit=24:00:00"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2-03:00:00", 183600),
        ("1-0", 86400),
        ("03:00:10", 10810),
        ("30:00", 1800),
        ("30", 1800),
        ("infinite", float("inf")),
        ("", float("inf")),
    ],
)
def test_time_limits(text, seconds):
    assert queue.seconds_of(text) == seconds


def test_sweeps():
    assert sweep_points([]) == [[]]
    assert sweep_points(["a=1,2", "b=[x,y],z"]) == [
        ["a=1", "b=[x,y]"],
        ["a=1", "b=z"],
        ["a=2", "b=[x,y]"],
        ["a=2", "b=z"],
    ]
    for wrong in ("a", "a=", "=1", "a=1,,2", "a=1,1", "slurm.nodes=1,2", "run_dir=a,b"):
        with pytest.raises(ConfigError, match="--sweep"):
            sweep_points([wrong])


def test_every_run_of_a_sweep_is_checked(config):
    assert "optimizer.lr" in refused(config, sweeps=["optimizer.lr=1e-3,-1"])


def test_dry_run_prints_the_script_and_writes_nothing(config, tmp_path):
    text = mixtron("submit", str(config), "--nodes", "1", "--dry-run")
    assert text.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=1\n" in text
    assert not (tmp_path / "run").exists()


def test_an_empty_queue(monkeypatch):
    monkeypatch.setattr(queue, "queued_jobs", list)
    assert "no run of yours waits or runs" in mixtron("status")


def test_without_slurm_it_says_so(config, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(queue.SlurmError, match="squeue is not on this machine"):
        mixtron("submit", str(config))


@pytest.mark.parametrize("command", ["submit", "status", "logs", "cancel", "prep submit"])
def test_no_torch_on_the_login_node(command, config, corpus, tmp_path):
    """A second is what a person waits for gladly; busy machines are judged by the CPU's time."""
    arguments = {
        "submit": ["submit", str(config), "--dry-run"],
        "status": ["status", str(tmp_path)],
        "logs": ["logs", str(tmp_path)],
        "cancel": ["cancel", str(tmp_path)],
        "prep submit": ["prep", "submit", str(tmp_path / "planned"), "--dry-run"],
    }[command]
    if command == "prep submit":
        recipe = Recipe(tokenizer=str(corpus / "tok.model"))
        plan_to(tmp_path / "planned", speeches()[:3], recipe)
    program = f"""
import resource, sys
from mixtron.launch.cli import main
sys.argv = ["mixtron", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules and "megatron" not in sys.modules
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, file=sys.stderr)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("#!/bin/bash") == (arguments[-1] == "--dry-run"), answer.stderr
    # Twice what it takes alone: neighbours take from a core even in user time.
    assert float(answer.stderr.split()[-1]) < 2
