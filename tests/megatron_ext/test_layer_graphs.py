"""Layers recorded as graphs: not a bit differs, whatever documents a batch holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixtron.launch.checks import check, check_device
from mixtron.launch.config import load_config
from mixtron.megatron_ext.errors import ConfigError
from tests.helpers import emulated_graphs
from tests.helpers.ranks import RankFailure, run_on_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 5
FOX = "mixers.fox={type: fox, heads: 2, kv_heads: 2, head_dim: 8}"
LOG_LINEAR = (
    "mixers.log={type: log_linear, heads: 2, value_heads: 2, key_dim: 64, value_dim: 64, "
    "kernel: triton}"
)
TRITON_PATH = [
    "model.pattern=[path]",
    "mixers.path={type: path, heads: 2, kv_heads: 2, head_dim: 64, kernel: triton}",
]
SMALL = ["model.layers=2", "model.hidden_size=32", "data.sequence_length=32"]


class RandomDocuments:
    """Samples of random tokens, every other one a single document, the rest of random lengths."""

    def __init__(self, sequence_length: int, vocab_size: int) -> None:
        self.sequence_length, self.vocab_size, self.drawn = sequence_length, vocab_size, 0

    def next(self, count: int) -> list[int]:
        plan = self.upcoming(count)
        self.drawn += count
        return plan

    def upcoming(self, count: int) -> list[int]:
        return list(range(self.drawn, self.drawn + count))

    def read(self, number: int):
        from mixtron.launch.sample_stream import Sample

        generator, length = np.random.default_rng(number), self.sequence_length
        tokens = generator.integers(0, self.vocab_size, length + 1)
        # So that a micro-batch's longest document is known, after which PaTH cuts its tokens.
        count = generator.integers(1, 4) if number % 2 else 0
        cuts = generator.choice(np.arange(1, length), count, replace=False)
        starts = np.concatenate([[0], np.sort(cuts)])
        mask = np.ones(length, dtype=bool)
        mask[starts[1:] - 1] = False
        return Sample(tokens, starts, mask)

    def realised_shares(self) -> dict[str, float]:
        return {}


def trained(
    name: str, overrides: list[str], layer_graphs: bool = False, *, ranks: Any = None
) -> tuple[list, list]:
    """What each step logs, and the weights after all of them."""
    from mixtron.launch.bench.step import begin, build_run, with_micro_batches
    from mixtron.launch.loop import train_step

    config = load_config(CONFIGS / f"{name}.yaml", [*SMALL, *overrides])
    ranks = ranks or begin(config)
    config = with_micro_batches(config, ranks.data_size, 2)
    # Not before: a config that says so is refused on a CPU.
    training = config.training.model_copy(update={"layer_graphs": layer_graphs})
    config = config.model_copy(update={"training": training})
    with pytest.MonkeyPatch.context() as patch:
        if ranks.device.type == "cpu":
            emulated_graphs.install(patch)
        data = RandomDocuments(config.data.sequence_length, config.model.vocab_size)
        run = build_run(config, ranks, data)
        logged = [train_step(run) for _ in range(STEPS)]
    return logged, [p.detach().clone() for p in run.wrapped[0].parameters()]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["logging.every_steps=2"]),
        (2, []),
        (1, ["training.recompute=[norm, conv, gate, mlp_act]"]),
        (2, ["parallel.tensor=2", "parallel.sequence=false"]),
        (2, ["parallel.tensor=2", "parallel.sequence=true", "training.recompute=[norm]"]),
        (2, ["parallel.context=2", "mixers.kla.context_exchange=relay"]),
        (2, ["parallel.context=2", "mixers.kla.context_exchange=state"]),
    ],
    ids=["one", "data 2", "recompute", "tensor 2", "tensor 2 sequence", "relay", "state"],
)
def test_no_bit_differs(world, overrides):
    overrides = ["model.pattern=[kla]", *overrides]
    plain = run_on_ranks(world, trained, "debug_kla", overrides)
    recorded = run_on_ranks(world, trained, "debug_kla", overrides, True)
    for (logged, weights), (found, found_weights) in zip(plain, recorded, strict=True):
        assert len({values["train/loss"] for values in logged}) == STEPS
        assert found == logged
        for weight, expected in zip(found_weights, weights, strict=True):
            assert torch.equal(weight, expected)


PATH = "path: {type: path, heads: 2, kv_heads: 2, head_dim: 8, w_rank: 2}"
PATH_FOX = "path_fox: {type: path, heads: 2, kv_heads: 1, head_dim: 8, forget_gate: true}"
KLA = "kla: {type: kla, heads: 2, value_heads: 2, key_dim: 8, value_dim: 8}"


@pytest.mark.parametrize(
    ("pattern", "mixers"),
    [("path, path_fox", [PATH, PATH_FOX]), ("kla, path", [KLA, PATH])],
)
def test_no_bit_differs_of_other_mixers(pattern, mixers):
    test_no_bit_differs(1, [f"model.pattern=[{pattern}]", f"mixers={{{', '.join(mixers)}}}"])


def test_no_bit_differs_of_states_that_context_ranks_exchange():
    dims = "heads: 2, key_dim: 8, value_dim: 8"
    mixers = [
        f"gla: {{type: gla, {dims}}}",
        f"linear: {{type: linear_attention, {dims}}}",
        f"mamba2: {{type: mamba2, {dims}, value_heads: 2}}",
    ]
    overrides = ["model.pattern=[gla, linear, mamba2]", f"mixers={{{', '.join(mixers)}}}"]
    test_no_bit_differs(2, [*overrides, "model.layers=3", "parallel.context=2"])


def test_a_batch_that_a_layer_would_read_otherwise_is_refused():
    with pytest.raises(
        RankFailure,
        match=r"mixer 'full' reads lengths of a batch on the host, which was .*; set "
        r"mixers\.full\.kernel=triton, or training",
    ):
        run_on_ranks(1, trained, "debug_softmax_attention", [], True)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.pipeline=2"], "with parallel.pipeline=2: .* for one micro-batch under way"),
        (["parallel.context=2", *TRITON_PATH], "'path' .* what context ranks send each other"),
        (["model.norm=layernorm"], "is for layers with model.norm=rmsnorm"),
        (["training.debug=true"], "leaves training.debug=true nothing to compare"),
        (["training.recompute=full"], "cannot go with training.recompute=full"),
        (["model.pattern=[fox]", FOX], "'fox' .* decides .*; mixers.fox.kernel=triton does not"),
        (["model.pattern=[log]", LOG_LINEAR], "mixer 'log' .type 'log_linear'. decides .* launch$"),
    ],
)
def test_what_cannot_be_recorded_is_refused(overrides, said):
    config = load_config(CONFIGS / "debug_kla.yaml", ["training.layer_graphs=true", *overrides])
    with pytest.raises(ConfigError, match=said):
        check(config, config.parallel.context * config.parallel.pipeline)


def test_changing_lengths_are_refused_where_layers_read_them():
    config = load_config(CONFIGS / "attention_400m.yaml", ["training.layer_graphs=true"])
    with pytest.raises(ConfigError, match=r"'attention' .* set mixers\.attention\.kernel=triton$"):
        check(config, 1)
    check(config, 1, packed=False)
    on_the_device = ["training.layer_graphs=true", "mixers.attention.kernel=triton"]
    check(load_config(CONFIGS / "attention_400m.yaml", on_the_device), 1)


def test_a_cpu_is_refused():
    config = load_config(CONFIGS / "debug_kla.yaml", ["training.layer_graphs=true"])
    with pytest.raises(ConfigError, match="needs a GPU, and this is a cpu"):
        check_device(config, "cpu")
