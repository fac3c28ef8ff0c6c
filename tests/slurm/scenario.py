"""Jobs as a person submits them, with faults at chosen steps."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from typer.testing import CliRunner

from mixtron.launch.cli import app, mount_parts
from mixtron.launch.slurm import queue, run_folder
from tests.helpers.jobs import last_step, small_config, write_config
from tests.slurm.cluster import Cluster

FAULTS_FOLDER = Path(__file__).parent / "faults"
WAIT_S = 900
"""For machines that are busy with other things; a job takes seconds of one core."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
mount_parts()


@dataclass
class Scenario:
    """What a test's job is: two nodes of one rank, or one rank, of the small model."""

    ranks: int = 2
    launcher: str = "srun"
    faults: list[dict] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    config: Path | None = None
    """null: the small model of `tests.helpers.jobs`."""
    place: int = 1


SCENARIOS: dict[str, Scenario] = {}


def scenario(**values) -> Callable:
    """Gives a test a job of its own: the argument `job`."""

    def register(test: Callable) -> Callable:
        SCENARIOS[test.__name__] = Scenario(**values)
        return test

    return register


@dataclass
class Job:
    """A submitted run, or sweep."""

    run_dir: Path
    ids: list[str]
    said: str
    """By `mixtron submit`."""
    cluster: Cluster

    @property
    def launches(self) -> list[list[str]]:
        return run_folder.launches(self.run_dir)

    def wait(self, job: str = "") -> tuple[str, int]:
        """Until SLURM has ended the job; its state and the exit code of its last start."""
        deadline_s = time.monotonic() + WAIT_S
        while (entry := self.show(job))["JobState"] not in ENDED:
            assert time.monotonic() < deadline_s, self.all_logs()
            time.sleep(0.3)
        return entry["JobState"], int(entry["ExitCode"].split(":")[0])

    def wait_for_step(self, step: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while last_step(self.run_dir) < step:
            assert time.monotonic() < deadline_s, self.all_logs()
            time.sleep(0.1)

    def wait_for_output(self, text: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.output():
            assert time.monotonic() < deadline_s, self.all_logs()
            time.sleep(0.1)

    def elapsed_minutes(self) -> int:
        """Begun minutes since SLURM started the job."""
        clock = self.show()["RunTime"].rsplit("-", 1)[-1]
        hours, minutes, _ = map(int, clock.split(":"))
        return 60 * hours + minutes + 1

    def limit_minutes(self, minutes: int) -> None:
        """Changes the job's time limit, as root may."""
        self.cluster.ask("scontrol", "update", f"jobid={self.ids[0]}", f"timelimit={minutes}")

    def show(self, job: str = "") -> dict[str, str]:
        words = queue.call("scontrol", "-o", "show", "job", job or self.ids[-1]).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str = "") -> str:
        """What the batch shells of all starts said."""
        return (self.run_dir / "slurm" / f"{job or self.ids[-1]}.out").read_text()

    def logs(self, launch: int = -1) -> Path:
        return self.run_dir / "slurm" / "logs" / self.launches[launch][0]

    def all_logs(self) -> str:
        """For the message of a failed test."""
        paths = [
            *self.run_dir.glob("slurm/*.out"),
            *self.run_dir.glob("slurm/logs/*/*.log"),
            *self.run_dir.glob("slurm/logs/*/hang/verdict"),
        ]
        return "\n".join(f"--- {p}\n{p.read_text()[-2500:]}" for p in sorted(paths))


def mixtron(*arguments: str, code: int = 0) -> str:
    """What the command prints; it must end with `code`."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def submit(scenario: Scenario, corpus: Path, folder: Path, cluster: Cluster) -> Job:
    """Runs `mixtron submit`."""
    run_dir = folder / "run"
    config = scenario.config
    if config is None:
        content = small_config(corpus, run_dir)
        if scenario.ranks == 1:
            content["parallel"] = {}
        config = write_config(folder / "config.yaml", content)
    profile = {
        "gpus_per_node": 0,
        "ranks_per_node": 1,
        "launcher": scenario.launcher,
        "nodes": scenario.ranks,
        "time_limit": "00:30:00",
        "scratch_dir": str(folder / "scratch"),
        "environment": {
            "PYTHONPATH": str(FAULTS_FOLDER),
            "MIXTRON_TEST_FAULTS": json.dumps(scenario.faults),
        },
    }
    cluster_file = write_config(folder / "cluster.yaml", profile)
    said = mixtron(
        *("submit", str(config), f"run_dir={run_dir}", "--cluster", str(cluster_file)),
        *[text.format(corpus=corpus) for text in scenario.overrides],
        *scenario.options,
    )
    ids = said.split(":")[0].removeprefix("job ").split(", ")
    return Job(run_dir, ids, said, cluster)
