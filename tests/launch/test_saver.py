"""Saving beside training: what is committed when, and what becomes of writers that fail."""

import errno
import math
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from mixtron.launch import checkpoint_writer, loop, saver
from mixtron.launch.checkpoint import PendingSave, find_checkpoint, load_checkpoint
from mixtron.launch.checkpoint_files import CheckpointError, list_checkpoints
from mixtron.launch.checkpoint_writer import HostMemory
from mixtron.megatron_ext.config import ParallelConfig
from tests.helpers.jobs import rows
from tests.helpers.ranks import RankFailure, run_on_ranks
from tests.launch.short_runs import run_ranks, trained, write
from tests.launch.toy_run import build

QUICK = ["logging.tensorboard=false", "data.validation={}"]


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def trained_while(
    config: str, overrides: list[str], stop_at: int | None, module, name: str, held, after_step
):
    """Trains with a function of a module held, and something done after each step."""
    train_step = loop.train_step

    def step(run):
        values = train_step(run)
        after_step(run)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, held)
        patch.setattr(loop, "train_step", step)
        return trained(config, overrides, stop_at)


def train_with_held_writer(
    config: str, overrides: list[str], released_in: int, stop_at: int | None
) -> tuple:
    """Trains with a writer that is held until some step; `latest` as each step ends."""
    release, latest, write_file = threading.Event(), [], checkpoint_writer.write_file

    def held(*args):
        assert release.wait(60)
        return write_file(*args)

    def look(run):
        file = run.saver.root / "latest"
        latest.append(file.read_text().strip() if file.exists() else None)
        if run.progress.step == released_in:
            release.set()

    what = (checkpoint_writer, "write_file", held)
    return trained_while(config, overrides, stop_at, *what, look), latest


def test_training_goes_on_and_latest_follows_the_commit(corpus, tmp_path):
    config = write(corpus, tmp_path)
    overrides = [*QUICK, "checkpoint.save_every_steps=3", "checkpoint.keep=9"]
    (outcome, latest), _ = run_on_ranks(2, train_with_held_writer, str(config), overrides, 5, None)
    assert outcome.code == 0
    assert latest[:5] == [None] * 5
    assert latest[6] == "step_00000003"
    found = list_checkpoints(tmp_path / "run/checkpoints")
    assert [(i.step, i.complete) for i in found] == [(s, True) for s in (3, 6, 9, 12)]
    said = [line for line in outcome.said.splitlines() if "step 3 |" in line or " 4/12" in line]
    assert ["saving" in said[0], "4/12" in said[1], " saved " in said[2]] == [True] * 3
    timed = [row for row in rows(tmp_path / "run") if "checkpoint/blocked_s" in row]
    assert timed[0]["checkpoint/blocked_s"] < timed[0]["checkpoint/seconds"]


def train_with_held_deletion(config: str, overrides: list[str]) -> tuple:
    """Trains while the first deletion is held, and says what lay in the folder while it was."""
    release, seen, delete = threading.Event(), [], saver.delete

    def held(folders):
        assert not folders or release.wait(60)
        delete(folders)

    def look(run):
        while run.progress.step == 10 and run.saver.writing:
            time.sleep(0.01)
        if run.progress.step == 11:
            seen.extend(names(run.saver.root))
            release.set()

    return trained_while(config, overrides, None, saver, "delete", held, look), seen


def test_training_does_not_wait_for_deletions_and_the_next_save_does(corpus, tmp_path):
    config = write(corpus, tmp_path)
    overrides = [*QUICK, "checkpoint.save_every_steps=3", "checkpoint.keep=2"]
    (outcome, seen), _ = run_on_ranks(2, train_with_held_deletion, str(config), overrides)
    assert outcome.code == 0
    removed, *complete = seen
    assert removed.startswith(".step_00000003.removed-")
    assert complete == ["latest", "step_00000006", "step_00000009"]
    assert names(tmp_path / "run/checkpoints") == ["latest", "step_00000009", "step_00000012"]


