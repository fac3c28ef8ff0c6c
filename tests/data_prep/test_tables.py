import hashlib

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from mixtron.data_prep import tables
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.formats import describe
from mixtron.data_prep.pieces import cut
from mixtron.data_prep.readers import read_piece
from mixtron.data_prep.storage import find_files

TEXTS = [f"row {i} é " + "x" * (i % 50) for i in range(1000)]
KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def write(path, table: pa.Table) -> str:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=100)
    elif path.suffix == ".feather":
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table, max_chunksize=100)
    else:
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=100)
    return str(path)


def read(file: str, unit_bytes: int = 1 << 62, keys: tuple[str, ...] = ("text",)):
    """For each piece, its batches; and a digest of each piece."""
    read_pieces, digests = [], []
    for piece, _ in cut(describe(file, ""), keys, unit_bytes):
        digest = hashlib.sha256()
        read_pieces.append(list(read_piece(piece, keys, digest)))
        digests.append(digest.hexdigest())
    return read_pieces, digests


def texts_of(read_pieces) -> list[str]:
    return [text for batches in read_pieces for batch in batches for text in batch.texts]


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_rows_in_order_however_cut(tmp_path, monkeypatch, suffix, kind):
    if suffix == ".parquet" and kind == pa.string_view():
        kind = pa.string()
    column = pa.array(TEXTS).cast(kind)
    table = pa.table({"id": range(1000), "text": column})
    file = write(tmp_path / f"a{suffix}", table)
    whole, (digest,) = read(file)
    assert texts_of(whole) == TEXTS
    monkeypatch.setattr(tables, "READ_BYTES", 500)
    assert read(file)[0] != whole
    got, digests = read(file, unit_bytes=10_000)
    assert texts_of(got) == TEXTS
    assert len(got) > 3 or suffix == ".arrow"
    assert digest != hashlib.sha256().hexdigest()
    assert len(set(digests)) == len(digests)


def test_manifests_keep_the_digests_of_tables(tmp_path):
    """They go by the parts that are read at once, which therefore stay as large as they are."""
    texts = [chr(97 + i) * 100_000 for i in range(26)] * 4
    pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    _, (digest,) = read(str(tmp_path / "a.parquet"))
    assert digest == "1b1db6d81aae8bc6d82ed97fa8f9c7718ffe8488b87ec4a594fd71c0ad9a37f3"


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_null_and_invalid_text_is_a_bad_row(tmp_path, suffix):
    raw = pa.array([b"good", b"caf\xe9", b"fine"], pa.binary())
    invalid = pa.StringArray.from_buffers(3, *raw.buffers()[1:])
    table = pa.table({"text": pa.chunked_array([invalid, pa.array([None, "last"])])})
    (batches,), _ = read(write(tmp_path / f"a{suffix}", table))
    assert [text for b in batches for text in b.texts] == ["good", "fine", "last"]
    assert [n for b in batches for n in b.numbers] == [1, 3, 5]
    assert [(r.line, r.reason) for b in batches for r in b.rejected] == [
        (2, "column 'text': byte 4: not UTF-8"),
        (4, "column 'text': null"),
    ]
    assert sum(b.lines for b in batches) == 5


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_columns(tmp_path, suffix):
    file = write(tmp_path / f"a{suffix}", pa.table({"n": [1], "title": ["A"], "text": ["b"]}))
    assert texts_of(read(file, keys=("title", "text"))[0]) == ["A\n\nb"]
    with pytest.raises(DataError, match=r"no column 'body'; columns here: \['n', 'title', 'text'"):
        read(file, keys=("body",))
    with pytest.raises(DataError, match="column 'n' is int64, not string"):
        read(file, keys=("text", "n"))


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_a_damaged_table_is_named(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    write(file, pa.table({"text": TEXTS}))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"a\{suffix}: cannot be read as \w+: ") as caught:
        read(str(file))
    assert "\n" not in str(caught.value)


def test_dataset_saved_to_disk(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "d", num_shards=3)
    files = find_files([str(tmp_path / "d")])
    assert [text for file in files for text in texts_of(read(file)[0])] == TEXTS
