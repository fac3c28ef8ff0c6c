"""Documents in Parquet and Arrow files, by pyarrow; local files are mapped, not read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from pyarrow import parquet

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.formats import InputFile
from mixtron.data_prep.pieces import Batch, Piece, Rejected
from mixtron.data_prep.storage import is_url, open_input

READ_BYTES, READ_ROWS = 4 << 20, 8192
"""Read at once. The digest of a table goes by such parts, so manifests depend on them."""


def group_bytes(file: InputFile, text_keys: tuple[str, ...]) -> list[int]:
    """Bytes of each part at which a table may be cut, after a look at its columns.

    Parquet is cut at row groups (bytes of the text columns), an Arrow file at record batches; an
    Arrow stream is one part.

    Raises:
        DataError: damaged, or a text column is missing or not of strings.
    """
    with _opened(file) as table:
        if file.format == "parquet":
            _check_columns(file, table.schema_arrow, text_keys)
            return [
                sum(_column_bytes(table.metadata.row_group(i), text_keys))
                for i in range(table.num_row_groups)
            ]
        _check_columns(file, table.schema, text_keys)
        parts = 1 if file.format == "arrow_stream" else table.num_record_batches
        return [file.bytes // max(parts, 1)] * parts


def read_table(piece: Piece, text_keys: tuple[str, ...], digest: Any) -> Iterator[Batch]:
    """The rows of a piece; a null or invalid text is a bad row."""
    first = 1
    with _opened(piece.file) as table:
        for columns, taken in _columns(table, piece, text_keys):
            batch = Batch(lines=len(columns[0]), input_bytes=taken)
            texts: list[list[Any]] = [_strings(column, digest) for column in columns]
            numbers = range(first, first + batch.lines)
            first += batch.lines
            if len(texts) == 1 and set(map(type, texts[0])) == {str}:
                batch.texts, batch.numbers = texts[0], list(numbers)
            else:
                _add_rows(batch, texts, numbers, text_keys)
            yield batch


def _add_rows(
    batch: Batch, texts: list[list[str | bytes | None]], numbers: range, text_keys: tuple[str, ...]
) -> None:
    """Of several columns, or with bad rows among them."""
    for row, parts in zip(numbers, zip(*texts, strict=True), strict=True):
        bad = [i for i, part in enumerate(parts) if not isinstance(part, str)]
        if bad:
            reason = "null" if (invalid := parts[bad[0]]) is None else invalid.decode()
            batch.rejected.append(Rejected(row, f"column {text_keys[bad[0]]!r}: {reason}"))
        else:
            batch.texts.append("\n\n".join(parts))
            batch.numbers.append(row)


@contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    """A `ParquetFile`, or a reader of record batches."""
    with open_input(file.file) if is_url(file.file) else pa.memory_map(file.file) as f:
        try:
            if file.format == "parquet":
                yield parquet.ParquetFile(f)
            elif file.format == "arrow":
                yield pa.ipc.open_file(f)
            else:
                yield pa.ipc.open_stream(f)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{file.file}: cannot be read as {file.format}: {reason}") from None


def _check_columns(file: InputFile, schema: pa.Schema, text_keys: tuple[str, ...]) -> None:
    for key in text_keys:
        if key not in schema.names:
            raise DataError(f"{file.file}: no column {key!r}; columns here: {schema.names}")
        kind = schema.field(key).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(is_kind(kind) for is_kind in strings):
            raise DataError(f"{file.file}: column {key!r} is {kind}, not string")


def _column_bytes(group: Any, text_keys: tuple[str, ...]) -> list[int]:
    columns = [group.column(i) for i in range(group.num_columns)]
    return [c.total_uncompressed_size for c in columns if c.path_in_schema in text_keys]


def _columns(
    table: Any, piece: Piece, text_keys: tuple[str, ...]
) -> Iterator[tuple[list[pa.Array], int]]:
    """The text columns of some rows at a time, and the planned bytes that they stand for."""
    if piece.file.format == "parquet":
        for i in range(piece.start, piece.stop):
            group = table.metadata.row_group(i)
            size = sum(_column_bytes(group, text_keys))
            rows = _rows_at_once(group.num_rows, size)
            columns = list(text_keys)
            for batch in table.iter_batches(rows, [i], columns, use_threads=False):
                share = size * batch.num_rows // max(group.num_rows, 1)
                yield [batch.column(key) for key in text_keys], share
        return
    stream = piece.file.format == "arrow_stream"
    batches = table if stream else map(table.get_batch, range(piece.start, piece.stop))
    for batch in batches:
        rows = _rows_at_once(batch.num_rows, batch.nbytes)
        for first in range(0, batch.num_rows, rows):
            part = batch.slice(first, rows)
            yield [part.column(key) for key in text_keys], part.nbytes


def _rows_at_once(rows: int, size: int) -> int:
    return max(1, min(READ_ROWS, READ_BYTES * rows // max(size, 1)))


def _strings(column: pa.Array, digest: Any) -> list[str | bytes | None]:
    """The column's texts: None for null, the reason as bytes for what is not UTF-8."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        column = column.cast(pa.large_string())
    _, offsets, data = column.buffers()
    width = "<i4" if pa.types.is_string(column.type) else "<i8"
    bounds = np.frombuffer(offsets, dtype=width)[column.offset : column.offset + len(column) + 1]
    digest.update(np.diff(bounds).astype("<i8").data)
    if data is not None and len(bounds):
        digest.update(memoryview(data)[bounds[0] : bounds[-1]])
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]


def _decoded(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode("utf-8")
    except UnicodeDecodeError as error:
        return b"byte %d: not UTF-8" % (error.start + 1)