def test_a_signal_waits_for_the_checkpoint_under_way(corpus, tmp_path):
    config = write(corpus, tmp_path)
    overrides = [*QUICK, "checkpoint.save_every_steps=3"]
    (outcome, latest), _ = run_on_ranks(2, train_with_held_writer, str(config), overrides, 5, 5)
    assert outcome.code == 75
    assert latest == [None] * 5
    root = tmp_path / "run/checkpoints"
    assert names(root) == ["latest", "step_00000003", "step_00000005"]
    said = outcome.said
    assert (
        said.index("step 3 | saved") < said.index("step 5 | saving") < said.index("step 5 | saved")
    )


def die_while_writing(config: str, overrides: list[str]) -> None:
    """Rank 1 is gone in the step after the second save began."""
    write_file, train_step = checkpoint_writer.write_file, loop.train_step

    def held(path, pieces):
        if "step_00000006" in str(path):
            threading.Event().wait(60)
        return write_file(path, pieces)

    def step(run):
        if run.progress.step == 7 and run.ranks.world_rank == 1:
            os._exit(9)
        return train_step(run)

    checkpoint_writer.write_file, loop.train_step = held, step
    trained(config, overrides, None)


def test_a_death_between_begin_and_commit_leaves_the_previous_one(corpus, tmp_path):
    config = write(corpus, tmp_path)
    overrides = [*QUICK, "checkpoint.save_every_steps=3"]
    with pytest.raises(RankFailure, match="rank 1"):
        run_on_ranks(2, die_while_writing, str(config), overrides)
    root = tmp_path / "run/checkpoints"
    assert (root / "latest").read_text() == "step_00000003\n"
    assert any(".step_00000006.tmp-" in name for name in names(root))
    outcome = run_ranks(2, config, overrides)[0]
    assert (outcome.code, f"resumed {root}/step_00000003" in outcome.said) == (0, True)
    assert not [name for name in names(root) if "tmp" in name]


