import pytest

from mixtron.data_prep import readers
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.readers import LineRange, find_files, parse_line, plan_units, read_unit

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


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("start", [b"", readers.BOM])
@pytest.mark.parametrize("last_end", [True, False])
def test_any_cut_of_a_file_gives_the_same_lines(tmp_path, monkeypatch, start, end, last_end):
    lines = [b'{"text":"%d%s"}' % (i, b"x" * (7 * i % 23)) for i in range(9)]
    file = tmp_path / "a.jsonl"
    file.write_bytes(start + end.join(lines) + (end if last_end else b""))
    expected = [parse_line(line, ("text",)) for line in lines]
    for unit_bytes in (1, 2, 3, 7, 16, 31, 64, 1000):
        monkeypatch.setattr(readers, "UNIT_BYTES", unit_bytes)
        read = [read_unit(unit, ("text",)) for unit in plan_units([str(file)])]
        assert [text for documents in read for text in documents.texts] == expected
        assert sum(documents.lines for documents in read) == 9
        assert sum(documents.input_bytes for documents in read) == file.stat().st_size
        assert not any(documents.rejected for documents in read)


def test_text_files_are_grouped_by_size_and_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 10)
    for name, content in {"a": b"12345", "b": b"67890", "c": b"1\n", "d": b"x" * 99}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    units = list(plan_units(find_files([str(tmp_path)])))
    assert [[file[-5:-4] for file in unit.files] for unit in units] == [
        ["a", "b"],
        ["d", "c"],
        ["d"],
    ]
    read = read_unit(units[1], ("text",))
    assert [bad.reason for bad in read.rejected] == ["byte 3: not UTF-8"]
    assert read.texts == ["1\n"]


def test_files_are_sorted_and_each_found_once(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.txt", "sub/c.md", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    expected = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "sub/c.md")]
    assert find_files([str(tmp_path)]) == expected
    assert find_files([f"{tmp_path}/sub/*", f"{tmp_path}/b*", f"{tmp_path}/a.txt"]) == expected
    with pytest.raises(DataError, match=r"a\.txt: given twice"):
        find_files([f"{tmp_path}/*.txt", f"{tmp_path}/sub/../a.txt"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing*.jsonl", r"nothing\*\.jsonl: 0 files matched"),
        ("absent.txt", r"absent\.txt: 0 files matched"),
        ("empty", "empty: 0 files matched"),
        ("a.jsonl.gz", r"a\.jsonl\.gz: unknown format '\.gz'"),
    ],
)
def test_inputs_that_are_no_corpus(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=message):
        find_files([str(tmp_path / name)])


def test_a_file_that_shrank_is_noticed(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text":"a"}\n')
    with pytest.raises(DataError, match="became shorter"):
        read_unit(LineRange(str(file), 0, 100), ("text",))
