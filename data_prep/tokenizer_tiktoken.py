"""tiktoken files: ranks of byte strings; how text is split before them is noted beside the file."""

import base64
import binascii
import json
from pathlib import Path

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.tokenizer_base import Tokenizer, fingerprint


class TiktokenTokenizer(Tokenizer):
    """A `.tiktoken` file with its notes, the same name in `.json`.

    The notes give `pattern` (the regular expression that splits text), `special_tokens` (names to
    ids) and optionally `eos_token`.
    """

    type = "tiktoken"

    def __init__(
        self, path: Path, eod_token: str | None = None, special_text: bool = False
    ) -> None:
        try:
            import tiktoken
        except ImportError:
            raise DataError(
                f"{path}: needs tiktoken: pip install 'mixtron[fast]', or convert it to a "
                "tokenizer.json"
            ) from None
        content = path.read_bytes()
        notes, notes_content = _read_notes(path.with_suffix(".json"), path)
        ranks = _read_ranks(path, content)
        self.special = dict(notes["special_tokens"])
        ids = [*ranks.values(), *self.special.values()]
        if len(set(ids)) < len(ids):
            raise DataError(f"{path}: an id occurs twice, in the file or among special_tokens")
        self._model = tiktoken.Encoding(
            path.stem,
            pat_str=notes["pattern"],
            mergeable_ranks=ranks,
            special_tokens=self.special,
        )
        self._allowed = set(self.special) if special_text else set()
        self.vocab_size = max(ids) + 1
        eod_token = eod_token or notes.get("eos_token")
        if eod_token not in self.special:
            asked = "no eos_token in its notes" if eod_token is None else f"no {eod_token!r}"
            raise DataError(
                f"{path}: {asked}; special tokens that could end a document: "
                f"{', '.join(self.special) or 'none'}"
            )
        self.eod_id = self.special[eod_token]
        self.sha256 = fingerprint(self.type, content + b"\0" + notes_content, self.eod_id)

    def encode_each(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist())

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._model.encode_to_numpy(
                text, allowed_special=self._allowed, disallowed_special=()
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise ValueError(f"the tokenizer failed: {error}") from None


def _read_notes(notes: Path, path: Path) -> tuple[dict, bytes]:
    form = '{"pattern": REGEX, "special_tokens": {NAME: ID}, "eos_token": NAME}'
    if not notes.is_file():
        raise DataError(f"{path}: the file does not say how text is split; write {notes}: {form}")
    content = notes.read_bytes()
    try:
        loaded = json.loads(content)
        fits = isinstance(loaded["pattern"], str) and isinstance(loaded["special_tokens"], dict)
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise DataError(f"{notes}: the notes of {path.name} must be {form}")
    return loaded, content


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path}:{number}: not a base64 token and its rank") from None
    if len(ranks) < 256:
        raise DataError(f"{path}: {len(ranks)} tokens; at least the 256 bytes are needed")
    return ranks
