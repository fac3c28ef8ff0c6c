"""Tokenizers behind one interface: SentencePiece, Hugging Face `tokenizer.json`, tiktoken files."""

import json
import re
from functools import cached_property
from pathlib import Path

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.stretches import STRETCH, stretches
from mixtron.data_prep.tokenizer_base import Tokenizer, fingerprint
from mixtron.data_prep.tokenizer_training import train_tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "train_tokenizer"]

TEXTS_AT_ONCE = 32
"""For `tokenizers`, whose answer is so large that a fifth is lost with 256 or more."""


def load_tokenizer(
    path: str | Path, eod_token: str | None = None, special_text: bool = False
) -> Tokenizer:
    """Opens a SentencePiece `.model`, a Hugging Face `tokenizer.json` or its folder, or a
    `.tiktoken` file.

    Args:
        eod_token: the special token that ends a document. By default the model's own end of
            sentence: SentencePiece's `eos_id`, or `eos_token` in `tokenizer_config.json` or in
            the notes of a tiktoken file.
        special_text: the name of a special token within a document becomes that token.

    Raises:
        DataError: no such file, not a tokenizer, or no end-of-document token.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file")
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, eod_token, special_text)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, eod_token, special_text)
    if path.suffix == ".tiktoken":
        from mixtron.data_prep.tokenizer_tiktoken import TiktokenTokenizer

        return TiktokenTokenizer(path, eod_token, special_text)
    raise DataError(
        f"{path}: a tokenizer is a SentencePiece .model, a Hugging Face tokenizer.json or a "
        ".tiktoken file"
    )


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`."""

    type = "sentencepiece"

    def __init__(
        self, path: Path, eod_token: str | None = None, special_text: bool = False
    ) -> None:
        from sentencepiece import SentencePieceProcessor

        content = path.read_bytes()
        try:
            self._model = model = SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise DataError(f"{path}: not a SentencePiece model") from None
        if special_text:
            raise DataError(f"{path}: SentencePiece never makes control tokens from text")
        self.vocab_size = model.get_piece_size()
        control = [i for i in range(self.vocab_size) if model.is_control(i)]
        self.special = {model.id_to_piece(i): i for i in control}
        self.eod_id = self._find_eod(path, eod_token)
        self.sha256 = fingerprint(self.type, content, self.eod_id)

    def encode_each(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist())

    def _encode(self, text: str) -> np.ndarray:
        if len(text) <= STRETCH or not self._has_local_words:
            return np.array(self._ids(text), dtype=np.uint32)
        parts = stretches(text, self._ids)
        return np.concatenate([np.array(self._ids(part), dtype=np.uint32) for part in parts])

    def _ids(self, text: str) -> list[int]:
        return self._model.encode(text, out_type=int, num_threads=1)

    @cached_property
    def _has_local_words(self) -> bool:
        """Whether it merges by rank (scores are whole numbers) and never over a blank.

        The scores of a unigram model are added up over the text, and rounded on the way.
        """
        ids = range(self.vocab_size)
        merges = all(self._model.get_score(i).is_integer() for i in ids)
        return merges and not any(re.search("[^▁ ][▁ ]", self._model.id_to_piece(i)) for i in ids)

    def _find_eod(self, path: Path, eod_token: str | None) -> int:
        model = self._model
        if eod_token is None and model.eos_id() >= 0:
            eod_token = model.id_to_piece(model.eos_id())
        if eod_token not in self.special:
            asked = "has no end-of-sentence token" if eod_token is None else f"has no {eod_token!r}"
            raise DataError(
                f"{path}: the model {asked} among its control tokens ({', '.join(self.special)}): "
                "train it with eos_id set, or name one of these as eod_token"
            )
        return self.special[eod_token]


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library; truncation and padding are switched off."""

    type = "huggingface"

    def __init__(
        self, path: Path, eod_token: str | None = None, special_text: bool = False
    ) -> None:
        from tokenizers import Tokenizer as Library

        content = path.read_bytes()
        try:
            self.library = Library.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json: {error}") from None
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = not special_text
        self.vocab_size = max(self.library.get_vocab(with_added_tokens=True).values()) + 1
        added = self.library.get_added_tokens_decoder().items()
        self.special = {token.content: i for i, token in added if token.special}
        if not special_text:
            self._refuse_leaks(path)
        self.eod_id = _find_special(path, eod_token, self.special)
        self.sha256 = fingerprint(self.type, content, self.eod_id)

    def encode_each(self, texts: list[str]) -> list[np.ndarray]:
        encoded = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            some = self.library.encode_batch_fast(
                texts[first : first + TEXTS_AT_ONCE], add_special_tokens=False
            )
            encoded += [np.array(one.ids, dtype=np.uint32) for one in some]
        return encoded

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self.library.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _refuse_leaks(self, path: Path) -> None:
        """Some vocabularies list special tokens as plain pieces too, and so produce them."""
        unknown = getattr(self.library.model, "unk_token", None)
        control = {i for token, i in self.special.items() if token != unknown}
        for token in self.special:  # one by one: a batch would start the library's threads
            if control.intersection(self.library.encode(token, add_special_tokens=False).ids):
                raise DataError(
                    f"{path}: the text {token!r} in a document would become that special token, "
                    "because the vocabulary also has it as a plain piece; use the SentencePiece "
                    ".model of this tokenizer, or a byte-level one"
                )


def _find_special(path: Path, eod_token: str | None, special: dict[str, int]) -> int:
    config = path.with_name("tokenizer_config.json")
    if eod_token is None and config.is_file():
        try:
            named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except ValueError as error:
            raise DataError(f"{config}: not JSON: {error}") from None
        eod_token = named.get("content") if isinstance(named, dict) else named
    if eod_token not in special:
        candidates = ", ".join(sorted(special)) or "none"
        asked = (
            f"no eod_token was given and {config} names no eos_token"
            if eod_token is None
            else f"{eod_token!r} is not a special token"
        )
        raise DataError(f"{path}: {asked}; special tokens that could end a document: {candidates}")
    return special[eod_token]
