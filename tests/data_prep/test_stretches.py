"""Long documents give the ids of the whole, whatever the stretches."""

import pytest
from sentencepiece import SentencePieceTrainer

from mixtron.data_prep import stretches as stretches_module
from mixtron.data_prep import tokenizer as tokenizer_module
from mixtron.data_prep.stretches import stretches
from mixtron.data_prep.tokenizer import SentencePieceTokenizer
from tests.data_prep.corpora import speeches
from tests.data_prep.test_tokenizer_fast import random_texts

KINDS = {
    "as trained here": {},
    "normalised": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "without a blank before the text": {"add_dummy_prefix": False},
}


def train(tmp_path, **options) -> SentencePieceTokenizer:
    defaults = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    kinds = {"model_type": "bpe", "vocab_size": 800, "byte_fallback": True, "minloglevel": 2}
    prefix = str(tmp_path / "m")
    files = [str(file) for file in speeches()[:3]]
    SentencePieceTrainer.train(input=files, model_prefix=prefix, **(defaults | kinds | options))
    return SentencePieceTokenizer(tmp_path / "m.model")


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_whole(tmp_path, monkeypatch, kind):
    tokenizer = train(tmp_path, **KINDS[kind])
    prose = speeches()[20].read_text()[:30_000]
    texts = [prose, prose.replace(" ", "  ", 500), "x" * 500, *random_texts(200, seed=11)]
    expected = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    monkeypatch.setattr(stretches_module, "STRETCH", 50)
    monkeypatch.setattr(tokenizer_module, "STRETCH", 50)
    assert tokenizer._has_local_words
    assert len(list(stretches(prose, tokenizer._ids))) > 100
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"treat_whitespace_as_suffix": True},
        {"user_defined_symbols": ["the people"]},
    ],
)
def test_what_is_not_local_is_encoded_whole(tmp_path, options):
    assert not train(tmp_path, **options)._has_local_words
