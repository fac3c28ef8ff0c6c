import zipfile

import datasets
import pytest

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.storage import find_files, open_input, size_and_state


def test_files_are_sorted_and_each_found_once(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.txt", "sub/c.md", ".hidden.txt"):
        (tmp_path / name).write_text("x")
    expected = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "sub/c.md")]
    assert find_files([str(tmp_path)]) == expected
    assert find_files([f"{tmp_path}/sub/*", f"{tmp_path}/b*", f"{tmp_path}/a.txt"]) == expected
    with pytest.raises(DataError, match=r"a\.txt: given twice"):
        find_files([f"{tmp_path}/*.txt", f"{tmp_path}/sub/../a.txt"])


@pytest.mark.parametrize("name", ["nothing*.jsonl", "absent.txt", "empty"])
def test_nothing_matched(tmp_path, name):
    (tmp_path / "empty").mkdir()
    for pattern in (tmp_path / name, f"file://{tmp_path}/{name}"):
        with pytest.raises(DataError, match="0 files matched"):
            find_files([str(pattern)])


def test_urls(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_text(name)
    url = f"file://{tmp_path}"
    names = [f"{url}/{name}" for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl")]
    assert find_files([url]) == names
    assert find_files([f"{url}/*.jsonl"]) == names[:2]
    assert find_files([names[0]]) == names[:1]
    with open_input(names[2]) as f:
        assert f.read() == b"sub/c.jsonl"
    before = size_and_state(names[0])
    assert before[0] == 7
    (tmp_path / "a.jsonl").write_text("another")
    assert size_and_state(names[0]) != before
    with pytest.raises(DataError, match="nosuch://"):
        find_files(["nosuch://bucket/file.jsonl"])


def test_chained_url(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as z:
        z.writestr("a.jsonl", '{"text":"zipped"}\n')
    url = f"zip://a.jsonl::file://{tmp_path}/z.zip"
    assert find_files([url]) == [url]
    assert size_and_state(url)[0] == 18
    with open_input(url) as f:
        assert f.read() == b'{"text":"zipped"}\n'


def test_dataset_saved_to_disk(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(10)]})
    dataset.save_to_disk(tmp_path / "d", num_shards=2)
    found = find_files([str(tmp_path / "d")])
    assert [f.rpartition("/")[2] for f in found] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]
    (tmp_path / "d" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: named in .*state\.json"):
        find_files([str(tmp_path / "d")])
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"several splits; .* \(train, test\)"):
        find_files([str(tmp_path / "both")])
