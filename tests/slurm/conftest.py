"""One SLURM for the session; all tests' jobs are submitted at once and run side by side."""

from pathlib import Path

import pytest

from tests.helpers.jobs import make_corpus
from tests.slurm import cluster as slurm
from tests.slurm.scenario import SCENARIOS, Job, submit

_why_not = slurm.missing()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if _why_not:
        pytest.fail(f"no SLURM: {_why_not}; `make slurm` installs it")
    running = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with tok.model and shard.{bin,idx,json}."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def jobs(cluster, corpus, tmp_path_factory, request) -> dict[str, Job]:
    """The jobs of all tests of this session that have one, by the test's name."""
    names = {getattr(item, "originalname", item.name) for item in request.session.items}
    # Long ones first.
    chosen = sorted(names & SCENARIOS.keys(), key=lambda name: (SCENARIOS[name].place, name))
    return {
        name: submit(SCENARIOS[name], corpus, tmp_path_factory.mktemp(name[:40]), cluster)
        for name in chosen
    }


@pytest.fixture
def job(jobs, request) -> Job:
    """The job of this test."""
    return jobs[request.node.originalname]
