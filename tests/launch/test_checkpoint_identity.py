"""What a checkpoint says of its run, held against another config: no ranks, no files."""

from pathlib import Path

import pytest

from mixtron.launch.checkpoint_identity import (
    _nearest_divisors,
    config_differences,
    converted_step,
    refuse_changes,
    versions,
)
from mixtron.launch.config import RunConfig, load_config
from mixtron.megatron_ext.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "configs/debug_hybrid.yaml"
HERE = Path("step_00000006")


def config(*overrides: str) -> RunConfig:
    return load_config(CONFIG, list(overrides))


def manifest(*overrides: str, **changes) -> dict:
    """Of a run of `CONFIG` with other values."""
    return {
        "config": config(*overrides).model_dump(mode="json"),
        "versions": versions(),
        "state": {"progress": {"step": 6, "samples": 24}},
    } | changes


def test_nothing_is_said_of_an_equal_run():
    assert refuse_changes(HERE, manifest(), config(), branch=False) == []


def test_another_version_of_the_code_is_said_and_goes_on():
    saved = manifest(versions=versions() | {"torch": "1.0", "commit": "abc"})
    notes = refuse_changes(HERE, saved, config(), branch=False)
    assert notes[0].startswith("torch was 1.0, is ")
    assert all(" was " in note for note in notes)


@pytest.mark.parametrize(
    "free",
    [
        "run_dir=elsewhere",
        "parallel.overlap=false",
        "training.recompute=full",
        "training.max_skipped_steps=1",
        "training.skip_steps=[[7, 9]]",
        "checkpoint.keep=9",
        "logging.every_steps=5",
        "slurm={nodes: 2}",
        "data.tokenizer=moved/tokenizer.model",
    ],
)
def test_what_may_change_does(free):
    assert refuse_changes(HERE, manifest(), config(free), branch=False) == []


def test_every_change_is_named_with_both_values_and_one_override_for_all():
    now = config("optimizer.betas=[0.9, 0.99]", "training.steps=77")
    with pytest.raises(ConfigError) as caught:
        refuse_changes(HERE, manifest("training.steps=66"), now, branch=False)
    line = str(caught.value)
    assert "training.steps was 66, is 77" in line
    assert "is [0.9, 0.99]" in line
    assert "checkpoint.allow_changes='[optimizer.betas, training.steps]'" in line
    assert caught.value.exit_code == 2


def test_a_field_that_is_new_has_the_older_codes_value_and_one_that_is_gone_is_shown():
    saved = manifest()["config"]
    del saved["training"]["max_skipped_steps"]
    assert list(config_differences(saved, config().model_dump(mode="json"))) == []
    saved["training"]["gone"] = 3
    shown = [
        (key, str(was), str(now))
        for key, was, now in config_differences(saved, config().model_dump(mode="json"))
    ]
    assert ("training.gone", "3", "absent") in shown


def test_divisors_next_to_what_is_wanted():
    assert _nearest_divisors(24 * 32, 5 * 32, 32) == [4 * 32, 6 * 32]
    assert _nearest_divisors(24 * 32, 25 * 32, 32) == [24 * 32]
    assert _nearest_divisors(7, 2, 2) == []
    assert _nearest_divisors(10**12, 3 * 10**6, 10**6) == [2 * 10**6, 4 * 10**6]


def test_a_batch_counts_steps_anew_only_in_a_branch():
    batch = config().training.global_batch_tokens
    sequence = config().data.sequence_length
    saved = manifest(state={"progress": {"step": 6, "samples": 6 * batch // sequence}})
    assert converted_step(HERE, saved, config(), 1, branch=False) == 6
    double = config(f"training.global_batch_tokens={2 * batch}")
    assert converted_step(HERE, saved, double, 1, branch=True) == 3
    with pytest.raises(ConfigError, match="branch into another folder"):
        converted_step(HERE, saved, double, 1, branch=False)