def train_on_a_full_disk(config: str, overrides: list[str]):
    """The second save meets a full disk, on rank 1 alone."""
    write_piece = checkpoint_writer.write_piece

    def full(stream, data):
        if "step_00000006" in stream._raw.name and "/__1_" in stream._raw.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_piece(stream, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_piece", full)
        return trained(config, overrides, None)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_ends_every_rank_and_keeps_the_previous_one(corpus, tmp_path, asynchronous):
    config = write(corpus, tmp_path)
    mode = f"checkpoint.asynchronous={asynchronous}"
    overrides = [*QUICK, "checkpoint.save_every_steps=3", mode]
    first, second = run_on_ranks(2, train_on_a_full_disk, str(config), overrides)
    assert (first.code, first.error) == (second.code, second.error)
    assert first.code == 76
    assert first.error == "rank 1: OSError: [Errno 28] No space left on device"
    assert names(tmp_path / "run/checkpoints") == ["latest", "step_00000003"]


def train_until_the_folder_is_gone(config: str, overrides: list[str]):
    train_step = loop.train_step

    def step(run):
        if run.progress.step == 2 and run.ranks.is_first:
            run.saver.root.rename(run.saver.root.with_name("moved"))
            run.saver.root.write_text("no folder")
        return train_step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        return trained(config, overrides, None)


def test_a_folder_that_cannot_be_written_ends_every_rank(corpus, tmp_path):
    config = write(corpus, tmp_path)
    for outcome in run_on_ranks(2, train_until_the_folder_is_gone, str(config), QUICK):
        assert outcome.code == 76
        assert "checkpoints'" in outcome.error


def train_with_bad_gradients(config: str, overrides: list[str], stop_at: int):
    """No gradient is finite from step 5 on."""
    clip_and_step, steps = loop.clip_and_step, []

    def poisoned(optimizer, clip, loss):
        steps.append(1)
        return (math.nan, False) if len(steps) >= 5 else clip_and_step(optimizer, clip, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "clip_and_step", poisoned)
        return trained(config, overrides, stop_at)


def test_nothing_saved_in_a_row_of_bad_steps_takes_a_good_ones_place(corpus, tmp_path):
    config = write(corpus, tmp_path)
    overrides = [*QUICK, "checkpoint.save_every_steps=1", "checkpoint.keep=2"]
    for outcome in run_on_ranks(2, train_with_bad_gradients, str(config), overrides, 7):
        assert outcome.code == 75
    steps = [info.step for info in list_checkpoints(tmp_path / "run/checkpoints")]
    assert steps == [3, 4, 7]


def test_every_mth_checkpoint_stays(corpus, tmp_path):
    config = write(corpus, tmp_path)
    kept = ["checkpoint.save_every_steps=1", "checkpoint.keep=2", "checkpoint.keep_every_steps=5"]
    (tmp_path / "run/checkpoints/step_00000001.mine").mkdir(parents=True)
    (tmp_path / "run/checkpoints/notes.txt").write_text("mine")
    assert run_ranks(2, config, [*QUICK, *kept])[0].code == 0
    root = tmp_path / "run/checkpoints"
    assert [info.step for info in list_checkpoints(root)] == [5, 10, 11, 12]
    assert {"step_00000001.mine", "notes.txt"} <= set(names(root))


def start_on_a_small_disk(config: str):
    full = shutil.disk_usage(config)._replace(free=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        return trained(config, [], None)


def test_a_disk_that_holds_no_checkpoint_is_refused_at_the_start(corpus, tmp_path):
    for outcome in run_on_ranks(2, start_on_a_small_disk, str(write(corpus, tmp_path))):
        assert outcome.code == 2
        assert "GiB are free there, but a checkpoint takes" in outcome.error


# A rank's part


def save_while_training(root: Path, bf16: bool, files: int):
    """Hash at the save, the names of its files, and hash of what was loaded."""
    run = build(ParallelConfig(), bf16=bf16)
    run.train(2)
    sha, release, write_file = run.sha256(), threading.Event(), checkpoint_writer.write_file

    def held(*args):
        assert release.wait(60)
        return write_file(*args)

    memory = HostMemory(run.ranks.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_file", held)
        patch.setattr(checkpoint_writer, "MIN_FILE_BYTES", 1 if files > 1 else 1 << 30)
        parts = (run.wrapped, run.optimizer, run.ranks)
        pending = PendingSave(root, 2, *parts, state={}, config={}, memory=memory)
        assert pending.running
        run.train(1)
        release.set()
        report = pending.finish()
    other = build(ParallelConfig(), bf16=bf16, seed=99)
    path = find_checkpoint(root, "auto", other.ranks)
    assert path == report.path
    load_checkpoint(path, other.wrapped, other.optimizer, other.ranks)
    return sha, names(path), other.sha256()


@pytest.mark.parametrize(("bf16", "files"), [(False, 4), (True, 1)])
def test_what_is_saved_is_the_state_at_the_save(tmp_path, bf16, files):
    for saved, found, loaded in run_on_ranks(2, save_while_training, tmp_path, bf16, files):
        assert saved == loaded
        for rank in range(2):
            assert len([name for name in found if name.startswith(f"__{rank}_")]) == files


def test_copies_have_the_values_and_are_no_views_of_them():
    item = object()
    tensors = [
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.empty(0, 7),
    ]
    copies = HostMemory(torch.device("cpu")).copy([(item, t) for t in tensors])  # type: ignore
    for tensor, (_, copy) in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.nbytes or copy.data_ptr() != tensor.data_ptr()


def test_copies_that_do_not_fit_into_memory_are_refused():
    with pytest.raises(CheckpointError, match=r"needs [\d,.]+ GiB of host memory") as caught:
        HostMemory(torch.device("cpu")).reserve(1 << 50)
    assert caught.value.exit_code == 2
