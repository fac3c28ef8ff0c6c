"""What an input file is, by its first bytes and its name, and where it may be cut."""

from dataclasses import dataclass
from pathlib import PurePosixPath

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.storage import open_input, size_and_state

LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md")
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
COMPRESSED_SUFFIXES = (".gz", ".zst")
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
TABLE_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow_stream"}


@dataclass(frozen=True)
class InputFile:
    """One file of the input."""

    file: str
    """Path or URL."""
    source: str
    """Name of the group that it was given in, or nothing."""
    format: str
    """`lines`, `text`, `parquet`, `arrow` or `arrow_stream`."""
    compression: str
    """Of lines and text: `none`, `gzip` or `zstd`."""
    bytes: int
    state: str
    """A mark that changes when the file does."""


def describe(file: str, source: str) -> InputFile:
    """Looks at a file's first bytes; its name only says whether text is lines or one document.

    Raises:
        DataError: a format that is not read.
    """
    size, state = size_and_state(file)
    with open_input(file) as f:
        first = f.read(8)
    for magic, table in TABLE_MAGIC.items():
        if first.startswith(magic):
            return InputFile(file, source, table, "none", size, state)
    compression = next((c for m, c in COMPRESSION_MAGIC.items() if first.startswith(m)), "none")
    kind = _kind_of_name(file)
    if kind in TABLE_SUFFIXES:
        raise DataError(f"{file}: named {kind}, but it does not begin like such a file")
    return InputFile(file, source, kind, compression, size, state)


def _kind_of_name(file: str) -> str:
    # A chained URL names the file in its first part.
    name = PurePosixPath(file.split("::")[0].split("?")[0].lower())
    if name.suffix in COMPRESSED_SUFFIXES:
        name = name.with_suffix("")
    if name.suffix in LINE_SUFFIXES:
        return "lines"
    if name.suffix in TEXT_SUFFIXES:
        return "text"
    if name.suffix in TABLE_SUFFIXES:
        return name.suffix
    raise DataError(
        f"{file}: unknown format {name.suffix!r}; JSON lines are {', '.join(LINE_SUFFIXES)}, plain "
        f"text is {', '.join(TEXT_SUFFIXES)}, both also in gzip or zstd; tables are Parquet and "
        "Arrow"
    )
