"""DeepSpeed's ZeRO against Megatron's engine: the same losses, the same checkpoints."""

import math
from pathlib import Path

import pytest

from mixtron.launch.checkpoint_tools import compare_tensors
from mixtron.megatron_ext.mixers import mixer_configs
from tests.helpers.jobs import rows, small_config, write_config
from tests.helpers.ranks import renew_ranks, run_on_ranks
from tests.launch.deepspeed_runs import MEGATRON, curves, trained_with, with_bad_steps, zero

CONFIGS = Path(__file__).parents[2] / "configs"
MIXERS = list(mixer_configs())
ONE = "parallel={tensor: 1}"
TP2 = "parallel={tensor: 2}"
TP2_SP = "parallel={tensor: 2, sequence: true}"
PLAIN = ["model.dropout=0", "training.precision=fp32", "logging.tensorboard=false"]
RECALL = "data={sequence_length: 64, synthetic: {task: mqar, pairs: [8], vocab_size: 100}}"


IN_EVERY_RUN = ("kla", "log_linear", "softmax_attention")
"""Fused projections, fp32 decays and a network shared by heads; and the plainest. `make soak` runs
all of them, longer and on more layouts: the whole suite must stay short."""


def assert_same_curves(curves: list[list[tuple]], rel: float = 1e-5) -> None:
    """fp32 sums in another order: 1e-5 is what the engines may differ by over 20 steps.

    The norm is of gradients, whose rounding errors Adam's steps magnify more than the loss. GLA's
    is off by 2e-4 at step 18 on Megatron's engine alone, when its micro-batches are cut otherwise:
    so only the first six are compared.
    """
    first, *others = curves
    for other in others:
        assert [loss for loss, _ in other] == pytest.approx([loss for loss, _ in first], rel=rel)
        expected = [norm for _, norm in first[:6]]
        assert [norm for _, norm in other[:6]] == pytest.approx(expected, rel=10 * rel)


@pytest.mark.parametrize("mixer", IN_EVERY_RUN)
def test_a_mixer_trains_as_on_megatrons_engine(tmp_path, mixer):
    """The stages take turns over the mixers; all of them at TP 2 with sequence parallelism."""
    stage = 1 + IN_EVERY_RUN.index(mixer)
    variants = [recall(tmp_path, TP2_SP, engine) for engine in (MEGATRON, zero(stage))]
    assert_same_curves(run_on_ranks(2, curves, debug_config(mixer), variants, 4)[0])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_engine_and_layout_follows_one_rank(tmp_path, mixer):
    """Over 20 steps, on two data ranks, between which ZeRO splits what it splits."""
    config = debug_config(mixer)
    found = run_on_ranks(1, curves, config, [recall(tmp_path, ONE, MEGATRON)], 20)[0]
    for ranks, layout in ((2, ONE), (4, TP2), (4, TP2_SP)):
        variants = [recall(tmp_path, layout, e) for e in (MEGATRON, zero(1), zero(2), zero(3))]
        renew_ranks()
        found += run_on_ranks(ranks, curves, config, variants, 20, timeout_s=900)[0]
    assert_same_curves(found)


def debug_config(mixer: str) -> str:
    return str(CONFIGS / f"debug_{mixer}.yaml")


def recall(folder: Path, layout: str, engine: list[str]) -> list[str]:
    """Overrides: a task of recall that every mixer's smallest configuration takes."""
    small = ["training.global_batch_tokens=256", f"run_dir={folder}"]
    return [*PLAIN, RECALL, *small, layout, *engine]


