"""Words that are remembered: the ids are those of the library alone."""

import shutil
import unicodedata

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from mixtron.data_prep import tokenizer_words
from mixtron.data_prep.characters import PLANES, has_new_characters
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.tokenizer_words import WordTokenizer, remember_words
from tests.data_prep.corpora import speeches
from tests.data_prep.test_tokenizer_fast import random_texts


@pytest.fixture
def words(bytelevel_folder) -> WordTokenizer:
    tokenizer = remember_words(load_tokenizer(bytelevel_folder))
    assert isinstance(tokenizer, WordTokenizer)
    return tokenizer


def assert_same_ids(words: WordTokenizer, texts: list[str]) -> None:
    got, expected = words.encode_batch(texts), words.plain.encode_batch(texts)
    wrong = [t for t, a, b in zip(texts, got, expected, strict=True) if a.tolist() != b.tolist()]
    assert not wrong, f"{len(wrong)} differ, first {wrong[0]!r}"


def test_random_unicode_and_prose_give_the_same_ids(words):
    texts = random_texts(3000, seed=9) + [file.read_text() for file in speeches()[20:22]]
    texts += [
        "",
        "'s",
        " 's't''s'",
        "we'll I'M 'll'",
        "a  b\n\n c \t",
        "<|endoftext|>",
        "x<|endoftext|>",
    ]
    assert_same_ids(words, texts)


def test_words_end_at_the_same_characters():
    """Every character at which a category begins or ends, among letters, digits, marks, blanks."""
    kinds = [unicodedata.category(chr(c)) for c in range(PLANES)]
    edges = {c for c in range(1, PLANES) if kinds[c] != kinds[c - 1]}
    codes = sorted(c for c in edges | {c - 1 for c in edges} if not 0xD800 <= c < 0xE000)
    text = "".join(f"a{chr(c)}1{chr(c)} {chr(c)}.{chr(c)}\n" for c in codes if kinds[c] != "Cn")
    assert not has_new_characters(text)
    library = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = [text[a:b] for _, (a, b) in library.pre_tokenize_str(text)]
    assert tokenizer_words._word_expression().findall(text) == expected


def test_a_long_document_is_split_where_no_word_is(words, monkeypatch):
    monkeypatch.setattr(tokenizer_words, "STRETCH", 3)
    assert_same_ids(words, [*random_texts(500, seed=10), speeches()[3].read_text()[:20_000]])


def test_what_is_remembered_is_bounded(words, monkeypatch):
    monkeypatch.setattr(tokenizer_words, "REMEMBERED_BYTES", 2_000)
    assert_same_ids(words, [speeches()[3].read_text()[:20_000]])
    assert len(words._words) < 10


def change(folder, target, edit) -> object:
    shutil.copytree(folder, target)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    edit(library)
    library.save(str(target / "tokenizer.json"))
    return remember_words(load_tokenizer(target))


@pytest.mark.parametrize(
    "edit",
    [
        lambda library: setattr(library, "normalizer", normalizers.NFC()),
        lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.ByteLevel(True)),
        lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda library: library.add_tokens([AddedToken("the people", special=False)]),
        lambda library: setattr(library.model, "dropout", 0.1),
    ],
)
def test_other_tokenizers_stay_as_they_are(tmp_path, bytelevel_folder, edit):
    assert not isinstance(change(bytelevel_folder, tmp_path / "t", edit), WordTokenizer)


def test_special_text_and_sentencepiece_stay_as_they_are(bytelevel_folder, sentencepiece_model):
    for tokenizer in (
        load_tokenizer(bytelevel_folder, special_text=True),
        load_tokenizer(sentencepiece_model),
    ):
        assert remember_words(tokenizer) is tokenizer


def test_ids_are_those_of_the_type_that_is_joined(words):
    assert {ids.dtype for ids in words.encode_each(["a", "b c"])} == {np.dtype(np.uint32)}
