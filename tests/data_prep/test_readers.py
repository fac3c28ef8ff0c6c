import gzip
import hashlib

import pytest
import zstandard

from mixtron.data_prep import pieces, readers
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.formats import describe
from mixtron.data_prep.pieces import Piece, cut
from mixtron.data_prep.readers import parse_line, read_piece

BAD_LINES = [
    (b"", "empty line"),
    (b"  ", "empty line"),
    (b"not json", "byte 1: invalid literal"),
    (b'{"text": "c', "byte 12: unexpected end of data"),
    (b'{"text":"\xc3\xa9"}{"text":"b"}', "byte 14: unexpected content"),
    (b'{"text":"a\xff"}', "byte 11: not UTF-8"),
    (b'{"text":"\\ud800"}', "byte 10: no low surrogate"),
    (b'{"text":"a","x":NaN}', "byte 17: unexpected character"),
    (b'{"body":"x","id":1}', "no key 'text'; keys here: body, id"),
    (b"{}", "no key 'text'; keys here: none"),
    (b'{"text":null}', "key 'text' is NoneType, not a string"),
    (b'{"text":5}', "key 'text' is int, not a string"),
    (b'{"text":["a"]}', "key 'text' is list, not a string"),
    (b'["text"]', "expected a JSON object, found list"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_says_why(line, reason):
    with pytest.raises(ValueError) as caught:
        parse_line(line, ("text",))
    assert str(caught.value).startswith(reason)


def test_a_good_line_is_kept_as_it_is():
    assert parse_line(b'{"text":" a\\u0000\\u2028 ","text2":1}', ("text",)) == " a\0\u2028 "
    assert parse_line(b'{"title":"A","text":"b"}', ("title", "text")) == "A\n\nb"


def read(file, unit_bytes: int = 1 << 62, keys: tuple[str, ...] = ("text",)) -> list[list]:
    """For each piece of a file, its batches."""
    described = describe(str(file), "")
    pieces = [piece for piece, _ in cut(described, keys, unit_bytes)]
    return [list(read_piece(piece, keys, hashlib.sha256())) for piece in pieces]


def texts_of(pieces: list[list]) -> list[str]:
    return [text for batches in pieces for batch in batches for text in batch.texts]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", readers.BOM])
@pytest.mark.parametrize("last_end", [True, False])
def test_any_cut_of_a_file_gives_the_same_lines(tmp_path, monkeypatch, start, end, last_end):
    lines = [b'{"text":"%d%s"}' % (i, b"x" * (7 * i % 23)) for i in range(9)]
    file = tmp_path / "a.jsonl"
    file.write_bytes(start + end.join(lines) + (end if last_end else b""))
    expected = [parse_line(line, ("text",)) for line in lines]
    for unit_bytes in (1, 2, 3, 7, 16, 31, 64, 1000):
        for batch_bytes in (1, 5, 40, 1 << 20):
            monkeypatch.setattr(pieces, "BATCH_BYTES", batch_bytes)
            got = read(file, unit_bytes)
            assert texts_of(got) == expected
            batches = [batch for piece in got for batch in piece]
            assert sum(batch.lines for batch in batches) == 9
            assert sum(batch.input_bytes for batch in batches) == file.stat().st_size
            assert not any(batch.rejected for batch in batches)
            for piece in got:
                numbers = [n for batch in piece for n in batch.numbers]
                assert numbers == list(range(1, len(numbers) + 1))


def _zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


LINES = b"".join(b'{"text":"line %d"}\n' % i for i in range(30_000))
EXPECTED = [f"line {i}" for i in range(30_000)]


@pytest.mark.parametrize("compress", [gzip.compress, _zstd])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl"])
def test_compressed_lines_by_their_first_bytes(tmp_path, compress, name):
    """One member or several, whatever the file is called."""
    file = tmp_path / name
    file.write_bytes(compress(LINES))
    assert texts_of(read(file, unit_bytes=100)) == EXPECTED
    half = LINES.index(b"\n", len(LINES) // 2) - 5  # in the middle of a line
    file.write_bytes(compress(LINES[:half]) + compress(b"") + compress(LINES[half:]))
    assert texts_of(read(file)) == EXPECTED
    assert sum(b.input_bytes for p in read(file) for b in p) == file.stat().st_size


def test_plain_lines_may_be_named_as_if_compressed(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(LINES)
    assert texts_of(read(tmp_path / "a.jsonl.gz")) == EXPECTED


def test_padding_after_gzip_is_no_data(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES) + bytes(1000))
    assert texts_of(read(tmp_path / "a.jsonl.gz")) == EXPECTED


def test_compressed_text_is_one_document(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é\nb".encode()))
    assert texts_of(read(tmp_path / "a.txt.gz")) == ["é\nb"]


@pytest.mark.parametrize("compress", [gzip.compress, _zstd])
def test_truncated_and_damaged_compression_is_an_error(tmp_path, compress):
    file, content = tmp_path / "a.jsonl.gz", compress(LINES)
    for size in (20, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: the \w+ data end early: truncated"):
            read(file)
    file.write_bytes(content + b"trailing rubbish")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: damaged \w+ data"):
        read(file)
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes(50) + content[middle + 50 :])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: "):
        read(file)


def test_text_files_are_read_whole(tmp_path):
    (tmp_path / "c.txt").write_bytes(readers.BOM + b"1\r\n")
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    assert texts_of(read(tmp_path / "c.txt")) == ["1\r\n"]
    ((bad,),) = read(tmp_path / "bad.txt")
    assert [(r.line, r.reason) for r in bad.rejected] == [(0, "byte 3: not UTF-8")]
    assert not bad.texts


@pytest.mark.parametrize("name", ["a.csv", "a", "a.jsonl.bz2", "a.parquet", "a.arrow"])
def test_unknown_formats(tmp_path, name):
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(DataError, match=rf"{name}: (unknown format|named \.)"):
        describe(str(tmp_path / name), "")


def test_a_file_that_shrank_is_noticed(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text":"a"}\n' * 100)
    described = describe(str(file), "")
    file.write_text('{"text":"a"}\n')
    for piece in (Piece(described, 0, 1300), Piece(described, 500, 1300)):
        with pytest.raises(DataError, match="became shorter"):
            list(read_piece(piece, ("text",), hashlib.sha256()))
