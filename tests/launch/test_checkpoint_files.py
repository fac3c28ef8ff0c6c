"""What is on the disk after a save died at any point, and what is seen of damage."""

import json
import os
import shutil

import pytest

from mixtron.launch import checkpoint_files
from mixtron.launch.checkpoint_files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    begin,
    commit,
    list_checkpoints,
    read_manifest,
    sync_and_hash,
    unfinished,
    verify_checkpoint,
)

STEPS_OF_A_SAVE = ("fsync", "rename", "replace", "rmtree")


def save(root, step, content=b"weights"):
    """One rank's save, without the tensors."""
    temporary = begin(root, step)
    file = temporary / "__0_0.distcp"
    file.write_bytes(content * step)
    files = {file.name: sync_and_hash(file)}
    return commit(temporary, step, {"format_version": 2, "step": step, "files": files})


def die_after(calls: int, monkeypatch) -> None:
    """Ends the process at the given call of those that a save's safety hangs on."""
    made = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal made
            if made == calls:
                os._exit(9)
            made += 1
            return function(*args, **kwargs)

        return call

    for name in STEPS_OF_A_SAVE:
        module = shutil if name == "rmtree" else os
        monkeypatch.setattr(module, name, counted(getattr(module, name)))


def in_child(function) -> int:
    """The exit code of a forked process that runs the function."""
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("last_step", [1, 2], ids=["new step", "same step again"])
def test_a_save_that_dies_anywhere_leaves_a_checkpoint_and_never_half_of_one(
    tmp_path, monkeypatch, last_step
):
    deaths = 0
    for calls in range(50):
        root = tmp_path / str(calls)
        save(root, 1)
        if last_step == 2:
            save(root, 2)

        def dying_save(calls=calls, root=root):
            die_after(calls, monkeypatch)
            save(root, 2, b"changed")

        code = in_child(dying_save)
        found = list_checkpoints(root)
        assert all(info.complete for info in found), calls
        for info in found:
            verify_checkpoint(info.path, hashes=True)
        assert found[0].step == 1
        assert (root / (root / LATEST).read_text().strip()).is_dir() or last_step == 2
        if code == 0:
            break
        assert code == 9
        deaths += 1
        checkpoint_files.delete(unfinished(root))
        assert {p.name for p in root.iterdir()} <= {
            "step_00000001",
            "step_00000002",
            LATEST,
            ".latest.tmp",
        }
        assert save(root, 2).name == "step_00000002"
    assert code == 0
    assert deaths >= 7
    assert found[-1].step == 2


def test_latest_names_the_newest_after_each_commit(tmp_path):
    for step in (1, 2, 10):
        assert save(tmp_path, step).name == (tmp_path / LATEST).read_text().strip()
    assert [i.step for i in list_checkpoints(tmp_path)] == [1, 2, 10]


def truncate(path):
    (path / "__0_0.distcp").write_bytes(b"w")


def empty(path):
    (path / "__0_0.distcp").write_bytes(b"")


def delete(path):
    (path / "__0_0.distcp").unlink()


def delete_manifest(path):
    (path / MANIFEST).unlink()


def garble_manifest(path):
    (path / MANIFEST).write_text('{"files"')


def edit_manifest(path):
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["step"] = 7
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "__0_0.distcp: 1 bytes, the manifest says 14"),
        (empty, "__0_0.distcp: 0 bytes"),
        (delete, "__0_0.distcp: missing"),
        (delete_manifest, "manifest.json: missing"),
        (garble_manifest, "manifest.json: not a manifest"),
        (edit_manifest, "manifest.json: altered"),
    ],
)
def test_damage_is_seen_without_reading_the_files(tmp_path, damage, said):
    path = save(tmp_path, 2)
    damage(path)
    with pytest.raises(CheckpointError, match=said) as caught:
        verify_checkpoint(path, hashes=False)
    assert caught.value.exit_code == 2
    (info,) = list_checkpoints(tmp_path)
    assert not info.complete
    assert info.reason == str(caught.value)


def test_an_altered_file_of_the_same_size_is_seen_by_its_hash(tmp_path):
    path = save(tmp_path, 2)
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"w", b"W", 1))
    verify_checkpoint(path, hashes=False)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: contents differ"):
        verify_checkpoint(path, hashes=True)


def test_another_format_is_refused(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoint_files, "FORMAT_VERSION", 1)
    with pytest.raises(CheckpointError, match=r"format_version 2; this version .* up to 1"):
        read_manifest(path)


def test_other_files_and_folders_are_no_checkpoints(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "step_00000004").write_text("a file")
    (tmp_path / "step_best").mkdir()
    (tmp_path / ".step_00000005.tmp-0a1b2c3d").mkdir()
    assert [i.step for i in list_checkpoints(tmp_path)] == [3]
    assert list_checkpoints(tmp_path / "nowhere") == []
