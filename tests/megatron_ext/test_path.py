"""PaTH over four context ranks, and a softmax layer's conversion."""

import math
from dataclasses import dataclass

import pytest
import torch

from mixtron.kernels.path_attention import blocks, triton_op
from mixtron.launch.config import RunConfig
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.mixers.path import config as path_config
from mixtron.megatron_ext.mixers.path.config import Config as PathConfig
from mixtron.megatron_ext.mixers.path.convert import softmax_to_path
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxConfig
from tests.contract.cases import ALIGNED, CP2, CP4, DENSE, RAGGED, TP2_CP2, Case, Layout
from tests.contract.checks import check_agrees
from tests.helpers.ranks import run_on_ranks

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 16}
WIDTH, TOKENS = 32, 48


@pytest.mark.parametrize("mixer", ["path", "fox"])
def test_four_context_ranks_equal_one_on_one_document(mixer):
    """The contract has packed ones."""
    check_agrees(Case(mixer, documents=DENSE), CP4)


def test_the_config_counts_with_the_kernels_own_sizes():
    for name in ("SHORTEST_BLOCK", "LONGEST_BLOCK", "PLAIN_BLOCK"):
        assert getattr(path_config, name) == getattr(blocks, name)
    assert path_config.TRITON_WORKSPACE_BYTES == triton_op.WORKSPACE_BYTES


@dataclass(frozen=True)
class RingCase(Case):
    """The mixer's debug configuration with all of its layers in a ring."""

    def config(self, layout: Layout) -> RunConfig:
        config = super().config(layout)
        mixers = {
            name: mixer.model_copy(update={"context_exchange": "ring"})
            for name, mixer in config.mixers.items()
        }
        return config.model_copy(update={"mixers": mixers})


@pytest.mark.parametrize(
    ("layout", "documents"),
    [(CP4, RAGGED), (CP4, ALIGNED), (CP4, DENSE), (CP2, ALIGNED), (TP2_CP2, RAGGED)],
    ids=["cp4-ragged", "cp4-aligned", "cp4-dense", "cp2-aligned", "tp2 cp2-ragged"],
)
@pytest.mark.parametrize("mixer", ["path", "fox"])
def test_a_ring_equals_one_rank(mixer, layout, documents):
    check_agrees(RingCase(mixer, documents=documents), layout)


def build_layer(mixer: MixerConfig, context: int = 1):
    """A layer's mixer alone, its weights drawn, and the device."""
    from mixtron.megatron_ext.config import ModelConfig
    from mixtron.megatron_ext.mixers import mixer_module
    from mixtron.megatron_ext.model import transformer_config
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel
    from mixtron.megatron_ext.parameters import initialise

    device = init_distributed()
    ranks = init_model_parallel(context=context, seed=1, device=device)
    model = ModelConfig(
        layers=1, hidden_size=WIDTH, ffn_hidden_size=8, vocab_size=8, pattern=["m"], init_std=0.2
    )
    parallel = ParallelConfig(context=context)
    config = transformer_config(model, parallel, bf16=False, recompute=False)
    layer = mixer_module(mixer.type)(config, 1, mixer=mixer, pg_collection=ranks.groups)
    initialise(layer.named_parameters(), 1, 0, 1)
    return layer, device


