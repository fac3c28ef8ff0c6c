"""Saving, dying, choosing, loading and resharding, on real ranks with a real model."""

import logging
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from mixtron.launch import checkpoint, checkpoint_folder, checkpoint_writer
from mixtron.launch.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from mixtron.launch.checkpoint_files import (
    CheckpointError,
    delete,
    list_checkpoints,
    read_manifest,
)
from mixtron.launch.checkpoint_folder import check_shared_folder, set_aside_old
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.optimizer_state import STATES
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel
from tests.helpers.ranks import RankFailure, renew_ranks, run_on_ranks
from tests.launch import toy_run
from tests.launch.toy_run import ToyRun, build

ONE = ParallelConfig()
TP2 = ParallelConfig(tensor=2)
TP2_SP = ParallelConfig(tensor=2, sequence=True)
PP2 = ParallelConfig(pipeline=2)
PP2_VPP2 = ParallelConfig(pipeline=2, virtual_pipeline=2)
CP2 = ParallelConfig(context=2)

STATE = {"progress": {"step": 3}, "cursors": [12, 0.25, None, "a"]}


# What ranks do


def save(run: ToyRun, root: Path):
    return save_checkpoint(
        root, run.step, run.wrapped, run.optimizer, run.ranks, state=STATE, config={"seed": 3}
    )


def resumed(root: Path, parallel: ParallelConfig, resume: str = "auto", **model) -> ToyRun:
    """A run that knows nothing but the checkpoint."""
    run = build(parallel, seed=99, **model)
    path = find_checkpoint(root, resume, run.ranks)
    assert path is not None
    assert load_checkpoint(path, run.wrapped, run.optimizer, run.ranks) == STATE
    run.step = read_manifest(path)["step"]
    return run


def straight(parallel: ParallelConfig, steps: int, model: dict):
    run = build(parallel, **model)
    return run.train(steps), run.sha256()


def train_and_save(root: Path, parallel: ParallelConfig, steps: int, model: dict):
    run = build(parallel, **model)
    run.train(steps)
    save(run, root)


def resume(root: Path, parallel: ParallelConfig, steps: int, model: dict):
    run = resumed(root, parallel, **model)
    return run.train(steps), run.sha256()


def convert(root: Path, other: Path, parallel: ParallelConfig, steps: int):
    """Saves again what was loaded, then goes on; returns its losses and the warnings."""
    with Warnings() as warnings:
        run = resumed(root, parallel)
    save(run, other)
    return run.train(steps), warnings.lines


def world() -> Ranks:
    return init_model_parallel(seed=1, device=init_distributed())


class Warnings(logging.Handler):
    """What this rank logs while it is open."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("mixtron").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("mixtron").removeHandler(self)


def error_of(function, *args) -> tuple[str, int]:
    """The line and exit code of the CheckpointError that a call must raise."""
    try:
        function(*args)
    except CheckpointError as error:
        return str(error), error.exit_code
    raise AssertionError("no CheckpointError")


def losses(history) -> list[float]:
    return [loss for loss, _ in history]


# Continuing


@pytest.mark.parametrize(
    ("world_size", "parallel", "model"),
    [
        pytest.param(1, ONE, {"dropout": 0.1}, id="one rank"),
        pytest.param(2, TP2_SP, {"dropout": 0.1}, id="tp2 sp"),
        pytest.param(2, ONE, {"dropout": 0.1, "ffn_hidden_size": 67}, id="dp2, odd shapes"),
        pytest.param(2, PP2, {"dropout": 0.1, "tied_embeddings": True}, id="pp2, tied"),
        pytest.param(2, PP2_VPP2, {"dropout": 0.1}, id="pp2 vpp2"),
        pytest.param(2, TP2, {"dropout": 0.1, "bf16": True}, id="tp2, bf16"),
        pytest.param(2, CP2, {"dropout": 0.1, "pattern": ["full", "window"]}, id="cp2"),
    ],
)
def test_three_steps_a_new_process_and_three_more_equal_six(tmp_path, world_size, parallel, model):
    expected = run_on_ranks(world_size, straight, parallel, 6, model)
    run_on_ranks(world_size, train_and_save, tmp_path, parallel, 3, model)
    renew_ranks()
    continued = run_on_ranks(world_size, resume, tmp_path, parallel, 3, model)
    for (history, sha), (rest, sha_after) in zip(expected, continued, strict=True):
        assert history[3:] == rest
        assert sha == sha_after


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A checkpoint of three steps on one rank, and losses and hash of six steps."""
    root = tmp_path_factory.mktemp("one_rank")
    [(history, sha_6)] = run_on_ranks(1, straight, ONE, 6, {})
    run_on_ranks(1, train_and_save, root, ONE, 3, {})
    return root, history, sha_6


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        pytest.param(2, TP2, id="tp2"),
        pytest.param(2, ONE, id="dp2"),
        pytest.param(2, PP2, id="pp2"),
        pytest.param(2, PP2_VPP2, id="pp2 vpp2"),
        pytest.param(4, TP2_SP, id="tp2 sp dp2"),
        pytest.param(4, ParallelConfig(tensor=2, pipeline=2), id="tp2 pp2"),
    ],
)
def test_another_layout_goes_on_the_same_and_gives_back_the_same_bits(
    tmp_path, one_rank, world_size, parallel
):
    root, history, sha_6 = one_rank
    converted = run_on_ranks(world_size, convert, root, tmp_path, parallel, 3)
    for rank, (rest, warnings) in enumerate(converted):
        assert losses(rest) == pytest.approx(losses(history[3:]), abs=1e-6)
        assert ["saved in another layout" in line for line in warnings] == [True] * (rank == 0)
    [(rest, sha)] = run_on_ranks(1, resume, tmp_path, ONE, 3, {})
    assert rest == history[3:]
    assert sha == sha_6


