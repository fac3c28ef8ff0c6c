"""`mixtron ckpt convert --to path`: a softmax-RoPE run becomes a PaTH run that trains on."""

from pathlib import Path

import pytest
import torch

from mixtron.launch.checkpoint_files import CheckpointError
from mixtron.launch.checkpoint_tensors import StoredTensors
from mixtron.launch.config import load_config
from tests.helpers.jobs import rows, small_config, write_config
from tests.helpers.ranks import run_on_ranks
from tests.launch.short_runs import ONE_RANK, run_ranks

PLAIN = ["model.dropout=0", "logging.tensorboard=false"]


def convert(source: Path, target: Path, forget_gate: bool) -> None:
    """What the command does but for its end, which closes the world of one rank."""
    from mixtron.launch.checkpoint_cli import convert_mixers

    convert_mixers(source, target, forget_gate=forget_gate)


def convert_refused(source: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        convert(source, target, forget_gate=False)
    return str(refused.value)


def held_out(run_dir: Path) -> float:
    """The last validation loss."""
    return [row["validation/speeches"] for row in rows(run_dir) if "validation/speeches" in row][-1]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> tuple[Path, list[float]]:
    """A run of KLA and softmax attention with RoPE on two tensor ranks, and its losses."""
    folder = tmp_path_factory.mktemp("softmax")
    config = write_config(folder / "config.yaml", small_config(corpus, folder / "run"))
    return folder / "run", run_ranks(2, config, PLAIN)[0].losses


@pytest.mark.parametrize("forget_gate", [False, True], ids=["path", "path_fox"])
def test_a_softmax_run_becomes_a_path_run_that_trains_on(trained, tmp_path, forget_gate):
    source, before = trained
    run_on_ranks(1, convert, source, tmp_path / "path", forget_gate)
    config = load_config(tmp_path / "path/config.yaml")
    assert config.model.layer_mixers == ["kla", "path"]
    path, softmax = config.mixers["path"], load_config(source / "config.yaml").mixers["attention"]
    assert (path.type, path.forget_gate) == ("path", forget_gate)
    assert all(
        getattr(path, field) == getattr(softmax, field)
        for field in ("heads", "kv_heads", "head_dim", "qk_norm")
    )

    old = StoredTensors(source / "checkpoints/step_00000012")
    new = StoredTensors(tmp_path / "path/checkpoints/step_00000000")
    kept = {n for n in old.names if not n.startswith("optimizer.")}
    added = {n for n in new.names if not n.startswith("optimizer.")} - kept
    assert all(torch.equal(old.tensor(name), new.tensor(name)) for name in kept)
    assert all("layers.1.self_attention" in name for name in added)
    bias = new.tensor("decoder.layers.1.self_attention.beta_bias")
    assert float(2 * bias.sigmoid().max()) < 0.005
    assert not new.tensor("decoder.layers.1.self_attention.in_proj.weight.beta").any()

    [outcome] = run_ranks(1, tmp_path / "path/config.yaml", [*PLAIN, *ONE_RANK])
    assert outcome.code == 0, outcome.error
    # Where the softmax run had come to, without its positions, and lower from there.
    assert outcome.losses[0] < (before[0] + before[-1]) / 2
    assert held_out(tmp_path / "path") < held_out(source)


def test_a_run_without_softmax_attention_is_refused(trained, tmp_path):
    run_on_ranks(1, convert, trained[0], tmp_path / "path", False)
    [said] = run_on_ranks(1, convert_refused, tmp_path / "path", tmp_path / "again")
    assert said.endswith("--to path converts softmax_attention; its layers are kla, path")


def test_options_that_do_not_go_together_are_refused(tmp_path):
    from mixtron.launch import checkpoint_cli

    with pytest.raises(CheckpointError, match="--forget-gate: goes with --to path"):
        checkpoint_cli.convert(tmp_path, tmp_path / "x", forget_gate=True)
    with pytest.raises(CheckpointError, match="--optimizer: with --to"):
        checkpoint_cli.convert(tmp_path, tmp_path / "x", optimizer=True, to="path")
