"""From input files to documents: which files, cut into which pieces of work, parsed how."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from mixtron.data_prep.errors import DataError

LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md")
UNIT_BYTES = 4 << 20
"""Input of one piece of work. Part of no output: any value gives the same shards."""
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LineRange:
    """The lines of a JSONL file that begin in [start, stop) bytes."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class TextFiles:
    """Whole text files, one document each."""

    files: tuple[str, ...]


Unit = LineRange | TextFiles


@dataclass(frozen=True)
class Rejected:
    """One bad line (counted from 1 within its unit) or, with line None, one bad file."""

    file: str
    line: int | None
    reason: str
    raw: str


@dataclass
class Documents:
    """What one unit holds."""

    texts: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    lines: int = 0
    input_bytes: int = 0
    contents: dict[str, bytes] = field(default_factory=dict)
    """Of text files, which are read whole: their bytes, for hashing."""


def find_files(inputs: list[str]) -> list[str]:
    """The files behind paths, folders and globs: sorted, each once.

    A folder stands for every file below it whose name and folders do not begin with a dot.

    Raises:
        DataError: an input that matches nothing, a file matched twice, an unknown format.
    """
    found: dict[str, str] = {}
    for pattern in inputs:
        matches = _expand(pattern)
        if not matches:
            raise DataError(f"{pattern}: 0 files matched")
        for file in matches:
            _suffix_kind(file)
            real = os.path.realpath(file)
            if real in found:
                raise DataError(f"{file}: given twice (also as {found[real]})")
            found[real] = file
    return sorted(found.values())


def plan_units(files: list[str]) -> Iterator[Unit]:
    """Cuts files into units in order; depends on names and sizes alone."""
    texts: list[str] = []
    texts_bytes = 0
    for file in files:
        size = os.path.getsize(file)
        is_text = _suffix_kind(file) == "text"
        if texts and (not is_text or texts_bytes + size > UNIT_BYTES):
            yield TextFiles(tuple(texts))
            texts, texts_bytes = [], 0
        if is_text:
            texts.append(file)
            texts_bytes += size
        else:
            for start in range(0, max(size, 1), UNIT_BYTES):
                yield LineRange(file, start, min(start + UNIT_BYTES, size))
    if texts:
        yield TextFiles(tuple(texts))


def read_unit(unit: Unit, text_keys: tuple[str, ...]) -> Documents:
    """Reads and parses one unit; what is bad is listed, what is good is kept."""
    if isinstance(unit, TextFiles):
        return _read_text_files(unit)
    return _read_lines(unit, text_keys)


def _expand(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        below = glob.glob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        return [p for p in below if os.path.isfile(p)]
    if os.path.isfile(pattern):
        return [pattern]
    return [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _suffix_kind(file: str) -> str:
    suffix = Path(file).suffix.lower()
    if suffix in LINE_SUFFIXES:
        return "lines"
    if suffix in TEXT_SUFFIXES:
        return "text"
    raise DataError(
        f"{file}: unknown format {suffix!r}; JSON lines are {', '.join(LINE_SUFFIXES)}, plain "
        f"text is {', '.join(TEXT_SUFFIXES)}"
    )


def _read_text_files(unit: TextFiles) -> Documents:
    documents = Documents()
    for file in unit.files:
        content = Path(file).read_bytes()
        documents.contents[file] = content
        documents.input_bytes += len(content)
        try:
            documents.texts.append(content.removeprefix(BOM).decode("utf-8"))
        except UnicodeDecodeError as error:
            reason = f"byte {error.start + 1}: not UTF-8"
            documents.rejected.append(Rejected(file, None, reason, ""))
    return documents


def _read_lines(unit: LineRange, text_keys: tuple[str, ...]) -> Documents:
    documents = Documents(input_bytes=unit.stop - unit.start)
    for line in _lines_of(unit):
        documents.lines += 1
        try:
            documents.texts.append(parse_line(line, text_keys))
        except ValueError as error:
            raw = line.decode("utf-8", errors="backslashreplace")
            documents.rejected.append(Rejected(unit.file, documents.lines, str(error), raw))
    return documents


def _lines_of(unit: LineRange) -> Iterator[bytes]:
    """The range's lines without their ends."""
    with open(unit.file, "rb") as f:
        position = unit.start
        if unit.start > 0:
            # The line that runs into this range belongs to the one before.
            f.seek(unit.start - 1)
            position = unit.start - 1 + len(f.readline(unit.stop - unit.start + 1))
        while position < unit.stop:
            line = f.readline()
            if not line:
                raise DataError(f"{unit.file}: became shorter while it was read")
            content = line.removeprefix(BOM) if position == 0 else line
            position += len(line)
            yield content.removesuffix(b"\n").removesuffix(b"\r")


def parse_line(line: bytes, text_keys: tuple[str, ...]) -> str:
    """The text of one JSON line; several keys are joined by an empty line.

    Raises:
        ValueError: why the line is bad.
    """
    if not line.strip():
        raise ValueError("empty line")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(_json_reason(line, error)) from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    parts = []
    for key in text_keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; keys here: {', '.join(record) or 'none'}")
        if not isinstance(record[key], str):
            raise ValueError(f"key {key!r} is {type(record[key]).__name__}, not a string")
        parts.append(record[key])
    return "\n\n".join(parts)


def _json_reason(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as invalid:
        return f"byte {invalid.start + 1}: not UTF-8"
    return f"byte {len(text[: error.pos].encode()) + 1}: {error.msg}"
