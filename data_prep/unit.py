"""One unit: its pieces are read, tokenised and written; its receipt, last, says that it is done."""

import hashlib
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import (
    flush_to_disk,
    remove_leftovers,
    sync_folder,
    temporary_name,
    write_ahead,
)
from mixtron.data_prep.pieces import Batch, Piece, Rejected, entry, place
from mixtron.data_prep.plan import Plan, Recipe, Unit, check_unchanged
from mixtron.data_prep.readers import read_piece
from mixtron.data_prep.shards import token_dtype
from mixtron.data_prep.tokenizer_base import CheckedTokenizer, Tokenizer
from mixtron.data_prep.tokenizer_fast import GigatokenTokenizer
from mixtron.data_prep.tokenizer_words import remember_words

PARTS = ("bin", "lengths", "hashes", "rejected")
"""Tokens; int32 tokens of each document; 16 bytes of hash of each; bad lines as JSON."""
HASH_BYTES = 16
TOKENIZER_GROWTH_BYTES = 512 << 20
"""Tokenizers remember words without limit: one that has grown so much is opened anew."""
CHECKED_DOCUMENTS, CHECKED_CHARACTERS = 8, 1024
"""Of each unit, what a fast backend is held against the plain tokenizer on: the beginnings of its
first documents."""

Advance = Callable[[int, int, int], None]
"""Told of input bytes, documents and bad lines as they pass."""


@dataclass(frozen=True)
class Receipt:
    """What a finished unit holds; the same for whoever did it."""

    key: str
    documents: int
    tokens: int
    longest_document: int
    text_bytes: int
    """UTF-8 bytes of the documents."""
    empty: int
    rejected: int
    eod_in_text: int
    """Times that the end-of-document token's name occurs within documents."""
    pieces: list[dict]
    """`file`, `bytes`, `sha256` of what was read, `lines`, and `range` for a part of a file."""
    sha256: dict[str, str]
    """Of the unit's files, by their part."""
    sizes: dict[str, int]


