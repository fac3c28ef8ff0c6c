"""`mixtron eval synthetic TASK`, and that learning works at all."""

import subprocess
import sys

import numpy as np
import pytest

from mixtron.launch.config import load_config
from mixtron.launch.synthetic.evaluate import grid_of, trained_task
from mixtron.launch.synthetic.grid import settings_of
from mixtron.launch.synthetic.task import tasks
from mixtron.megatron_ext.errors import ConfigError
from tests.helpers.jobs import ENVIRONMENT, write_config
from tests.helpers.ranks import run_on_ranks
from tests.launch.synthetic.test_data import run_config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["mqra", "runs/x"],
            "mixtron: no task 'mqra'; did you mean 'mqrar'?; tasks: "
            + ", ".join(tasks())
            + " (or suite)",
        ),
        (["mqar", "runs/x"], "mixtron: runs/x/config.yaml: no such config file"),
        (["suite", "runs/x.yaml"], "mixtron: runs/x.yaml: no such config file"),
    ],
)
def test_command_refuses_in_one_line(arguments, message):
    run = subprocess.run(
        [sys.executable, "-m", "mixtron.launch.cli", "eval", "synthetic", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr.splitlines() == [message]


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["paris=4"], "mqar: mqar has no parameter 'paris'; it takes: length, pairs, vocab_size,"),
        (["pairs=x"], "mqar.pairs.0: input should be a valid integer, found 'x'"),
        (["pairs"], "'pairs': expected parameter=value or parameter=v1,v2"),
        (["pairs=["], "'pairs=[': the values are not valid YAML"),
        (["length=15"], "mqar: mqar at length 15: the length must be even"),
        (["length=1.5"], "mqar.length: input should be an integer above 0, found 1.5"),
        (["vocab_size=64"], "mqar with length=16, pairs=1, vocab_size=64 has 64 ids"),
    ],
)
def test_refusal_names_the_parameter(tmp_path, assignments, message):
    from mixtron.launch.synthetic.evaluate import evaluate_run

    write_config(tmp_path / "config.yaml", run_config(tmp_path))
    with pytest.raises(ConfigError) as caught:
        evaluate_run(tasks()["mqar"], tmp_path, assignments, 10, 1)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_grid_is_a_product_of_what_is_named():
    task = tasks()["mqar"](pairs=2, vocab_size=32)
    grid = grid_of(["length=16,32", "pairs=1, 2"])
    assert grid == {"length": [16, 32], "pairs": [1, 2]}
    settings = settings_of(task, 16, grid, "mqar")
    assert [(s.length, s.task.pairs) for s in settings] == [
        (16, [1]),
        (16, [2]),
        (32, [1]),
        (32, [2]),
    ]
    assert all(s.task.vocab_size == 32 for s in settings)


@pytest.mark.parametrize("name", tasks())
def test_every_default_grid_can_be_made(name):
    task, length = tasks()[name](), 256
    settings = settings_of(task, length, task.evaluation_grid(length), name)
    assert len(settings) > 1
    if name != "flip_flop":  # its tests are of the length that it trains at
        assert {s.length for s in settings} == {256, 512, 1024, 2048}


def test_a_run_is_evaluated_with_the_parameters_that_it_was_trained_with(tmp_path):
    path = write_config(tmp_path / "config.yaml", run_config(tmp_path))
    config = load_config(path)
    assert trained_task(config, tasks()["mqar"]).pairs == [3]
    assert trained_task(config, tasks()["flip_flop"]).ignore == [0.8]


def score_of_oracles() -> list:
    """Accuracy of a `model` that knows every answer but those of odd sequences."""
    import torch

    from mixtron.launch.synthetic import accuracy
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    ranks = init_model_parallel(seed=1, device=init_distributed())
    task = tasks()["mqar"](pairs=2, vocab_size=16)
    [setting] = settings_of(task, 16, {}, "mqar")
    examples = task.examples(1, "evaluation", np.arange(70), 16)
    labels = examples.labels_NT.copy()
    labels[1::2] += 1
    asked = iter(np.split(labels, [64]))
    plain = accuracy.forward
    accuracy.forward = lambda *_: torch.nn.functional.one_hot(
        torch.from_numpy(next(asked)).flatten()[None], 17
    )
    try:
        result = accuracy.score(torch.nn.Identity(), None, ranks, setting, sequences=70, seed=1)
    finally:
        accuracy.forward = plain
    return [result.accuracy, result.sequence_accuracy, result.answers, result.sequences]


def test_accuracy_counts_answers_alone():
    assert run_on_ranks(1, score_of_oracles) == [[0.5, 0.5, 140, 70]]
