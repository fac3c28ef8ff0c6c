import os
from pathlib import Path

import pytest

from mixtron.data_prep.tokenizer import train_tokenizer
from tests.data_prep.corpora import speeches

os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / "bpe.model"
    train_tokenizer(speeches()[:12], 1000, "bpe", path, progress=False)
    return path


@pytest.fixture(scope="session")
def bytelevel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytelevel") / "tokenizer"
    train_tokenizer(speeches()[:12], 1000, "bytelevel", path, progress=False)
    return path
