"""Predicted traffic: against what ranks send, and by hand."""

from pathlib import Path

import pytest

from mixtron.launch.config import load_config
from mixtron.launch.estimate import parameters
from mixtron.launch.traffic import bytes_sent_per_step, stage_traffic
from mixtron.megatron_ext.mixers import mixer_configs
from tests.contract.cases import MIXER_INDEPENDENT
from tests.helpers.ranks import run_on_ranks
from tests.launch.counted_traffic import sent_in_a_step

CONFIGS = Path(__file__).parents[2] / "configs"


LAYOUTS = {
    "sequence": (2, ["parallel={tensor: 2, sequence: true}", "training.recompute=full"]),
}
CONTEXT_LAYOUTS = {
    "context": (2, ["parallel={context: 2}"]),
    "all": (4, ["parallel={tensor: 2, context: 2}", "training.recompute=full"]),
}
ALIKE = {
    "tensor": (2, ["parallel={tensor: 2}"]),
    "pipeline": (2, ["parallel={pipeline: 2}"]),
    "interleaved": (
        2,
        ["parallel={pipeline: 2, virtual_pipeline: 2}", "model.tied_embeddings=true"],
    ),
    "data": (2, []),
}
"""In which a mixer has no part that the others do not show, but for its parameters."""
CASES = [
    pytest.param(mixer, *layout, id=f"{mixer}-{name}")
    for mixer, config in mixer_configs().items()
    for name, layout in (LAYOUTS | (CONTEXT_LAYOUTS if config.context_parallel else {})).items()
]
CASES += [
    pytest.param(mixer, *layout, id=f"{mixer}-{name}")
    for mixer in MIXER_INDEPENDENT
    for name, layout in ALIKE.items()
]
SPLIT = ["parallel={context: 2}", "training.micro_batch_sequences=1"]
"""A document over both ranks, so that mixers may share the work on it out anew."""
RELAY = [f"mixers.{name}.context_exchange=relay" for name in ("kla", "gated_deltanet")]
CASES += [
    pytest.param("path", 2, [*SPLIT, "mixers.path.context_exchange=ring"], id="path-shared out"),
    pytest.param("fox", 2, SPLIT, id="fox-shared out"),
    pytest.param("kla", 2, [*SPLIT, *RELAY], id="kla-relay"),
    pytest.param(
        *("kla", 2, [*SPLIT, *RELAY, "training.recompute=full"]), id="kla-relay, computed again"
    ),
]


@pytest.mark.parametrize(("mixer", "world_size", "overrides"), CASES)
def test_ranks_send_what_was_predicted(mixer, world_size, overrides):
    """Within 1 %: losses, norms and replicated weights are left out."""
    path = CONFIGS / f"debug_{mixer}.yaml"
    overrides = [*overrides, "training.global_batch_tokens=512"]
    counted = run_on_ranks(world_size, sent_in_a_step, path, overrides)
    predicted = sum(bytes_sent_per_step(load_config(path, overrides), world_size).values())
    assert max(counted) == pytest.approx(predicted, rel=0.01)


def large(*overrides: str, name: str = "attention_400m"):
    return load_config(CONFIGS / f"{name}.yaml", list(overrides))


def test_one_rank_sends_nothing():
    assert bytes_sent_per_step(large(), 1) == {}


def test_data_parallel_traffic_by_hand():
    total = sum(parameters(large()).values())
    assert bytes_sent_per_step(large(), 4) == {"data": total * (4 + 2) * 3 / 4}


@pytest.mark.parametrize(
    ("overrides", "gathers"),
    [
        # Two all-reduces forward, two backward, in 24 layers; embedding and output layer one each.
        (["parallel={tensor: 4}"], 24 * 8 + 2 + 2),
        # Sequence parallelism gathers two inputs a layer once more.
        (["parallel={tensor: 4, sequence: true}"], 24 * 10 + 2 + 2),
        (["parallel={tensor: 4}", "training.recompute=full"], 24 * 12 + 2 + 2),
    ],
    ids=["all-reduce", "sequence", "recompute"],
)
def test_tensor_parallel_traffic_by_hand(overrides, gathers):
    sequence_bytes = 8 * 4096 * 1024 * 2
    sent = bytes_sent_per_step(large(*overrides), 4)
    assert sent == {"tensor": 16 * gathers * sequence_bytes * 3 / 4}


@pytest.mark.parametrize(
    ("chunks", "expected"), [(1, [1, 2, 2, 1]), (2, [3, 4, 4, 3])], ids=["1f1b", "interleaved"]
)
def test_pipeline_traffic_by_hand(chunks, expected):
    config = large(f"parallel={{pipeline: 4, virtual_pipeline: {chunks}}}")
    sequence_bytes = 8 * 4096 * 1024 * 2
    sent = [stage_traffic(config, 4, stage)["pipeline"] for stage in range(4)]
    assert sent == [16 * n * sequence_bytes for n in expected]
    tied = config.model_copy(
        update={"model": config.model.model_copy(update={"tied_embeddings": True})}
    )
    extra = stage_traffic(tied, 4, 0)["pipeline"] - sent[0]
    assert extra == 4 * 32000 * 1024


def test_context_parallel_traffic_by_hand():
    config = large("parallel={context: 2}", "model.layers=1")
    # q, k, v and the output of half the tokens, of which half goes to the other rank; and back.
    assert stage_traffic(config, 2, 0)["context"] == 16 * 2 * 4 * (4 * 4096) * 1024 * 2 / 2
    kla = large("parallel={context: 4}", "model.layers=1", name="kla_400m")
    state_map, tail = 8 * 128 * (128 + 128) * 4, 3 * 3 * 1024 * 2
    assert stage_traffic(kla, 4, 0)["context"] == 16 * 2 * 3 * (state_map + tail)
