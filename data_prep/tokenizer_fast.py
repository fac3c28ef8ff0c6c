"""gigatoken as a faster engine for a tokenizer: the same ids, and held against the plain one."""

from pathlib import Path

import numpy as np
import orjson

from mixtron.data_prep.characters import has_new_characters
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.tokenizer_base import CheckedTokenizer, Tokenizer


class GigatokenTokenizer(CheckedTokenizer):
    """A tokenizer encoded by gigatoken; all else is the plain tokenizer's.

    Args:
        plain: the same tokenizer by the library that defines it.
        path: of its file or folder.
        special_text: see `load_tokenizer`.

    Raises:
        DataError: gigatoken is not installed, or cannot do this tokenizer; it never guesses.
    """

    engine, advice = "gigatoken", "use --backend plain, and report it"

    def __init__(self, plain: Tokenizer, path: str | Path, special_text: bool) -> None:
        super().__init__(plain)
        path = Path(path)
        try:
            import gigatoken
        except ImportError:
            raise DataError(
                "backend gigatoken is not installed: pip install 'mixtron[fast]', or use plain"
            ) from None
        try:
            content = _prepared(_as_json(path, self.type), special_text)
            self._encode = gigatoken.Tokenizer.from_json(content).backend.encode
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{path}: gigatoken cannot do it ({reason}); use plain") from None

    def encode_each(self, texts: list[str]) -> list[np.ndarray]:
        # One by one is as fast as a batch, which would import awkward: a second for each worker.
        return [
            self.plain.encode_each([text])[0] if has_new_characters(text) else self._encode(text)
            for text in texts
        ]


def _as_json(path: Path, kind: str) -> bytes | str:
    """The tokenizer in the form of `tokenizer.json`, which alone can be edited."""
    if kind == "huggingface":
        return (path / "tokenizer.json" if path.is_dir() else path).read_bytes()
    if kind == "sentencepiece":
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        return sentencepiece_to_tokenizer_json(path.read_bytes())
    raise ValueError(f"{kind} files are fast without it")


def _prepared(content: bytes | str, special_text: bool) -> bytes:
    """Unless asked, without special tokens, so that their names in a document are text.

    Raises:
        ValueError: an added token is matched by rules that gigatoken does not keep.
    """
    loaded = orjson.loads(content)
    added = loaded.get("added_tokens", [])
    if not special_text:
        added = [token for token in added if not token["special"]]
    for token in added:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            raise ValueError(f"the added token {token['content']!r} depends on what surrounds it")
    return orjson.dumps(loaded | {"added_tokens": added})
