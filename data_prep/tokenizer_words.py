"""`tokenizers` a word at a time: words are split off here, and the ids of each are remembered.

The library splits a text into words and encodes each by itself. Both take long in it: the words of
a corpus repeat, and its own memory of them is small. GPT-2's way to split, that of nearly every
byte-level BPE trained with the library's defaults, is done here by one regular expression.
"""

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from mixtron.data_prep.characters import character_class, has_new_characters
from mixtron.data_prep.stretches import STRETCH
from mixtron.data_prep.tokenizer import HuggingFaceTokenizer
from mixtron.data_prep.tokenizer_base import CheckedTokenizer, Tokenizer

REMEMBERED_BYTES = 64 << 20
"""About what the remembered words may take; then all are forgotten."""
WORD_BYTES = 200
"""Of the dictionary, for a short word and its ids."""
WORD_END = re.compile(r"(?<=\S)[ \n\r\t]")
"""Wherever the text is cut here, no word is: no word goes on with a blank."""


def remember_words(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, made faster where it splits texts as GPT-2 does and words alone decide."""
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    library = tokenizer.library
    split = library.pre_tokenizer
    as_gpt2 = isinstance(split, ByteLevel) and split.use_regex and not split.add_prefix_space
    added = library.get_added_tokens_decoder().values()
    only_text = all(token.special for token in added) and library.encode_special_tokens
    random = getattr(library.model, "dropout", None)
    if as_gpt2 and only_text and library.normalizer is None and not random:
        return WordTokenizer(tokenizer)
    return tokenizer


class WordTokenizer(CheckedTokenizer):
    """A tokenizer whose words are encoded once; all else is the plain tokenizer's."""

    engine, advice = "the memory of words", "use --backend gigatoken, and report it"

    def __init__(self, plain: HuggingFaceTokenizer) -> None:
        super().__init__(plain)
        encode = plain.library.encode
        self._words = _Words(lambda word: encode(word, add_special_tokens=False).ids)
        self._find = _word_expression().findall

    def encode_each(self, texts: list[str]) -> list[np.ndarray]:
        return [
            self.plain.encode_each([text])[0] if has_new_characters(text) else self._encode(text)
            for text in texts
        ]

    def _encode(self, text: str) -> np.ndarray:
        ids, start = [], 0
        while start < len(text):
            end = WORD_END.search(text, start + STRETCH)
            stop = end.start() if end else len(text)
            ids.append(b"".join(map(self._words.__getitem__, self._find(text, start, stop))))
            start = stop
        return np.frombuffer(b"".join(ids), dtype=np.uint32)


class _Words(dict[str, bytes]):
    """The uint32 ids of words, asked for where they are not known."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode, self._bytes = encode, 0

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._encode(word), dtype=np.uint32).tobytes()
        self._bytes += WORD_BYTES + len(word) + len(ids)
        if self._bytes > REMEMBERED_BYTES:
            self.clear()
            self._bytes = 0
        self[word] = ids
        return ids


@cache
def _word_expression() -> re.Pattern[str]:
    r"""GPT-2's expression, by its tokenizer of 2019, in classes that `re` knows.

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

    Words of ASCII come first: their classes are small, which is twice as fast.
    """
    letter, number = character_class("L"), character_class("N")
    blank = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # White_Space
    mark = r"\0-\x08\x0e-\x1f!-&(-/:-@\[-`{-~\x7f"  # of ASCII, without the apostrophe
    ascii_next = r"(?![^\0-\x7f])"
    marks = rf"[{mark}'][{mark}']*+{ascii_next}"
    return re.compile(
        rf"[A-Za-z]++{ascii_next}"
        rf"| (?:[A-Za-z]++{ascii_next}|[0-9]++{ascii_next}|{marks})"
        rf"|[0-9]++{ascii_next}"
        rf"|'(?:[stmd]|re|ve|ll)|{marks}"
        rf"|[{blank}]+(?![^{blank}])"
        rf"| ?[{letter}]+| ?[{number}]+| ?[^{blank}{letter}{number}]+|[{blank}]+"
    )
