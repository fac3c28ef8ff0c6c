"""`mixtron ckpt`, on a small checkpoint that an older version wrote and this repository keeps."""

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from mixtron.launch.checkpoint import load_checkpoint
from mixtron.launch.checkpoint_cli import app
from mixtron.launch.checkpoint_files import CheckpointError, read_manifest
from mixtron.launch.checkpoint_tensors import StoredTensors
from mixtron.launch.checkpoint_tools import from_safetensors, to_safetensors
from mixtron.megatron_ext.config import ParallelConfig
from tests.helpers.ranks import run_on_ranks
from tests.launch.test_checkpoint import alter
from tests.launch.toy_run import build

STORED = Path(__file__).parent / "stored"
SHAPE = {"layers": 2, "hidden_size": 8, "ffn_hidden_size": 10, "pattern": ["full", "kla"]}
NEXT_LOSSES = [4.5924432426691055, 4.551399998366833]
"""Of the run that wrote it, in steps 3 and 4."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED / "format_1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "step_00000002"


@pytest.fixture
def copy(stored, tmp_path) -> Path:
    return shutil.copytree(stored, tmp_path / "checkpoints/step_00000002")


def ckpt(*arguments) -> tuple[int, str]:
    """Exit code and output of a command; an error's line is part of the output."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    failure = result.exception
    if isinstance(failure, CheckpointError):
        return failure.exit_code, result.stdout + str(failure)
    assert failure is None or isinstance(failure, SystemExit), result.exc_info
    return result.exit_code, result.stdout


def losses_after(path: Path, parallel: ParallelConfig) -> list[float]:
    run = build(parallel, seed=99, **SHAPE)
    state = load_checkpoint(path, run.wrapped, run.optimizer, run.ranks)
    assert state["progress"]["samples"] == 2 * state_batch(path)
    run.step = 2
    return [loss for loss, _ in run.train(2)]


def state_batch(path: Path) -> int:
    config = read_manifest(path)["config"]
    return config["training"]["global_batch_tokens"] // config["data"]["sequence_length"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_format_is_still_read(stored, world_size):
    parallel = ParallelConfig(tensor=world_size)
    for losses in run_on_ranks(world_size, losses_after, stored, parallel):
        assert losses == pytest.approx(NEXT_LOSSES, rel=1e-6)
    assert read_manifest(stored)["format_version"] == 2


def test_ls_shows_what_is_there_and_why_something_is_not_complete(copy):
    shutil.copytree(copy, copy.with_name("step_00000005"))
    (copy.with_name("step_00000005") / "__0_0.distcp").unlink()
    copy.with_name(".step_00000006.tmp-0a1b2c3d").mkdir()
    for folder in (copy.parent, copy.parent.parent):
        code, said = ckpt("ls", folder)
        assert code == 0
        lines = said.splitlines()
        assert lines[1].split() == ["2", "not", "recorded", "0.3", "MiB", "one", "rank", "complete"]
        assert "NOT COMPLETE" in lines[2]
        assert "__0_0.distcp: missing" in lines[2]
        assert "not finished" in lines[3]
    assert ckpt("ls", copy.parent / "nowhere")[0] == 2


def zero(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"")


def truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (zero, "__0_0.distcp: 0 bytes, the manifest says"),
        (truncate, "bytes, the manifest says"),
        (lambda path: alter(path / "__0_0.distcp"), "__0_0.distcp: contents differ"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp: missing"),
        (lambda path: alter(path / ".metadata"), ".metadata: contents differ"),
        (lambda path: (path / ".metadata").write_bytes(b"x"), ".metadata: cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: missing"),
    ],
    ids=["zero bytes", "truncated", "bit", "missing", "metadata", "no metadata", "no manifest"],
)
def test_verify_names_what_is_damaged(copy, damage, said):
    assert ckpt("verify", copy) == (0, f"{copy}: good\n")
    damage(copy)
    code, output = ckpt("verify", copy.parent)
    assert code == 2
    assert said in output
    assert output.endswith(f"{copy}: NOT GOOD\n")


def test_verify_finds_numbers_that_are_not_finite(stored, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, float("nan"))
        to_safetensors(stored, tmp_path / "bad.safetensors", list, optimizer=False)
    [path] = run_on_ranks(1, from_safetensors, tmp_path / "bad.safetensors", tmp_path / "root")
    code, said = ckpt("verify", path)
    assert code == 2
    assert "1 elements of decoder.final_layernorm.weight are not finite" in said


def spoil(patch: pytest.MonkeyPatch, value: float) -> None:
    """Another first element of one tensor, wherever it is read."""
    tensor = StoredTensors.tensor

    def spoilt(self, name):
        whole = tensor(self, name)
        if name == "decoder.final_layernorm.weight":
            whole[0] = value
        return whole

    patch.setattr(StoredTensors, "tensor", spoilt)


def test_diff_names_values_and_tensors(stored, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, 2.0)
        to_safetensors(stored, tmp_path / "other.safetensors", list, optimizer=False)
    [other] = run_on_ranks(1, from_safetensors, tmp_path / "other.safetensors", tmp_path / "root")
    code, said = ckpt("diff", stored, other)
    assert code == 0
    assert "layout tensor: 1 | absent" in said
    assert "decoder.final_layernorm.weight: largest difference 1.0" in said
    assert f"only in {stored}: optimizer.state.exp_avg.decoder.final_layernorm.weight, " in said
    names = StoredTensors(stored).names
    weights = [name for name in names if not name.startswith("optimizer.")]
    moments = len(names) - len(weights)
    assert said.endswith(
        f"{len(weights) - 1} tensors are equal bit for bit, 1 differ, {moments} are in one alone\n"
    )
    same = f"{len(names)} tensors are equal bit for bit, 0 differ, 0 are in one alone\n"
    assert ckpt("diff", stored, stored) == (0, same)


def test_one_file_and_back_is_the_same_checkpoint(stored, tmp_path):
    file = tmp_path / "model.safetensors"
    assert ckpt("convert", stored, file, "--optimizer") == (0, f"{file}: written\n")
    tensors, reader = load_file(file), StoredTensors(stored)
    assert sorted(tensors) == reader.names
    for name, tensor in tensors.items():
        assert torch.equal(tensor, reader.tensor(name))
    [path] = run_on_ranks(1, from_safetensors, file, tmp_path / "root")
    assert ckpt("verify", path)[0] == 0
    assert "0 differ, 0 are" in ckpt("diff", stored, path)[1]
    for losses in run_on_ranks(2, losses_after, path, ParallelConfig(pipeline=2)):
        assert losses == pytest.approx(NEXT_LOSSES, rel=1e-6)


def test_files_that_cannot_be_converted_are_refused(stored, tmp_path):
    assert ckpt("convert", stored, tmp_path / "model.bin")[0] == 2
    (tmp_path / "x.safetensors").write_bytes(b"no")
    code, said = ckpt("convert", tmp_path / "x.safetensors", tmp_path)
    assert code == 2
    assert "x.safetensors: not a file that `mixtron ckpt convert` wrote" in said
