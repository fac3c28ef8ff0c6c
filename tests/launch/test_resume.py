"""Interrupted runs go on bit for bit; what may not change is refused; runs start from others."""

import shutil
from pathlib import Path

import pytest

from mixtron.launch.checkpoint_files import list_checkpoints, read_manifest
from tests.helpers.jobs import history, rows
from tests.launch.short_runs import (
    BATCH,
    ONE_RANK,
    epochs_of,
    make_epochs,
    run_ranks,
    write,
)

STEPS = 12
PLAIN = ["model.dropout=0", "checkpoint.save_every_steps=100", "logging.tensorboard=false"]


@pytest.fixture(scope="module")
def epochs(corpus, tmp_path_factory):
    """Overrides for a small corpus, and the samples of one epoch of it."""
    return make_epochs(corpus, tmp_path_factory.mktemp("epochs"))


@pytest.fixture(scope="module")
def straight(corpus, epochs, tmp_path_factory):
    """A run that nothing happened to: its folder, and what two ranks saw of it.

    Dropout, four micro-batches a step, warm-up over five steps, an epoch every few steps.
    """
    folder = tmp_path_factory.mktemp("straight")
    config = write(corpus, folder)
    outcomes = run_ranks(2, config, [*epochs[0], "checkpoint.asynchronous=false"])
    assert outcomes[0].code == 0
    return folder / "run", outcomes


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([0], id="before the first step"),
        pytest.param([3], id="during warm-up"),
        pytest.param(["epoch"], id="at the end of an epoch"),
        pytest.param([6, 7], id="twice in a row"),
        pytest.param([STEPS], id="after the last step"),
    ],
)
def test_an_interrupted_run_is_the_straight_run(corpus, epochs, straight, tmp_path, stops):
    run_dir, expected = straight
    overrides, samples = epochs
    config = write(corpus, tmp_path)
    trained = []
    for stop in stops:
        stop = samples // BATCH if stop == "epoch" else stop
        outcomes = run_ranks(2, config, overrides, None if stop == STEPS else stop)
        assert outcomes[0].code == (0 if stop == STEPS else 75)
        assert list_checkpoints(tmp_path / "run/checkpoints")[-1].step == stop
        trained += outcomes[0].samples
    outcomes = run_ranks(2, config, overrides)
    assert outcomes[0].code == 0
    assert f"after step {stop}" in outcomes[0].said
    assert trained + outcomes[0].samples == expected[0].samples
    assert [o.weights for o in outcomes] == [o.weights for o in expected]
    assert history(tmp_path / "run") == history(run_dir)


def test_each_epoch_has_every_sample_once(epochs, straight):
    samples = epochs[1]
    order = [sample for step in straight[1][0].samples for sample in step]
    assert len(order) >= 2 * samples
    for start in range(0, len(order) - samples + 1, samples):
        assert len(set(order[start : start + samples])) == samples
    assert order[:samples] != order[samples : 2 * samples]


# Other layouts


@pytest.fixture(scope="module")
def one_rank(corpus, tmp_path_factory):
    """Eight steps on one rank, without dropout."""
    config = write(corpus, tmp_path_factory.mktemp("one_rank"))
    [outcome] = run_ranks(1, config, [*PLAIN, *ONE_RANK, "training.steps=8"])
    return outcome


