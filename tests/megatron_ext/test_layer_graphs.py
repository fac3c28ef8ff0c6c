"""Layers recorded as graphs: not a bit differs, whatever documents a batch holds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mixtron.launch.config import load_config
from tests.helpers import emulated_graphs
from tests.helpers.ranks import run_on_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 5
SMALL = ["model.layers=2", "model.hidden_size=32", "data.sequence_length=32"]
GRAPHS = "training.layer_graphs=true"


class RandomDocuments:
    """Samples of random tokens in documents of random lengths."""

    def __init__(self, sequence_length: int, vocab_size: int) -> None:
        self.sequence_length, self.vocab_size, self.drawn = sequence_length, vocab_size, 0

    def next(self, count: int) -> list[int]:
        first, self.drawn = self.drawn, self.drawn + count
        return list(range(first, self.drawn))

    def read(self, number: int):
        from mixtron.launch.sample_stream import Sample

        generator, length = np.random.default_rng(number), self.sequence_length
        tokens = generator.integers(0, self.vocab_size, length + 1)
        cuts = generator.choice(np.arange(1, length), generator.integers(0, 4), replace=False)
        starts = np.concatenate([[0], np.sort(cuts)])
        mask = np.ones(length, dtype=bool)
        mask[starts[1:] - 1] = False
        return Sample(tokens, starts, mask)

    def realised_shares(self) -> dict[str, float]:
        return {}


def trained(name: str, overrides: list[str]) -> tuple[list, list]:
    """What each step logs, and the weights after all of them."""
    from mixtron.launch.bench.step import begin, build_run, with_micro_batches
    from mixtron.launch.loop import train_step

    config = load_config(CONFIGS / f"{name}.yaml", [*SMALL, *overrides])
    ranks = begin(config)
    config = with_micro_batches(config, ranks.data_size, 2)
    with pytest.MonkeyPatch.context() as patch:
        emulated_graphs.install(patch)
        data = RandomDocuments(config.data.sequence_length, config.model.vocab_size)
        run = build_run(config, ranks, data)
        logged = [train_step(run) for _ in range(STEPS)]
    return logged, [p.detach().clone() for p in run.wrapped[0].parameters()]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [(1, ["logging.every_steps=2"]), (2, []), (1, ["training.recompute=[norm, conv, mlp_act]"])],
    ids=["one", "data 2", "recompute"],
)
def test_no_bit_differs(world, overrides):
    overrides = ["model.pattern=[kla]", *overrides]
    plain = run_on_ranks(world, trained, "debug_kla", overrides)
    recorded = run_on_ranks(world, trained, "debug_kla", [*overrides, GRAPHS])
    for (logged, weights), (found, found_weights) in zip(plain, recorded, strict=True):
        assert len({values["train/loss"] for values in logged}) == STEPS
        assert found == logged
        for weight, expected in zip(found_weights, weights, strict=True):
            assert torch.equal(weight, expected)