def past_of_three(exchange: str, overflow: bool) -> dict[str, torch.Tensor]:
    """Attention to a segment's past (and itself, by keys), and gradients of its own inputs. The
    first segment is a document, which overflows, the other two are another."""
    import torch.distributed as dist

    from mixtron.kernels.path_attention import past_queries, path_attention, path_segment
    from mixtron.megatron_ext.context_parallel import nothing_of
    from mixtron.megatron_ext.mixers.path.gathered import pasts_of_segments
    from mixtron.megatron_ext.mixers.path.ring import attend_segments_before, ring_of
    from mixtron.megatron_ext.mixers.path.segments import Segments

    rank, tokens, H, K = dist.get_rank(), 16, 2, 16
    generator = torch.Generator().manual_seed(rank)
    q, k, v, w = (torch.randn(1, tokens, H, K, generator=generator) for _ in range(4))
    w = torch.nn.functional.normalize(w, dim=-1)
    log_forget = -torch.rand(1, tokens, H, generator=generator)
    beta = 2 * torch.rand(1, tokens, H, generator=generator)
    if overflow and rank == 0:
        for x in (k, v, w, log_forget):
            x[:, 3] = -math.inf
    inputs = {"q": q, "k": k, "v": v, "w": w, "beta": beta, "log_forget": log_forget}
    q, k, v, *gates = (x.requires_grad_() for x in inputs.values())
    group = dist.group.WORLD
    assert group is not None
    offsets = torch.tensor([0, tokens, 3 * tokens])
    segments = Segments([[0], [1], [2]], tokens, 2, offsets, group, None)
    if exchange == "ring":
        queries, made = past_queries(q, k, *gates, scale=K**-0.5), [path_segment(k, *gates)]
        o, lse = attend_segments_before(*queries, made, v, ring_of(segments))
        loss = o.sum() + lse[lse.isfinite()].sum()
    else:
        [past], [v_BTGV] = pasts_of_segments([(q, k, v, *gates)], segments)
        seen = segments.documents_from(0, rank)
        o = path_attention(q, k, v_BTGV, *gates, past=past, cu_seqlens=seen, max_seqlen=2 * tokens)
        loss = o.sum() if rank else nothing_of(o).sum()
    gradients = torch.autograd.grad(loss, [q, k, v, *gates])
    return {"o": o.detach(), **dict(zip(inputs, gradients, strict=True))}


@pytest.mark.parametrize("exchange", ["keys", "ring"])
def test_what_overflows_in_a_document_stays_there(exchange):
    plain, overflown = (run_on_ranks(3, past_of_three, exchange, x) for x in (False, True))
    assert plain[2]["o"].any()
    for rank in (1, 2):
        for name, x in overflown[rank].items():
            assert torch.equal(x, plain[rank][name]), (rank, name)
    if exchange == "ring":  # with keys, the first document's own attention is in its gradient
        assert not overflown[0]["v"].any()


def work_of_rank(case: Case, layout: Layout) -> int:
    """FLOPs of all matrix products in a step's forwards and backwards."""
    from torch.utils.flop_counter import FlopCounterMode

    from tests.contract.steps import accumulate_gradients, build, micro_batches

    model = build(case, layout)
    batches = micro_batches(case, layout, model)
    with FlopCounterMode(display=False) as counted:
        accumulate_gradients(model, batches)
    return counted.get_total_flops()


@pytest.mark.parametrize("case", [Case, RingCase], ids=["gathered", "ring"])
def test_context_ranks_share_the_causal_work_equally(case):
    """One document over four ranks; later segments take more maps together, which is little."""
    work = run_on_ranks(4, work_of_rank, case("path", documents=DENSE), CP4)
    assert max(work) <= 1.02 * min(work), work


TALL = 512