LAYOUTS = {
    "tensor 2": (2, []),
    "data 2": (2, ONE_RANK),
    "pipeline 2": (2, [*ONE_RANK, "parallel.pipeline=2"]),
    "context 2": (2, [*ONE_RANK, "parallel.context=2"]),
    "recompute": (1, [*ONE_RANK, "training.recompute=full"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_and_losses_go_on_in_another_layout_and_back(corpus, tmp_path, one_rank, layout):
    config = write(corpus, tmp_path)
    shared = [*PLAIN, "training.steps=8"]
    one, other = (1, ONE_RANK), LAYOUTS[layout]
    losses, samples, rates = [], [], []
    for (world, overrides), stop in ((one, 3), (other, 6), (one, None)):
        outcome = run_ranks(world, config, [*shared, *overrides], stop)[0]
        losses += outcome.losses
        samples += outcome.samples
        rates += outcome.rates
    assert samples == one_rank.samples
    assert rates == one_rank.rates
    assert losses == pytest.approx(one_rank.losses, rel=1e-5)


# What may change, and what may not


@pytest.fixture(scope="module")
def stopped(corpus, epochs, tmp_path_factory) -> Path:
    """The folder of a run on one rank that was stopped after step 6."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(Path(epochs[0][0].split("path: ")[1].rstrip("}]")).parent, folder / "data")
    config = write(corpus, folder)
    run_ranks(1, config, at(folder), 6)
    return folder


def at(folder: Path) -> list[str]:
    """Overrides for the data in a folder, on one rank."""
    return [*PLAIN, *ONE_RANK, *epochs_of(folder / "data/small")[0]]


@pytest.fixture
def copy(stopped, corpus, tmp_path):
    """A copy of that run, in another place: its config, and overrides."""
    folder = shutil.copytree(stopped, tmp_path / "copy")
    return write(corpus, folder), at(folder)


def test_a_moved_run_and_corpus_are_the_same_run(copy):
    config, overrides = copy
    free = ["checkpoint.keep=2", "training.micro_batch_sequences=2", "name=other"]
    [outcome] = run_ranks(1, config, [*overrides, *free])
    assert (outcome.code, outcome.error) == (0, "")
    assert "after step 6" in outcome.said
    assert "was" not in outcome.said.split("resumed")[0].split("run folder")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.lr=0.001", "optimizer.lr was 0.01, is 0.001"),
        ("model.norm_eps=0.001", "model.norm_eps was "),
        ("mixers.attention.window=8", "mixers.attention.window was None, is 8"),
        ("training.steps=20", "training.steps was 12, is 20"),
        ("training.seed=5", "training.seed was 1234, is 5"),
    ],
)
def test_a_changed_value_is_refused_unless_it_is_allowed(copy, change, said):
    config, overrides = copy
    key = change.split("=")[0]
    [outcome] = run_ranks(1, config, [*overrides, change])
    assert outcome.code == 2
    assert said in outcome.error
    assert f"checkpoint.allow_changes='[{key}]'" in outcome.error
    section = key.split(".")[0]
    allowed = f"checkpoint.allow_changes=[{section}]"
    [outcome] = run_ranks(1, config, [*overrides, change, allowed], 8)
    assert outcome.code == 75
    assert said in outcome.said


def test_an_allowed_learning_rate_is_the_one_used(copy):
    config, overrides = copy
    change = ["optimizer.lr=0.001", "checkpoint.allow_changes=[optimizer.lr]"]
    [outcome] = run_ranks(1, config, [*overrides, *change])
    assert max(outcome.rates) <= 0.001
    assert outcome.rates[0] > 0


def test_one_changed_token_is_refused_unless_it_is_allowed(copy, corpus):
    from mixtron.data_prep.build import build

    config, overrides = copy
    text = config.parent / "data/small.txt"
    text.write_text(text.read_text().replace(" the ", " a ", 1))
    build([text], corpus / "tok.model", config.parent / "data/small2", progress=False)
    changed = [o.replace("data/small}", "data/small2}") for o in overrides]
    [outcome] = run_ranks(1, config, changed)
    assert outcome.code == 2
    assert "content" in outcome.error or "new in the blend" in outcome.error
    assert "data.allow_changed=true" in outcome.error
    [outcome] = run_ranks(1, config, [*changed, "data.allow_changed=true"])
    assert outcome.code == 0


def test_a_path_that_is_not_there_is_refused_and_an_empty_folder_starts_anew(corpus, tmp_path):
    config = write(corpus, tmp_path)
    outcome = run_ranks(2, config, ["checkpoint.resume=/nope"])[0]
    assert outcome.code == 2
    assert "/nope: no such checkpoint folder" in outcome.error
    [outcome] = run_ranks(1, config, [*PLAIN, *ONE_RANK], 0)
    assert "starting anew from step 0" in outcome.said


# Starting from another run


def test_a_branch_goes_on_with_other_data_schedule_and_length(stopped, corpus, tmp_path):
    source = stopped / "run/checkpoints/step_00000006"
    config = write(corpus, tmp_path)
    changes = [
        f"checkpoint.branch_from={source}",
        "training.steps=9",
        "schedule.type=wsd",
        "schedule.decay_steps=2",
        "optimizer.lr=0.02",
    ]
    length = [o for o in at(stopped) if "length" in o or "batch" in o]
    [outcome] = run_ranks(1, config, [*PLAIN, *ONE_RANK, *length, *changes], 8)
    assert outcome.code == 75
    assert f"branched from {source} after step 6" in outcome.said
    assert "new in the blend" in outcome.said
    assert "schedule.type was cosine, is wsd" in outcome.said
    assert outcome.rates[0] == 0.02
    [outcome] = run_ranks(1, config, [*PLAIN, *ONE_RANK, *length, *changes])
    assert "after step 8" in outcome.said
    assert outcome.code == 0
    refused = [*PLAIN, *ONE_RANK, *length, *changes, "model.norm_eps=0.1"]
    other = write(corpus, tmp_path / "other")
    [outcome] = run_ranks(1, other, refused)
    assert outcome.code == 2
    assert "model.norm_eps" in outcome.error


def test_a_global_batch_that_divides_is_converted_and_another_refused(stopped, corpus, tmp_path):
    source = stopped / "run/checkpoints/step_00000006"
    overrides = at(stopped)
    length = int(next(o for o in overrides if "length" in o).split("=")[1])
    config = write(corpus, tmp_path)

    def batch(sequences: int) -> list[str]:
        return [*overrides, f"training.global_batch_tokens={sequences * length}"]

    [outcome] = run_ranks(1, write(corpus, tmp_path / "copy"), batch(8))
    assert outcome.code == 0, "a new run takes any batch"
    inside = shutil.copytree(stopped, tmp_path / "inside")
    [outcome] = run_ranks(1, write(corpus, inside), batch(8))
    assert outcome.code == 2
    assert "checkpoint.branch_from=" in outcome.error
    branch = [f"checkpoint.branch_from={source}"]
    [outcome] = run_ranks(1, config, [*batch(5), *branch])
    assert outcome.code == 2
    assert f"nearest that work: {4 * length}, {6 * length}" in outcome.error
    [outcome] = run_ranks(1, config, [*batch(8), *branch, "training.steps=5"], 4)
    assert "which is step 3 of this global batch" in outcome.said
    progress = read_manifest(tmp_path / "run/checkpoints/step_00000004")["state"]["progress"]
    assert (progress["step"], progress["samples"]) == (4, 32)


def test_weights_alone_start_a_new_run(stopped, corpus, tmp_path):
    source = stopped / "run/checkpoints/step_00000006"
    overrides = [*at(stopped), f"checkpoint.init_from={source}", "training.steps=3"]
    config = write(corpus, tmp_path)
    [outcome] = run_ranks(1, config, [*overrides, "optimizer.lr=0.005"])
    assert outcome.code == 0
    assert f"weights of {source}: starting from step 0" in outcome.said
    assert min(outcome.rates) > 0
    first = next(r["train/loss"] for r in rows(stopped / "run") if "train/loss" in r)
    assert outcome.losses[0] < first - 0.01
    assert len(set(outcome.losses)) == 3
    assert read_manifest(tmp_path / "run/checkpoints/step_00000003")["optimizer_step"] == 3


def test_other_names_are_refused_unless_a_pattern_allows_them(stopped, corpus, tmp_path):
    source = stopped / "run/checkpoints/step_00000006"
    overrides = [*at(stopped), f"checkpoint.init_from={source}", "training.steps=1"]
    tied = [*overrides, "mixers.attention.qk_norm=false"]
    config = write(corpus, tmp_path)
    [outcome] = run_ranks(1, config, tied)
    assert outcome.code == 2
    assert "unexpected in the checkpoint: decoder.layers.1.self_attention.k_norm" in outcome.error
    allowed = "checkpoint.init_allow=['*.q_norm*', '*.k_norm*']"
    [outcome] = run_ranks(1, config, [*tied, allowed])
    assert outcome.code == 0
    assert "k_norm_weight differs and starts as drawn" in outcome.said
    # A part of a fused projection in another shape: the projection is drawn anew.
    heads = [*overrides, "mixers.attention.kv_heads=1", f"run_dir={tmp_path / 'heads'}"]
    [outcome] = run_ranks(1, config, [*heads, "checkpoint.init_allow=['*.1.self_attention.in*']"])
    assert outcome.code == 0, outcome.error


def test_batches_after_a_loss_spike_are_passed_over(copy):
    config, overrides = copy
    [plain] = run_ranks(1, write_beside(config), overrides)
    [outcome] = run_ranks(1, config, [*overrides, "training.skip_steps=[[8, 9]]"])
    assert outcome.code == 0
    assert "step 8 | batch passed over" in outcome.said
    assert outcome.samples == plain.samples
    assert len(outcome.losses) == len(plain.losses) - 2
    assert outcome.losses[0] == plain.losses[0]
    logged = [r["step"] for r in rows(config.parent / "run") if "train/loss" in r]
    assert logged == [1, 2, 3, 4, 5, 6, 7, 10, 11, 12]


def write_beside(config: Path) -> Path:
    """A copy of a run, beside it."""
    folder = config.parent.with_name("beside")
    shutil.copytree(config.parent, folder)
    beside = folder / "config.yaml"
    beside.write_text(config.read_text().replace(str(config.parent), str(folder)))
    return beside