def write(corpus: Path, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(write_config(folder / "config.yaml", small_config(corpus, folder / "run")))


@pytest.mark.parametrize("layout", [ONE, TP2], ids=["data 2", "tensor 2"])
def test_every_stage_trains_as_on_megatrons_engine(corpus, tmp_path, layout):
    config = write(corpus, tmp_path)
    one_rank = run_on_ranks(1, curves, config, [[*PLAIN, ONE, *MEGATRON]], 6)[0]
    engines = [MEGATRON, zero(1), zero(2), zero(3), zero(2, "optimizer")]
    variants = [[*PLAIN, layout, *engine] for engine in engines]
    assert_same_curves(one_rank + run_on_ranks(2, curves, config, variants, 6)[0])


def test_bf16_keeps_fp32_parameters_and_gradients(corpus, tmp_path):
    """KLA's decays are fp32 in a bf16 model: DeepSpeed's own bf16 mode would round them."""
    shared = [*PLAIN, ONE, "training.precision=bf16"]
    engines = [MEGATRON, zero(1), zero(2), zero(3), zero(3, "optimizer")]
    config = write(corpus, tmp_path)
    curves_of_one = run_on_ranks(1, curves, config, [shared + e for e in engines], 5)[0]
    # One rank, fp32 sums and moments everywhere: nothing is left that could round otherwise.
    assert_same_curves(curves_of_one, rel=1e-6)


def test_weights_in_host_memory(corpus, tmp_path):
    config = write(corpus, tmp_path)
    engines = [MEGATRON, zero(3, "optimizer+weights")]
    variants = [[*PLAIN, TP2_SP, "training.recompute=full", *engine] for engine in engines]
    assert_same_curves(run_on_ranks(2, curves, config, variants, 4)[0])
    mixed = [*PLAIN, TP2_SP, "training.precision=bf16", *zero(3, "optimizer+weights")]
    [code], error = trained_with(corpus, tmp_path / "mixed", 2, [(mixed, None)])
    assert code == 2
    assert "would round" in error


def test_tied_embeddings_and_recomputation(corpus, tmp_path):
    config = write(corpus, tmp_path)
    shared = [*PLAIN, ONE, "model.tied_embeddings=true", "training.recompute=full"]
    variants = [shared + engine for engine in (MEGATRON, zero(1), zero(2), zero(3))]
    assert_same_curves(run_on_ranks(2, curves, config, variants, 4)[0])


# Checkpoints


WHOLE = ["engine=deepspeed", "deepspeed={zero_stage: 3, pin_memory: false}"]
"""Stage 3 as it is by default: parameters as small as these stay whole on every rank."""


@pytest.mark.parametrize(
    "engine", [zero(1), zero(2), zero(3), WHOLE], ids=["1", "2", "3", "3, parameters whole"]
)
def test_an_interrupted_run_is_the_straight_run(corpus, tmp_path, engine):
    """With dropout, on two data ranks: every tensor of the last checkpoints is bit-equal."""
    engine = [ONE, "training.steps=8", *engine]
    codes, _ = trained_with(corpus, tmp_path / "straight", 2, [(engine, None)])
    stopped, _ = trained_with(corpus, tmp_path / "stopped", 2, [(engine, 5), (engine, None)])
    assert (codes, stopped) == ([0], [75, 0])
    assert_same_checkpoint(tmp_path / "straight", tmp_path / "stopped")


def assert_same_checkpoint(a: Path, b: Path) -> None:
    last = "run/checkpoints/step_00000008"
    found = compare_tensors(a / last, b / last, lambda names: names)
    assert len(found.equal) > 100
    assert [*found.only_first, *found.only_second, *found.different] == []


def test_engines_and_layouts_take_turns_on_one_checkpoint(corpus, tmp_path):
    """No conversion: both engines write and read the same tensors, optimizer included."""
    straight, turns = tmp_path / "straight", tmp_path / "turns"
    plain = ["model.dropout=0"]
    trained_with(corpus, straight, 2, [([*plain, ONE, *MEGATRON], None)])
    relay = [
        ([*plain, TP2_SP, *zero(1)], 2),
        ([*plain, ONE, *zero(3)], 4),
        ([*plain, TP2_SP, *MEGATRON], 6),
        ([*plain, TP2, *zero(3)], 8),
        ([*plain, ONE, *zero(2, "optimizer")], 10),
    ]
    codes, error = trained_with(corpus, turns, 2, relay)
    assert codes == [75] * 5, error
    codes, error = trained_with(corpus, turns, 1, [([*plain, ONE, *zero(3)], None)])
    assert codes == [0], error
    expected, losses = (
        [row["train/loss"] for row in rows(folder / "run") if "train/loss" in row]
        for folder in (straight, turns)
    )
    assert len(losses) == 12
    assert losses == pytest.approx(expected, rel=1e-5)


def test_weights_alone_start_a_run(corpus, tmp_path):
    first = tmp_path / "first"
    trained_with(corpus, first, 2, [([ONE, *MEGATRON], 3)])
    init = [ONE, "model.dropout=0", f"checkpoint.init_from={first}/run/checkpoints/step_00000003"]
    variants = [init + engine for engine in (MEGATRON, zero(1), zero(3))]
    got = run_on_ranks(2, curves, write(corpus, tmp_path / "next"), variants, 3)[0]
    assert_same_curves(got)


# Steps without an update


BAD = [zero(1), zero(2), zero(3), [*zero(2, "optimizer"), "training.precision=bf16"]]


@pytest.mark.parametrize("engine", BAD, ids=["stage 1", "stage 2", "stage 3", "offload, bf16"])
def test_a_bad_step_changes_nothing(corpus, tmp_path, engine):
    """Infinite gradients of one rank, then a loss that is not finite: both ranks pass over."""
    config = write(corpus, tmp_path)
    for result in run_on_ranks(2, with_bad_steps, config, [*PLAIN, ONE, *engine]):
        assert result.unchanged == [False, True, False, True, False]
        assert result.skipped == 2
        assert math.isfinite(result.last_loss)
