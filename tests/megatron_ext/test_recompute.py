"""Selective recomputation: it changes no bit, keeps less, and refuses what it cannot do."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from mixtron.launch.bench.step import RandomTokens, begin, build_run, with_micro_batches
from mixtron.launch.checks import check
from mixtron.launch.config import load_config
from mixtron.launch.loop import train_step
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.recompute import computed_again
from tests.contract.cases import Case, Layout
from tests.contract.steps import step
from tests.helpers.ranks import run_on_ranks

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PARTS = ("norm", "conv", "mlp_act")


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(), ParallelConfig(tensor=2, sequence=True)], ids=["one", "tp2 sp"]
)
def test_parts_computed_again_change_no_bit(parallel):
    parts = PARTS if parallel.tensor > 1 else (*PARTS, "gate")
    layouts = [Layout("kept", parallel), Layout("again", parallel, recomputed=parts)]
    kept, again = (run_on_ranks(parallel.tensor, step, Case("kla"), x)[0] for x in layouts)
    assert again.loss == kept.loss
    for name, shard in kept.shards.items():
        assert torch.equal(again.shards[name].gradient, shard.gradient), name


def test_what_is_computed_again_is_not_kept():
    x = torch.randn(4, 6, requires_grad=True)
    computed = []

    def double():
        computed.append(None)
        return (2 * x,)

    (output,) = double()
    storage = weakref.ref(output.untyped_storage())
    with computed_again(double, (output,)):
        first, second = output.split(3, dim=-1)
        result = (first.square() * second.square()).sum()
    del output, first, second
    assert storage() is None
    (expected,) = torch.autograd.grad(
        ((2 * x)[:, :3].square() * (2 * x)[:, 3:].square()).sum(), [x]
    )
    (found,) = torch.autograd.grad(result, [x])
    assert torch.equal(found, expected)
    assert len(computed) == 2, "once for the forward and once for both squares"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.norm=layernorm"], "is for layers with model.norm=rmsnorm"),
        (["model.mlp=gelu"], "mlp_act is for model.mlp=swiglu, not gelu"),
        (["parallel={context: 2}"], "conv is for parallel.context=1, not 2"),
        (["model.pattern=[attention]"], "none of attention has it"),
        (["parallel={tensor: 2}"], "gate is for parallel.tensor=1, not 2"),
        (["training.recompute=[gate]", "model.pattern=[attention]"], "gate is for the gated norm"),
        (["engine=deepspeed"], "engine=deepspeed takes none or full"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(overrides, said):
    attention = "mixers.attention={type: softmax_attention, heads: 4, kv_heads: 4, head_dim: 16}"
    given = ["training.recompute=[norm, conv, gate, mlp_act]", attention, *overrides]
    with pytest.raises(ConfigError, match=said):
        check(load_config(CONFIGS / "debug_kla.yaml", given), 2)


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^training\.recompute\.0: .*found 'norms'$"):
        load_config(CONFIGS / "debug_kla.yaml", ["training.recompute=[norms]"])


def bytes_alive_after_steps() -> list[int]:
    """In tensors that Python knows, with nothing collected in between."""
    parts = "training.recompute=[norm, conv, gate, mlp_act]"
    config = load_config(CONFIGS / "debug_kla.yaml", [parts])
    ranks = begin(config)
    config = with_micro_batches(config, ranks.data_size, 1)
    data = RandomTokens(config.data.sequence_length, config.model.vocab_size, 1)
    run, alive = build_run(config, ranks, data), []
    gc.collect()
    gc.disable()
    for _ in range(3):
        train_step(run)
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        alive.append(sum({x.untyped_storage()._cdata: x.nbytes for x in tensors}.values()))
    gc.enable()
    return alive


def test_nothing_of_a_logged_step_outlives_it():
    """Within 2 %: some small tensors of the host come and go. The layers' would be 8 %."""
    [(_, second, third)] = run_on_ranks(1, bytes_alive_after_steps)
    assert third < 1.02 * second
