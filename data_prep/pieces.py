"""Parts of input files: how a file is cut, what a part is called, where a bad line is."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.formats import InputFile
from mixtron.data_prep.storage import open_input

BATCH_BYTES = 1 << 20
"""Text that is parsed and tokenised at once, small enough for a core's cache; part of no output."""
BATCH_DOCUMENTS = 8192
COUNTED_BYTES = 4 << 30
"""Line numbers are counted up to here in a file; beyond, a bad line is named by its byte."""


@dataclass(frozen=True)
class Piece:
    """A part of one file.

    `start` and `stop` are bytes of uncompressed lines (the piece has the lines that begin in it),
    row groups of Parquet, record batches of an Arrow file; and 0 and 1 for a file taken whole.
    """

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True)
class Rejected:
    """One bad line or row (counted from 1 within its piece) or, with line 0, a bad file."""

    line: int
    reason: str
    raw: str = ""


@dataclass
class Batch:
    """Some documents of one piece, in order."""

    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Line or row of each text within the piece, from 1."""
    rejected: list[Rejected] = field(default_factory=list)
    lines: int = 0
    """Lines or rows read, good and bad."""
    input_bytes: int = 0


def cut(
    file: InputFile, text_keys: tuple[str, ...], unit_bytes: int
) -> Iterator[tuple[Piece, int]]:
    """The pieces of a file, of about `unit_bytes` or less where it can be cut, with their bytes."""
    if file.format in ("parquet", "arrow", "arrow_stream"):
        from mixtron.data_prep.tables import group_bytes

        yield from _cut_table(file, group_bytes(file, text_keys), unit_bytes)
    elif file.format == "lines" and file.compression == "none":
        for start in range(0, file.bytes, unit_bytes):
            stop = min(start + unit_bytes, file.bytes)
            yield Piece(file, start, stop), stop - start
    else:
        yield Piece(file, 0, 1), file.bytes


def _cut_table(file: InputFile, sizes: list[int], unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    start, size = 0, 0
    for i, group in enumerate(sizes):
        if i > start and size + group > unit_bytes:
            yield Piece(file, start, i), size
            start, size = i, 0
        size += group
    if start < len(sizes):
        yield Piece(file, start, len(sizes)), size


def whole_pieces(files: list[InputFile], text_keys: tuple[str, ...]) -> Iterator[Piece]:
    """Every file as one piece."""
    for file in files:
        for piece, _ in cut(file, text_keys, unit_bytes=1 << 62):
            yield piece


def byte_range(piece: Piece) -> tuple[int, int]:
    """First and last byte of the lines that begin in a piece of an uncompressed file."""
    with open_input(piece.file.file) as f:
        return _line_start(f, piece, piece.start), _line_start(f, piece, piece.stop)


def _line_start(f: IO[bytes], piece: Piece, position: int) -> int:
    """Where the first line begins at or after `position`."""
    if position == 0:
        return 0
    f.seek(position - 1)
    at = position - 1
    while block := f.read(1 << 20 if at >= position else 1 << 12):
        if (found := block.find(b"\n")) >= 0:
            return at + found + 1
        at += len(block)
    if at < position:
        raise DataError(f"{piece.file.file}: became shorter while it was read")
    return at


def place(piece: Piece, rejected: Rejected) -> str:
    """`file:line`; a row of a table by its number within the piece's groups."""
    file = piece.file
    if rejected.line == 0:
        return file.file
    if file.format != "lines":
        groups = f" of group {piece.start}" if piece.start else ""
        return f"{file.file}:row {rejected.line}{groups}"
    if file.compression != "none" or piece.start == 0:
        return f"{file.file}:{rejected.line}"
    start, _ = byte_range(piece)
    if start > COUNTED_BYTES:
        return f"{file.file}: line {rejected.line} after byte {start}"
    return f"{file.file}:{_count_lines(file.file, start) + rejected.line}"


def _count_lines(file: str, stop: int) -> int:
    count = 0
    with open_input(file) as f:
        while stop > 0 and (block := f.read(min(stop, 1 << 24))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def entry(piece: Piece, sha256: str, lines: int) -> dict:
    """What a manifest says of a piece that was read."""
    file = piece.file
    whole = {"file": file.file, "bytes": file.bytes, "sha256": sha256, "lines": lines}
    if file.format == "lines" and file.compression == "none":
        start, stop = byte_range(piece)
        if (start, stop) != (0, file.bytes):
            return whole | {"bytes": stop - start, "range": [start, stop]}
    elif file.format in ("parquet", "arrow"):
        return whole | {"range": [piece.start, piece.stop]}
    return whole
