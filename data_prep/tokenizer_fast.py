"""gigatoken as a faster engine for a tokenizer: the same ids, and held against the plain one."""

import json
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.tokenizer_base import Tokenizer


class GigatokenTokenizer(Tokenizer):
    """A tokenizer encoded by gigatoken; all else is the plain tokenizer's.

    Raises:
        DataError: gigatoken is not installed, or cannot do this tokenizer; it never guesses.
    """

    def __init__(self, path: str | Path, eod_token: str | None, special_text: bool) -> None:
        self.plain = plain = load_tokenizer(path, eod_token, special_text)
        self.type, self.vocab_size, self.special = plain.type, plain.vocab_size, plain.special
        self.eod_id, self.sha256 = plain.eod_id, plain.sha256
        self._path = path = Path(path)
        try:
            import gigatoken
        except ImportError:
            raise DataError(
                "backend gigatoken is not installed: pip install 'mixtron[fast]', or use plain"
            ) from None
        try:
            content = _prepared(_as_json(path, plain.type), special_text)
            self._engine = gigatoken.Tokenizer.from_json(content)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{path}: gigatoken cannot do it ({reason}); use plain") from None

    def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        # One by one is as fast as a batch, which would import awkward: a second for each worker.
        engine = self._engine.encode
        encoded = [
            self.plain.encode_flat([text])[0] if has_new_characters(text) else engine(text)
            for text in texts
        ]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.concatenate(encoded) if encoded else np.zeros(0, np.uint32), lengths

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self.plain.decode(ids)

    def check(self, texts: list[str], where: str) -> None:
        """Raises DataError when an id of these texts differs from the plain tokenizer's."""
        for text, fast, plain in zip(
            texts, self.encode_batch(texts), self.plain.encode_batch(texts), strict=True
        ):
            if not np.array_equal(fast, plain):
                first = next(
                    (i for i, (a, b) in enumerate(zip(fast, plain, strict=False)) if a != b),
                    min(len(fast), len(plain)),
                )
                raise DataError(
                    f"{where}: gigatoken and the plain tokenizer differ at token {first} of the "
                    f"document that begins {text[:40]!r}; use --backend plain, and report it"
                )


def has_new_characters(text: str) -> bool:
    """Whether Unicode gave a character of the text no meaning until after this Python's version.

    Libraries of different ages disagree on whether such a character is a letter, and so on where
    words end.
    """
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return bool(_new_characters()[codes].any())


@cache
def _new_characters() -> np.ndarray:
    """bool [code points]."""
    new = np.zeros(0x110000, dtype=bool)
    assigned_planes = 0x40000  # the others hold tags and private use
    new[:assigned_planes] = [unicodedata.category(chr(c)) == "Cn" for c in range(assigned_planes)]
    return new


def _as_json(path: Path, kind: str) -> bytes | str:
    """The tokenizer in the form of `tokenizer.json`, which alone can be edited."""
    if kind == "huggingface":
        return (path / "tokenizer.json" if path.is_dir() else path).read_bytes()
    if kind == "sentencepiece":
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        return sentencepiece_to_tokenizer_json(path.read_bytes())
    raise ValueError(f"{kind} files are fast without it")


def _prepared(content: bytes | str, special_text: bool) -> str:
    """Unless asked, without special tokens, so that their names in a document are text.

    Raises:
        ValueError: an added token is matched by rules that gigatoken does not keep.
    """
    loaded = json.loads(content)
    added = loaded.get("added_tokens", [])
    if not special_text:
        added = [token for token in added if not token["special"]]
    for token in added:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise ValueError(f"the added token {token['content']!r} depends on what surrounds it")
    return json.dumps(loaded | {"added_tokens": added})
