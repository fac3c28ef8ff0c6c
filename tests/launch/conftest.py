from pathlib import Path

import pytest

from tests.helpers.jobs import Job, make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with tok.model and shard.{bin,idx,json}."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture
def start_job():
    """Starts a `Job`; whatever becomes of the test, none is left running."""
    jobs: list[Job] = []

    def start(config: Path, run_dir: Path, overrides: list[str]) -> Job:
        jobs.append(Job(config, run_dir, overrides=overrides).start())
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
