"""Synthetic tasks as data: config, order, resume, and what reaches the loss."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mixtron.launch.config import dump_config, load_config
from mixtron.launch.config_sections import SyntheticDataConfig
from mixtron.launch.data import compare_records, open_data
from mixtron.launch.synthetic.data import SyntheticTraining, SyntheticValidation
from mixtron.launch.synthetic.task import tasks
from mixtron.launch.validate import print_report
from mixtron.megatron_ext.errors import ConfigError
from tests.helpers.jobs import rows, write_config
from tests.helpers.ranks import run_on_ranks

TASK = {"task": "mqar", "pairs": 3, "vocab_size": 20}
LENGTH = 16


def data(**options) -> SyntheticDataConfig:
    return SyntheticDataConfig.model_validate(
        {"sequence_length": LENGTH, "synthetic": TASK} | options
    )


def run_config(run_dir: Path) -> dict:
    """Two layers of two mixers with dropout, two micro-batches a step."""
    return {
        "name": "synthetic",
        "run_dir": str(run_dir),
        "model": {
            "layers": 2,
            "hidden_size": 16,
            "ffn_hidden_size": 16,
            "vocab_size": 20,
            "vocab_multiple": 32,
            "pattern": ["kla", "attention"],
            "dropout": 0.1,
        },
        "mixers": {
            "kla": {"type": "kla", "heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8},
            "attention": {"type": "softmax_attention", "heads": 2, "kv_heads": 2, "head_dim": 8},
        },
        "data": {
            "sequence_length": LENGTH,
            "synthetic": dict(TASK),
            "validation": {"fewer": {"synthetic": TASK | {"pairs": 1}, "sequences": 10}},
        },
        "optimizer": {"lr": 1e-2},
        "training": {
            "steps": 8,
            "global_batch_tokens": 8 * LENGTH,
            "micro_batch_sequences": 4,
            "precision": "fp32",
        },
        "checkpoint": {"save_every_steps": 2},
    }


@pytest.fixture
def path(tmp_path) -> Path:
    return write_config(tmp_path / "job.yaml", run_config(tmp_path / "run"))


def test_one_value_or_several(path, tmp_path):
    one = load_config(path)
    several = load_config(path, ["data.synthetic.pairs=[1, 2]"])
    assert one.data.synthetic.pairs == [3]
    assert several.data.synthetic.pairs == [1, 2]
    dump_config(several, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == several


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.synthetic.task=mqra",
            "data.synthetic.task: no task 'mqra'; did you mean 'mqrar'?; tasks: "
            + ", ".join(tasks()),
        ),
        (
            "data.synthetic.paris=4",
            "data.synthetic.paris: unknown key; did you mean 'pairs'?; "
            "mqar takes: pairs, vocab_size, power, filler",
        ),
        ("data.synthetic.pairs=0", "data.synthetic.pairs.0: input should be greater than 0"),
        (
            "data.synthetic.filler=noise",
            "data.synthetic.filler: input should be 'blank' or 'random', found 'noise'",
        ),
        (
            "data.validation.fewer.synthetic.paris=4",
            "data.validation.fewer.synthetic.paris: unknown key; did you mean 'pairs'?; "
            "mqar takes: pairs, vocab_size, power, filler",
        ),
        ("data.tokenizer=x", "data.tokenizer: unknown key"),
        ("data.synthetic={}", "data.synthetic.task: required key is missing; tasks: "),
    ],
)
def test_refusal_names_the_choices(path, override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.synthetic.vocab_size=21"],
            "model.vocab_size=20 is less than the 21 ids of data.synthetic (mqar); set it to 21",
        ),
        (
            ["data.validation.fewer.synthetic.vocab_size=30"],
            "model.vocab_size=20 is less than the 30 ids of data.validation.fewer.synthetic",
        ),
        (
            ["data.synthetic.pairs=5"],
            "data.synthetic: mqar at length 16: pairs=5 need 20 tokens; pairs up to 4 fit",
        ),
        (
            ["data.validation.fewer.synthetic.pairs=5"],
            "data.validation.fewer.synthetic: mqar at length 16: pairs=5",
        ),
    ],
)
def test_validate_refuses_what_cannot_be_made(path, overrides, message):
    with pytest.raises(ConfigError) as caught:
        print_report(path, overrides, None)
    assert str(caught.value).startswith(message)


def test_report_describes_the_task(path, capsys):
    print_report(path, [], None)
    report = capsys.readouterr().out
    assert "mqar: pairs=[3], vocab_size=20, power=0.01, filler=blank" in report
    assert "validation.fewer  10 samples" in report


def test_order_does_not_depend_on_batches_and_resuming_equals_going_on():
    straight = SyntheticTraining(data())
    expected = [straight.read(entry) for entry in straight.next(200)]
    for size in (1, 7, 64, 200):
        resumed = SyntheticTraining(data())
        found = []
        while len(found) < 200:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = SyntheticTraining(data())
            resumed.load_state_dict(state)
            found += [resumed.read(entry) for entry in resumed.next(size)]
        for sample, reference in zip(found, expected, strict=False):
            assert np.array_equal(sample.inputs, reference.inputs)
            assert np.array_equal(sample.labels, reference.labels)
            assert np.array_equal(sample.label_mask, reference.label_mask)


def test_validation_sets_are_fixed_and_of_their_own():
    config = data(
        validation={
            "a": {"synthetic": TASK, "sequences": 70},
            "b": {"synthetic": TASK, "sequences": 70},
        }
    )
    sets = SyntheticValidation.open_all(config)
    training = SyntheticTraining(config)
    drawn = [[s.read(i).inputs.tolist() for i in range(70)] for s in sets.values()]
    drawn.append([training.read((0, i)).inputs.tolist() for i in range(70)])
    distinct = {tuple(tokens) for sequences in drawn for tokens in sequences}
    assert len(distinct) == 210
    assert len(sets["a"]) == 70
    with pytest.raises(IndexError):
        sets["a"].read(70)


def test_what_differs_on_resume_is_named():
    record = SyntheticTraining(data()).record()
    assert compare_records(json.loads(json.dumps(record)), record) == []
    [line] = compare_records(record, SyntheticTraining(data(seed=2)).record())
    assert line == "data.seed was 1234, is 2"
    other = SyntheticTraining(data(synthetic=TASK | {"pairs": 2})).record()
    [line] = compare_records(record, other)
    assert line.startswith("data.synthetic was {'task': 'mqar', 'pairs': [3]")
    corpora = {"sequence_length": 16, "seed": 1, "split": {}, "sources": []}
    assert compare_records(corpora, record) == ["data were corpora, are a synthetic task"]
    assert compare_records(record, corpora) == ["data were a synthetic task, are corpora"]


def micro_batch(config: SyntheticDataConfig) -> tuple:
    import torch

    from mixtron.launch.micro_batch import collate
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    ranks = init_model_parallel(seed=1, device=init_distributed())
    training = SyntheticTraining(config)
    micro = collate([training.read(entry) for entry in training.next(3)], 1, ranks)
    assert micro.tokens_BT.dtype == micro.labels_BT.dtype == torch.int64
    return (
        micro.tokens_BT.numpy(),
        micro.labels_BT.numpy(),
        micro.mask_BT.numpy(),
        micro.batch.lengths,
    )


def test_labels_of_the_task_reach_the_loss_not_the_next_tokens():
    config = data()
    [(tokens, labels, mask, lengths)] = run_on_ranks(1, micro_batch, config)
    examples = config.synthetic.examples(config.seed, "train", np.arange(3), LENGTH)
    assert np.array_equal(tokens[0], examples.inputs_NT.ravel())
    assert np.array_equal(labels[0], examples.labels_NT.ravel())
    assert np.array_equal(mask[0], examples.mask_NT.ravel())
    assert lengths == [LENGTH] * 3


def train_until(path: str, stop_at: int | None) -> int:
    """Trains through the ordinary loop; a signal arrives during step `stop_at`."""
    from mixtron.launch import loop
    from mixtron.launch.setup_run import prepare

    config = load_config(path)
    run = prepare(config, *open_data(config)[1:])
    plain = loop.train_step

    def signalled(run):
        if run.progress.step + 1 == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(run)

    loop.train_step = signalled
    try:
        return loop.train(run)
    finally:
        loop.train_step = plain


def test_a_stopped_and_resumed_run_equals_a_straight_one(tmp_path):
    history = []
    for name, stops in (("straight", [None]), ("stopped", [3, None])):
        path = write_config(tmp_path / f"{name}.yaml", run_config(tmp_path / name))
        codes = [run_on_ranks(1, train_until, str(path), stop)[0] for stop in stops]
        assert codes == [75 if stop else 0 for stop in stops]
        keys = ("step", "train/loss", "train/grad_norm", "train/tokens", "validation/fewer")
        history.append([{k: row[k] for k in keys if k in row} for row in rows(tmp_path / name)])
    assert history[0] == history[1]
    assert history[0][-1]["step"] == 8
    assert "validation/fewer" in history[0][-1]
    # The loss counts answers alone: three a sequence.
    assert history[0][0]["train/tokens"] == 3 * 8


def test_data_parallel_ranks_share_the_samples(tmp_path):
    histories = []
    for world in (1, 2):
        config = run_config(tmp_path / str(world))
        config["model"]["dropout"] = 0.0
        config["training"]["steps"] = 3
        path = write_config(tmp_path / f"{world}.yaml", config)
        run_on_ranks(world, train_until, str(path), None)
        histories.append(
            [r["train/loss"] for r in rows(tmp_path / str(world)) if "train/loss" in r]
        )
    # fp32 sums in another order.
    assert histories[1] == pytest.approx(histories[0], rel=2e-6)