def test_tied_embeddings_move_between_pipeline_layouts(tmp_path):
    model = {"tied_embeddings": True}
    [(history, _)] = run_on_ranks(1, straight, ONE, 5, model)
    run_on_ranks(2, train_and_save, tmp_path, PP2, 3, model)
    [(rest, _)] = run_on_ranks(1, resume, tmp_path, ONE, 2, model)
    # Two stages sum the tied weight's gradient in another order than one: seen at 3e-7.
    assert losses(rest) == pytest.approx(losses(history[3:]), rel=1e-6)


def weights_alone(root: Path, parallel: ParallelConfig):
    run = build(parallel, seed=99)
    bare = [chunk.module for chunk in run.wrapped]
    load_weights(root / "step_00000003", bare, run.ranks)
    run.step = 3
    return losses(run.train(1))


@pytest.mark.parametrize(("world_size", "parallel"), [(1, ONE), (2, TP2), (2, PP2)])
def test_weights_load_without_the_optimizer(one_rank, world_size, parallel):
    root, history, _ = one_rank
    for [loss] in run_on_ranks(world_size, weights_alone, root, parallel):
        assert loss == pytest.approx(history[3][0], abs=1e-6)


def reload_and_replay(root: Path):
    """Six steps, and the last three once more from the checkpoint of the third, in one process."""
    run = build(ONE, ffn_hidden_size=67, dropout=0.1)
    run.train(3)
    save(run, root)
    first = run.train(3), run.sha256()
    load_checkpoint(root / "step_00000003", run.wrapped, run.optimizer, run.ranks)
    run.step = 3
    return first, (run.train(3), run.sha256())


def test_a_reload_in_the_same_process_replays_the_same_steps(tmp_path):
    for first, again in run_on_ranks(2, reload_and_replay, tmp_path):
        assert first == again


def learning_rates(root: Path):
    run = resumed(root, ONE)
    return {group["lr"] for group in run.optimizer.param_groups}


def test_the_learning_rate_is_the_configs_not_the_checkpoints(tmp_path):
    run_on_ranks(1, save_with_learning_rate, tmp_path, 0.5)
    assert run_on_ranks(1, learning_rates, tmp_path) == [{1e-2}]


def save_with_learning_rate(root: Path, lr: float):
    run = build(ONE)
    run.train(1)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    save(run, root)


def save_before_the_first_step(root: Path, other: Path):
    run = build(ONE)
    save(run, root)
    return run.train(2), resumed(root, ONE).train(2)


def test_a_run_without_a_step_can_be_saved(tmp_path):
    [(first, second)] = run_on_ranks(1, save_before_the_first_step, tmp_path, tmp_path)
    assert first == second


# Models that do not fit


def misfit(root: Path, parallel: ParallelConfig, model: dict):
    return error_of(lambda: resumed(root, parallel, **model))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"pattern": ["full"]},
            [
                "missing in the checkpoint: decoder.layers.1.self_attention.k_norm_weight, decoder",
                "unexpected in the checkpoint: decoder.layers.1.self_attention.convolution.weight",
                "decoder.layers.2.self_attention.in_proj.weight.value has shape [32, 32], the",
            ],
        ),
        (
            {"layers": 3},
            ["unexpected in the checkpoint: decoder.layers.3.input_layernorm.weight, decoder"],
        ),
        (
            {"vocab_size": 129},
            ["word_embeddings.weight has shape [128, 32], the model's has [160, 32]"],
        ),
        ({"tied_embeddings": True}, ["unexpected in the checkpoint: output_layer.weight"]),
    ],
)
def test_names_and_shapes_that_differ_are_listed_on_every_rank(one_rank, model, said):
    lines = run_on_ranks(2, misfit, one_rank[0], TP2, model)
    assert lines[0] == lines[1]
    line, code = lines[0]
    assert code == 2
    for text in said:
        assert text in line
    assert "optimizer" not in line