def kept_by_layer(mixer: PathConfig, lengths: list[int], expected: float = math.inf) -> int:
    """Bytes that a context rank's forward of one layer leaves for backward, but for the input.

    Gloo's threads let go of what they sent when they get to it: waits for that, if it is needed.
    """
    import gc
    import time

    import torch.distributed as dist

    from mixtron.megatron_ext.batch import make_batch
    from tests.launch.fake_gpu import Allocations

    layer, device = build_layer(mixer, context=dist.get_world_size())
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = make_batch(lengths, step=0, device=device, context_rank=rank, context_size=size)
    hidden = torch.randn(sum(lengths) // size, 1, WIDTH, requires_grad=True)
    with Allocations() as allocated:
        output = layer(hidden, packed_seq_params=batch)
        deadline = time.monotonic() + 20
        gc.collect()
        while allocated.now - output[0].nbytes > expected and time.monotonic() < deadline:
            time.sleep(0.1)
    return allocated.now - output[0].nbytes


@pytest.mark.parametrize("lengths", [[TALL], [TALL // 4] * 4], ids=["one document", "short ones"])
@pytest.mark.parametrize("exchange", ["keys", "ring", "heads"])
@pytest.mark.parametrize("forget_gate", [False, True])
def test_context_ranks_keep_what_is_predicted(exchange, lengths, forget_gate):
    """Beyond one rank's share of what one rank keeps alone; of the rank that keeps the most."""
    mixer, ranks = PathConfig(**SHAPE, w_rank=4, forget_gate=forget_gate), 2
    mixer = mixer.model_copy(update={"context_exchange": exchange})
    [alone] = run_on_ranks(1, kept_by_layer, mixer, lengths)
    beyond = mixer.context_bytes_kept(TALL // ranks, 1, ranks, 4, max(lengths))
    predicted = alone / ranks + beyond
    # What is not predicted grows with no tokens: offsets, and the convolution's first rows.
    kept = max(run_on_ranks(ranks, kept_by_layer, mixer, lengths, 1.06 * predicted))
    assert kept == pytest.approx(predicted, rel=0.06)


def outputs(target: PathConfig, source: SoftmaxConfig) -> list[torch.Tensor]:
    """Of a softmax layer, and of the PaTH layer that takes its weights."""
    from mixtron.megatron_ext.batch import make_batch

    (softmax, device), (path, _) = build_layer(source), build_layer(target)
    layers = [softmax, path]
    weights = softmax_to_path(
        by_checkpoint_key(layers[0]),
        source,
        target,
        init_std=0.2,
        generator=torch.Generator().manual_seed(1),
    )
    load(layers[1], weights)
    hidden = torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    batch = make_batch([30, TOKENS - 30], step=0, device=device)
    with torch.no_grad():
        return [layer(hidden, packed_seq_params=batch)[0] for layer in layers]


def by_checkpoint_key(layer) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in layer.named_parameters():
        components = parameter.declaration.components
        if not components:
            weights[name] = parameter.detach()
            continue
        parts = parameter.detach().split(list(components.values()))
        weights |= {f"{name}.{c}": part for c, part in zip(components, parts, strict=True)}
    return weights


def load(layer, weights: dict[str, torch.Tensor]) -> None:
    expected = by_checkpoint_key(layer)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert weights[name].shape == value.shape
        assert weights[name].dtype == value.dtype
        value.copy_(weights[name])


@pytest.mark.parametrize("forget_gate", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_converted_layer_computes_nearly_what_the_softmax_layer_did(qk_norm, forget_gate):
    source = SoftmaxConfig(**SHAPE, qk_norm=qk_norm, rope_base=None)
    target = PathConfig(**SHAPE, qk_norm=qk_norm, w_rank=4, forget_gate=forget_gate)
    [(softmax, path)] = run_on_ranks(1, outputs, target, source)
    distance = float((path - softmax).norm() / softmax.norm())
    # Householder maps of beta = 0.005, 48 of them at most.
    assert 0 < distance < 0.02


def test_a_converted_layer_loses_only_rope():
    rope = SoftmaxConfig(**SHAPE)
    target = PathConfig(**SHAPE, w_rank=4)
    [(_, path)] = run_on_ranks(1, outputs, target, rope)
    [(plain, _)] = run_on_ranks(1, outputs, target, SoftmaxConfig(**SHAPE, rope_base=None))
    assert float((path - plain).norm() / plain.norm()) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 4}, "kv_heads=2 of the path mixer: the softmax layer has 4"),
        ({"qk_norm": True}, "qk_norm=False of the path mixer: the softmax layer has True"),
        ({"window": 8}, "window=8 of the softmax layer"),
    ],
)
def test_layers_that_do_not_fit_are_refused(change, message):
    source = SoftmaxConfig(**(SHAPE | change))
    with pytest.raises(ConfigError, match=message):
        softmax_to_path({}, source, PathConfig(**SHAPE), init_std=0.02, generator=torch.Generator())