class Encoder:
    """A worker's tokenizer, and how documents become tokens.

    Args:
        tokenizer: the plain one of the plan's recipe, where it is loaded already.

    Raises:
        DataError: not the tokenizer of the plan, or not one for this backend.
    """

    def __init__(self, plan: Plan, backend: str, tokenizer: Tokenizer | None = None) -> None:
        self._plan, self._backend = plan, backend
        self._before, self._after = _special(plan.bos_id), _special(plan.eod_id)
        self.tokenizer = self._load(tokenizer)
        self._loaded_rss = _rss_bytes()
        names = {i: name for name, i in self.tokenizer.special.items()}
        self.eod_text = names[self.tokenizer.eod_id]

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all documents, with the special ones around each, and their lengths.

        A document of which the tokenizer makes nothing has length 0 and no special tokens.
        """
        encoded = self.tokenizer.encode_each(texts)
        parts = [part for ids in encoded if len(ids) for part in (*self._before, ids, *self._after)]
        around = len(self._before) + len(self._after)
        lengths = np.array([len(ids) and len(ids) + around for ids in encoded], dtype=np.int64)
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32), lengths

    def check(self, texts: list[str], where: str) -> None:
        """Holds a faster way to the ids against the plain tokenizer."""
        if isinstance(self.tokenizer, CheckedTokenizer):
            some = [text[:CHECKED_CHARACTERS] for text in texts[:CHECKED_DOCUMENTS]]
            self.tokenizer.check(some, where)

    def limit_memory(self) -> None:
        if _rss_bytes() - self._loaded_rss > TOKENIZER_GROWTH_BYTES:
            del self.tokenizer  # before its successor is made
            self.tokenizer = self._load()
            self._loaded_rss = _rss_bytes()

    def _load(self, plain: Tokenizer | None = None) -> Tokenizer:
        recipe = self._plan.recipe
        plain = plain or recipe.load_tokenizer()
        if plain.sha256 != self._plan.tokenizer["sha256"]:
            raise DataError(f"{recipe.tokenizer}: changed since it was planned; plan again")
        if self._backend == "gigatoken":
            return GigatokenTokenizer(plain, recipe.tokenizer, recipe.special_text)
        return remember_words(plain)


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as f:
        return int(f.read().split()[1]) * mmap.PAGESIZE


def _special(token: int | None) -> list[np.ndarray]:
    return [] if token is None else [np.array([token], dtype=np.uint32)]


def unit_path(folder: Path, key: str, part: str) -> Path:
    return folder / f"{key}.{part}"


def read_receipt(folder: Path, unit: Unit) -> Receipt | None:
    """The receipt of a finished unit whose files have the sizes that it states, else None."""
    try:
        receipt = Receipt(**json.loads(unit_path(folder, unit.key, "json").read_bytes()))
        for part, size in receipt.sizes.items():
            if unit_path(folder, unit.key, part).stat().st_size != size:
                return None
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return receipt


def run_unit(unit: Unit, folder: Path, plan: Plan, encoder: Encoder, advance: Advance) -> Receipt:
    """Does one unit; what an interrupted attempt left behind is removed first.

    Raises:
        DataError: a file changed or cannot be read; under `on_bad_line: fail`, a bad line.
    """
    check_unchanged(unit)
    for part in (*PARTS, "json"):
        remove_leftovers(unit_path(folder, unit.key, part))
    with _UnitFiles(folder, unit.key, plan) as files:
        pieces = []
        for piece in unit.pieces:
            digest = hashlib.sha256()
            lines = 0
            for batch in read_piece(piece, plan.recipe.text_keys, digest):
                _do_batch(batch, piece, files, plan.recipe, encoder)
                lines += batch.lines
                advance(batch.input_bytes, len(batch.texts), len(batch.rejected))
            pieces.append(entry(piece, digest.hexdigest(), lines))
        check_unchanged(unit)
        return files.publish(unit.key, pieces)


def _do_batch(
    batch: Batch, piece: Piece, files: "_UnitFiles", recipe: Recipe, encoder: Encoder
) -> None:
    real = [i for i, text in enumerate(batch.texts) if text and not text.isspace()]
    texts = [batch.texts[i] for i in real]
    if texts and not files.checked:
        encoder.check(texts, piece.file.file)
        files.checked = True
    try:
        tokens, lengths = encoder.encode(texts)
    except ValueError:
        texts, bad = _encodable(texts, [batch.numbers[i] for i in real], encoder)
        batch.rejected = sorted(batch.rejected + bad, key=lambda r: r.line)
        tokens, lengths = encoder.encode(texts)
    for rejected in batch.rejected:
        if recipe.on_bad_line == "fail":
            raise DataError(f"{place(piece, rejected)}: {rejected.reason}")
        files.reject(piece, rejected)
    kept = [text for text, length in zip(texts, lengths, strict=True) if length]
    files.empty += len(batch.texts) - len(real) + len(texts) - len(kept)
    files.add(kept, tokens, lengths[lengths > 0], encoder.eod_text)
    encoder.limit_memory()


def _encodable(
    texts: list[str], numbers: list[int], encoder: Encoder
) -> tuple[list[str], list[Rejected]]:
    """The documents that can be encoded, when one of several cannot."""
    good, bad = [], []
    for text, number in zip(texts, numbers, strict=True):
        try:
            encoder.encode([text])
            good.append(text)
        except ValueError as error:
            bad.append(Rejected(number, str(error), text[:1000]))
    return good, bad


class _UnitFiles:
    """The files of one unit under temporary names until `publish`."""

    def __init__(self, folder: Path, key: str, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self.dtype = token_dtype(plan.tokenizer["vocab_size"])
        parts = ["bin", "lengths"]
        if plan.recipe.needs_hashes:
            parts.append("hashes")
        if plan.recipe.on_bad_line == "quarantine":
            parts.append("rejected")
        self._paths = {part: unit_path(folder, key, part) for part in (*parts, "json")}
        self._temporary = {part: temporary_name(path) for part, path in self._paths.items()}
        self._open: dict[str, IO[bytes]] = {p: open(self._temporary[p], "xb") for p in parts}  # noqa: SIM115
        self._digests = {part: hashlib.sha256() for part in parts}
        self.documents, self.tokens, self.longest, self.text_bytes = 0, 0, 0, 0
        self.empty, self.rejected, self.eod_in_text = 0, 0, 0
        self.checked = False

    def __enter__(self) -> "_UnitFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for f in self._open.values():
            f.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def add(self, texts: list[str], tokens: np.ndarray, lengths: np.ndarray, eod_text: str) -> None:
        if not texts:
            return
        cardinality = self._plan.tokenizer["vocab_size"]
        if int(tokens.max()) >= cardinality:
            raise DataError(
                f"{self._plan.recipe.tokenizer}: gave id {tokens.max()}, but it has {cardinality}"
            )
        self._write("bin", np.ascontiguousarray(tokens, self.dtype.newbyteorder("<")).data)
        self._write("lengths", lengths.astype("<i4").data)
        if "hashes" in self._open:
            hashes = (hashlib.blake2b(t.encode(), digest_size=HASH_BYTES).digest() for t in texts)
            self._write("hashes", b"".join(hashes))
        self.documents += len(texts)
        self.tokens += len(tokens)
        self.longest = max(self.longest, int(lengths.max()))
        self.text_bytes += sum(len(t) if t.isascii() else len(t.encode()) for t in texts)
        self.eod_in_text += sum(text.count(eod_text) for text in texts)

    def reject(self, piece: Piece, rejected: Rejected) -> None:
        self.rejected += 1
        if "rejected" in self._open:
            file = piece.file.file
            entry = {"file": file, **asdict(rejected)}
            self._write("rejected", json.dumps(entry, ensure_ascii=False).encode() + b"\n")

    def publish(self, key: str, pieces: list[dict]) -> Receipt:
        sizes = {part: f.tell() for part, f in self._open.items()}
        for f in self._open.values():
            flush_to_disk(f)
        receipt = Receipt(
            key=key,
            documents=self.documents,
            tokens=self.tokens,
            longest_document=self.longest,
            text_bytes=self.text_bytes,
            empty=self.empty,
            rejected=self.rejected,
            eod_in_text=self.eod_in_text,
            pieces=pieces,
            sha256={part: digest.hexdigest() for part, digest in self._digests.items()},
            sizes=sizes,
        )
        with open(self._temporary["json"], "x", encoding="utf-8") as f:
            f.write(json.dumps(asdict(receipt), indent=1, ensure_ascii=False) + "\n")
            flush_to_disk(f)
        for part, path in self._paths.items():
            os.replace(self._temporary[part], path)
        sync_folder(self._folder)
        return receipt

    def _write(self, part: str, content: bytes | memoryview) -> None:
        write_ahead(self._open[part], content)
        self._digests[part].update(content)