def save_with_a_frozen_norm(root: Path):
    made = toy_run.build_model

    def frozen(*args, **options):
        chunks = made(*args, **options)
        chunks[0].decoder.final_layernorm.weight.requires_grad_(False)
        return chunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_run, "build_model", frozen)
        save(build(ONE), root)
    return error_of(lambda: resumed(root, ONE))


def test_optimizer_state_is_matched_by_name_and_what_lacks_is_listed(tmp_path):
    [(line, code)] = run_on_ranks(1, save_with_a_frozen_norm, tmp_path)
    assert code == 2
    names = [f"optimizer.state.{s}.decoder.final_layernorm.weight" for s in sorted(STATES)]
    assert line.endswith(f"missing in the checkpoint: {', '.join(names)}")


# Saves that fail


def fail_on_rank_1(root: Path):
    run = build(ONE)
    run.train(1)
    save(run, root)
    run.train(1)
    if run.ranks.world_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    error = error_of(save, run, root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    names = sorted(os.listdir(root))
    dist.barrier()
    save(run, root)
    return error, names


def test_a_write_error_of_one_rank_reaches_all_and_leaves_nothing(tmp_path):
    errors = run_on_ranks(2, fail_on_rank_1, tmp_path)
    assert errors[0] == errors[1]
    (line, code), names = errors[0]
    assert line.startswith("rank 1: ")
    assert "File too large" in line
    assert code == 76
    assert names == ["latest", "step_00000001"]
    assert [i.complete for i in list_checkpoints(tmp_path)] == [True, True]


def fill_the_disk(root: Path):
    run = build(ONE)
    full = shutil.disk_usage(root)._replace(free=1_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        return error_of(save, run, root)


def test_a_save_that_cannot_fit_is_refused_before_it_writes(tmp_path):
    [(line, code)] = run_on_ranks(1, fill_the_disk, tmp_path)
    assert "GiB are free" in line
    assert code == 76
    assert list(tmp_path.iterdir()) == []


def save_a_state_that_is_not_json(root: Path):
    run = build(ONE)
    return error_of(
        lambda: save_checkpoint(
            root, 0, run.wrapped, run.optimizer, run.ranks, state={"a": {1}}, config={}
        )
    )


def test_a_failed_commit_reaches_all_ranks_and_leaves_nothing(tmp_path):
    errors = run_on_ranks(2, save_a_state_that_is_not_json, tmp_path)
    assert errors[0] == errors[1]
    assert "not JSON serializable" in errors[0][0]
    assert list(tmp_path.iterdir()) == []


def die_while_saving(root: Path):
    """Rank 1 is killed when half of its tensors are written."""
    run = resumed(root, ONE)
    run.train(1)
    if run.ranks.world_rank == 1:
        write_piece, written = checkpoint_writer.write_piece, []

        def write(*args):
            written.append(1)
            if len(written) == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            write_piece(*args)

        checkpoint_writer.write_piece = write
    save(run, root)


def test_a_rank_killed_while_saving_costs_only_the_steps_since_the_last_save(tmp_path):
    expected = run_on_ranks(2, straight, ONE, 6, {})
    run_on_ranks(2, train_and_save, tmp_path, ONE, 3, {})
    with pytest.raises(RankFailure, match="rank 1"):
        run_on_ranks(2, die_while_saving, tmp_path)
    assert any(".step_00000004.tmp-" in p.name for p in tmp_path.iterdir())
    continued = run_on_ranks(2, resume, tmp_path, ONE, 3, {})
    for (history, sha), (rest, sha_after) in zip(expected, continued, strict=True):
        assert history[3:] == rest
        assert sha == sha_after
    run_on_ranks(2, clean, tmp_path, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000003"]


# Choosing


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    root = tmp_path_factory.mktemp("two_saves")
    run_on_ranks(2, save_twice, root)
    return root


def save_twice(root: Path):
    run = build(ONE)
    for _ in range(2):
        run.train(1)
        save(run, root)


def find(root: Path, resume: str):
    with Warnings() as warnings:
        path = find_checkpoint(root, resume, world())
    return path and path.name, warnings.lines


def find_error(root: Path, resume: str):
    return error_of(find_checkpoint, root, resume, world())


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "altered shard of rank 0": lambda path: alter(path / "__0_0.distcp"),
    "altered shard of rank 1": lambda path: alter(path / "__1_0.distcp"),
    "empty shard": lambda path: (path / "__1_0.distcp").write_bytes(b""),
    "missing .metadata": lambda path: (path / ".metadata").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_auto_passes_over_a_damaged_checkpoint_and_says_so(tmp_path, two_saves, damage):
    root = shutil.copytree(two_saves, tmp_path / "root")
    damage(root / "step_00000002")
    (name, warnings), (other, silent) = run_on_ranks(2, find, root, "auto")
    assert name == other == "step_00000001"
    assert len(warnings) == 1
    assert "step_00000002/" in warnings[0]
    assert silent == []
    line, code = run_on_ranks(2, find_error, root, str(root / "step_00000002"))[1]
    assert line in warnings[0]
    assert code == 2


@pytest.mark.parametrize("latest", ["", "step_99999999\n", "\0garbage", None])
def test_auto_does_not_depend_on_latest(tmp_path, two_saves, latest):
    root = shutil.copytree(two_saves, tmp_path / "root")
    (root / "latest").unlink()
    if latest is not None:
        (root / "latest").write_text(latest)
    assert run_on_ranks(2, find, root, "auto") == [("step_00000002", [])] * 2


def test_auto_without_checkpoints_is_a_new_start(tmp_path):
    assert run_on_ranks(2, find, tmp_path / "nowhere", "auto") == [(None, [])] * 2
    assert run_on_ranks(2, find, tmp_path, "none") == [(None, [])] * 2


def refusals(root: Path):
    damaged = shutil.copytree(root, root.parent / "damaged") if world().is_first else None
    if damaged:
        for step in (1, 2):
            alter(damaged / f"step_0000000{step}" / "__0_0.distcp")
    return [
        find_error(root, "/nope"),
        find_error(root, str(root)),
        find_error(root, "none"),
        find_error(root, str(root / "step_00000001")),
        find_error(root.parent / "damaged", "auto"),
    ]


def test_what_cannot_be_resumed_is_refused_alike_on_all_ranks(tmp_path, two_saves):
    root = shutil.copytree(two_saves, tmp_path / "root")
    first, second = run_on_ranks(2, refusals, root)
    assert first == second
    assert [code for _, code in first] == [2] * 5
    for (line, _), said in zip(
        first,
        [
            "/nope: no such checkpoint folder",
            "manifest.json: missing",
            "holds step_00000002: a new start would mix two runs",
            "holds step_00000002, which is newer than",
            "no checkpoint is complete",
        ],
        strict=True,
    ):
        assert said in line
    newest = str(root / "step_00000002")
    assert run_on_ranks(2, find, root, newest) == [("step_00000002", [])] * 2


def find_half_blind(root: Path):
    """Rank 1 sees no checkpoint at all."""
    ranks = world()
    with pytest.MonkeyPatch.context() as patch:
        if not ranks.is_first:
            patch.setattr(checkpoint, "list_checkpoints", lambda root: [])
        return find_checkpoint(root, "auto", ranks)


def test_rank_0_decides_what_is_resumed(two_saves):
    assert run_on_ranks(2, find_half_blind, two_saves) == [two_saves / "step_00000002"] * 2


# The folder


def clean(root: Path, keep: int | None):
    delete(set_aside_old(root, keep, world()))


def test_the_newest_complete_checkpoints_are_kept(tmp_path, two_saves):
    for step in range(1, 6):
        shutil.copytree(two_saves / "step_00000001", tmp_path / f"step_0000000{step}")
    (tmp_path / "step_00000005/manifest.json").unlink()
    (tmp_path / ".step_00000006.tmp-0a1b2c3d").mkdir()
    shutil.copytree(two_saves / "step_00000001", tmp_path / ".step_00000000.removed-0a1b2c3d")
    run_on_ranks(2, clean, tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000003",
        "step_00000004",
        "step_00000005",
    ]


def check_shared(roots: list[Path]):
    ranks = world()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_folder, "SHARED_FOLDER_WAIT_S", 0.2)
        return check_shared_folder(roots[ranks.world_rank], ranks)


def check_not_shared(roots: list[Path]):
    return error_of(check_shared, roots)


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path):
    assert run_on_ranks(2, check_shared, [tmp_path / "a"] * 2) == [None, None]
    roots = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    errors = run_on_ranks(3, check_not_shared, roots)
    for line, code in errors:
        assert "ranks 1 do not see" in line
        assert code == 2
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "file").write_text("")
    errors = run_on_ranks(2, check_not_shared, [tmp_path / "file"] * 2)
    assert "file: cannot be written" in errors[1][0]
