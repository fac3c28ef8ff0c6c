"""From pieces of input files to documents: batches of texts, what is bad beside them."""

import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import IO, Any

import orjson

from mixtron.data_prep import pieces
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.formats import InputFile
from mixtron.data_prep.pieces import Batch, Piece, Rejected, byte_range
from mixtron.data_prep.storage import open_input

COMPRESSED_BLOCK = 64 << 10
"""Small, because it may inflate a thousandfold."""
BOM = b"\xef\xbb\xbf"


def read_piece(piece: Piece, text_keys: tuple[str, ...], digest: Any) -> Iterator[Batch]:
    """Reads a piece in order and in bounded memory.

    Args:
        text_keys: JSON keys or columns; several are joined by an empty line.
        digest: a hashlib object that takes the bytes read: of lines and text files those in the
            file, of tables the text columns.

    Raises:
        DataError: the file cannot be read: damaged, truncated, shorter than planned.
    """
    if piece.file.format == "lines":
        return read_lines(_blocks(piece, digest), text_keys, piece)
    if piece.file.format == "text":
        return _read_text(piece, digest)
    from mixtron.data_prep.tables import read_table  # pyarrow takes a while to import

    return read_table(piece, text_keys, digest)


def _blocks(piece: Piece, digest: Any) -> Iterator[tuple[bytes, int]]:
    """Blocks of text, and the bytes of the file that each took."""
    if piece.file.compression == "none" and piece.file.format == "lines":
        start, stop = byte_range(piece)
    else:
        start, stop = 0, piece.file.bytes
    size = pieces.BATCH_BYTES if piece.file.compression == "none" else COMPRESSED_BLOCK
    with open_input(piece.file.file) as f:
        raw = _raw_blocks(f, start, stop, size, piece, digest)
        texts = raw if piece.file.compression == "none" else _decompressed(raw, piece.file)
        yield from texts


def _raw_blocks(
    f: IO[bytes], start: int, stop: int, size: int, piece: Piece, digest: Any
) -> Iterator[tuple[bytes, int]]:
    f.seek(start)
    while start < stop:
        block = f.read(min(size, stop - start))
        if not block:
            raise DataError(f"{piece.file.file}: became shorter while it was read")
        digest.update(block)
        start += len(block)
        yield block, len(block)


def _decompressed(raw: Iterator[tuple[bytes, int]], file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Of all members of a gzip file, all frames of a zstd one; a truncated one is an error."""
    new, errors = _decompressor(file.compression)
    stream = None
    for block, taken in raw:
        while block:
            if stream is None:
                if file.compression == "gzip" and not (block := block.lstrip(b"\0")):
                    break  # padding after the last member
                stream = new()
            try:
                text = stream.decompress(block)
            except errors as error:
                raise DataError(f"{file.file}: damaged {file.compression} data: {error}") from None
            block = stream.unused_data if stream.eof else b""
            stream = None if stream.eof else stream
            yield text, taken
            taken = 0
    if stream is not None:
        raise DataError(f"{file.file}: the {file.compression} data end early: truncated file")


def _decompressor(compression: str) -> tuple[Callable[[], Any], type[Exception]]:
    if compression == "gzip":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


def _read_text(piece: Piece, digest: Any) -> Iterator[Batch]:
    """A whole file, one document."""
    content = b"".join(block for block, _ in _blocks(piece, digest))
    batch = Batch(lines=1, input_bytes=piece.file.bytes)
    try:
        batch.texts.append(content.removeprefix(BOM).decode("utf-8"))
        batch.numbers.append(0)
    except UnicodeDecodeError as error:
        batch.rejected.append(Rejected(0, f"byte {error.start + 1}: not UTF-8"))
    yield batch


def read_lines(
    blocks: Iterator[tuple[bytes, int]], text_keys: tuple[str, ...], piece: Piece
) -> Iterator[Batch]:
    """JSON lines out of blocks of bytes."""
    number, batch, size = 0, Batch(), 0
    for lines, taken in _split_lines(blocks):
        batch.input_bytes += taken
        for line in lines:
            number += 1
            batch.lines += 1
            if number == 1 and piece.start == 0:
                line = line.removeprefix(BOM)
            try:
                batch.texts.append(parse_line(line, text_keys))
                batch.numbers.append(number)
            except ValueError as error:
                raw = _without_end(line).decode("utf-8", errors="backslashreplace")
                batch.rejected.append(Rejected(number, str(error), raw))
            size += len(line)
            if size >= pieces.BATCH_BYTES or batch.lines >= pieces.BATCH_DOCUMENTS:
                yield batch
                batch, size = Batch(), 0
    yield batch


def _split_lines(blocks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[list[bytes], int]]:
    """The lines that each block completes, with their ends, and the bytes taken for them."""
    begun: list[bytes] = []
    for block, taken in blocks:
        lines = BytesIO(block).readlines()  # looks for line ends faster than `split`
        last = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if lines:
            lines[0] = b"".join([*begun, lines[0]])
            begun = []
        begun.append(last)
        yield lines, taken
    if last := b"".join(begun):
        yield [last], 0


def parse_line(line: bytes, text_keys: tuple[str, ...]) -> str:
    """The text of one JSON line, with its end or without; several keys are joined by an empty line.

    Raises:
        ValueError: why the line is bad.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise ValueError(_json_reason(_without_end(line))) from None
    one_key = len(text_keys) == 1 and isinstance(record, dict)
    if one_key and isinstance(text := record.get(text_keys[0]), str):
        return text
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


def _without_end(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def _json_reason(line: bytes) -> str:
    """Why a line, without its end, is not JSON."""
    if not line or line.isspace():
        return "empty line"
    try:
        text = line.decode("utf-8")
        orjson.loads(text)
    except UnicodeDecodeError as invalid:
        return f"byte {invalid.start + 1}: not UTF-8"
    except orjson.JSONDecodeError as error:
        return f"byte {len(text[: error.pos].encode()) + 1}: {error.msg}"
    raise AssertionError("a line is JSON without its end, but not with it")
