"""Tokenizers behind one interface: SentencePiece models and Hugging Face `tokenizer.json`."""

import hashlib
import json
from pathlib import Path
from typing import Protocol

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.tokenizer_training import train_tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "train_tokenizer"]


class Tokenizer(Protocol):
    """Text in documents is always text: it never becomes a special token."""

    type: str
    """`sentencepiece` or `huggingface`."""
    vocab_size: int
    """Largest id plus 1, added tokens included."""
    eod_id: int
    """Id of the end-of-document token."""
    sha256: str
    """Of the tokenizer's bytes and the end-of-document id."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One int64 array of ids for each text, without special tokens around it."""
        ...

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """The text of ids; special tokens appear by their names or not at all."""
        ...


def load_tokenizer(path: str | Path, eod_token: str | None = None) -> Tokenizer:
    """Opens a SentencePiece `.model`, a Hugging Face `tokenizer.json`, or the folder of one.

    Args:
        eod_token: the special token that ends a document. By default the model's own end of
            sentence: SentencePiece's `eos_id`, or `eos_token` in `tokenizer_config.json`.

    Raises:
        DataError: no such file, not a tokenizer, or no end-of-document token.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file")
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, eod_token)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, eod_token)
    raise DataError(
        f"{path}: a tokenizer is a SentencePiece .model or a Hugging Face tokenizer.json"
    )


class SentencePieceTokenizer:
    """A SentencePiece `.model`."""

    type = "sentencepiece"

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        content = path.read_bytes()
        try:
            self._model = SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise DataError(f"{path}: not a SentencePiece model") from None
        self.vocab_size: int = self._model.get_piece_size()
        self.eod_id = self._find_eod(path, eod_token)
        self.sha256 = _fingerprint(self.type, content, self.eod_id)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._model.encode(texts, out_type=int, num_threads=1)
        return [np.array(ids, dtype=np.int64) for ids in encoded]

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist())

    def _find_eod(self, path: Path, eod_token: str | None) -> int:
        model = self._model
        control = [model.id_to_piece(i) for i in range(self.vocab_size) if model.is_control(i)]
        if eod_token is None and model.eos_id() >= 0:
            eod_token = model.id_to_piece(model.eos_id())
        if eod_token not in control:
            asked = "has no end-of-sentence token" if eod_token is None else f"has no {eod_token!r}"
            raise DataError(
                f"{path}: the model {asked} among its control tokens ({', '.join(control)}): "
                "train it with eos_id set, or name one of these as eod_token"
            )
        return model.piece_to_id(eod_token)


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; truncation and padding are switched off."""

    type = "huggingface"

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        from tokenizers import Tokenizer as Library

        content = path.read_bytes()
        try:
            self._model = Library.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json: {error}") from None
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        added = self._model.get_added_tokens_decoder().items()
        special = {token.content: i for i, token in added if token.special}
        self._refuse_leaks(path, special)
        self.eod_id = _find_special(path, eod_token, special)
        self.sha256 = _fingerprint(self.type, content, self.eod_id)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int64) for e in encoded]

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _refuse_leaks(self, path: Path, special: dict[str, int]) -> None:
        """Some vocabularies list special tokens as plain pieces too, and so produce them."""
        unknown = getattr(self._model.model, "unk_token", None)
        control = {i for token, i in special.items() if token != unknown}
        for token, ids in zip(special, self.encode_batch(list(special)), strict=True):
            if control.intersection(ids.tolist()):
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


def _fingerprint(kind: str, content: bytes, eod_id: int) -> str:
    """Tokenizers of equal fingerprint give equal shards."""
    digest = hashlib.sha256(content).hexdigest()
    return hashlib.sha256(f"{kind} {digest} eod {eod_id}".encode()).hexdigest()
