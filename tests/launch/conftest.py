from pathlib import Path

import pytest

from tests.helpers.jobs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with tok.model and shard.{bin,idx,json}."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder
