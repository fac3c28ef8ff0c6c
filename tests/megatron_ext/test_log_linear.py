"""The log-linear mixer: context ranks that pass on trees, lambdas that are not constant, its two
bases, and the tree's depth."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.log_linear_attention import (
    log_linear_attention,
    log_linear_segment_map,
    required_levels,
)
from mixtron.launch.config import load_config
from mixtron.launch.estimate import parameters
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.errors import ConfigError
from tests.contract.cases import CONFIGS, CP2, ONE_RANK, TP2, TP2_CP2, TP2_SP, Case, Layout
from tests.contract.checks import check_gradients, check_input_gradients, check_logits
from tests.contract.steps import RankResult, step
from tests.helpers.ranks import run_on_ranks

T, H, J, K, V, L = 96, 1, 2, 4, 3, 8
DOCUMENTS = {
    "one": [T],
    "ragged": [5, 1, 64, 26],
    "aligned": [24, 24, 48],
    "late": [70, 26],
}
CASE = Case("log_linear", documents=((1, 1, 40, 22), (64,)))
CP4 = Layout("cp4", ParallelConfig(context=4))


def make_inputs(base: str) -> list[torch.Tensor]:
    """q, k, v, log decay, lambda and, for the delta rule, beta; fp32."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    inputs = [
        noise(1, T, H, K),
        F.normalize(noise(1, T, H, K), dim=-1),
        noise(1, T, J, V),
        -0.05 * noise(1, T, J).exp(),
        noise(1, T, J, L),
    ]
    return [*inputs, noise(1, T, J).sigmoid()] if base == "gated_delta" else inputs


def output_weights() -> torch.Tensor:
    return torch.randn(1, T, J, V, generator=torch.Generator().manual_seed(1))


def on_a_rank(base: str, lengths: list[int]) -> tuple[list, int]:
    """This rank's outputs and gradients, and the bytes that it hands to the exchange."""
    import torch.distributed as dist

    from mixtron.megatron_ext.mixers.log_linear import context

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * T // size, (rank + 1) * T // size)
    leaves = [x[:, mine].clone().requires_grad_() for x in make_inputs(base)]
    q, k, v, log_decay, lambda_, *beta = leaves
    writes = (k, v, log_decay, beta[0] if beta else None)
    share = context.share_of(lengths, rank, size)
    documents = {"lengths": share.lengths, "initial_position": share.position}
    sent = []

    def counted(x, group):
        sent.append(x.nbytes)
        return gather(x, group)

    gather = context.gather
    with mock.patch.object(context, "gather", counted):
        segment_map = log_linear_segment_map(*writes, levels=L, **documents)
        states = context.states_before(segment_map, lengths, dist.group.WORLD)  # type: ignore[arg-type]
    o = log_linear_attention(q, *writes, lambda_, initial_states_BSJKV=states, **documents)
    gradients = torch.autograd.grad((o * output_weights()[:, mine]).sum(), leaves)
    return [x.detach().tolist() for x in (o, *gradients)], sent[0]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("base", ["gated_linear", "gated_delta"])
def test_context_ranks_equal_one_rank(base, ranks, documents):
    lengths = DOCUMENTS[documents]
    results = run_on_ranks(ranks, on_a_rank, base, lengths)
    transition = K * K if base == "gated_delta" else 1
    limit = 4 * J * ((2 + math.log2(T / ranks)) * K * V + transition)
    assert all(0 < sent <= limit for _, sent in results)
    inputs = [x.double().requires_grad_() for x in make_inputs(base)]
    q, k, v, log_decay, lambda_, *beta = inputs
    beta = beta[0] if beta else None
    o = log_linear_attention(
        q, k, v, log_decay, beta, lambda_, lengths=lengths, backend="reference"
    )
    exact = [o, *torch.autograd.grad((o * output_weights()).sum(), inputs)]
    found = [
        torch.cat([torch.tensor(x) for x in parts], dim=1)
        for parts in zip(*(tensors for tensors, _ in results), strict=True)
    ]
    names = ("o", "q", "k", "v", "log_decay", "lambda", "beta")
    for name, x, y in zip(names, found, exact, strict=False):
        # fp32 sums of about a hundred terms.
        assert (x - y).norm() < 2e-6 * y.norm(), name


def test_the_root_is_enough_for_shards_that_are_subtrees():
    from mixtron.megatron_ext.mixers.log_linear.context import share_of

    for rank in range(4):
        share = share_of([256], rank, 4)
        assert (share.position, share.lengths) == (64 * rank, [64])
        assert len(share.own_nodes) == 1
    assert share_of([5, 100, 151], 1, 4).lengths == [41, 23]
    assert share_of([5, 100, 151], 1, 4).own_nodes == [0, 1, 2, 4]
    assert share_of([5, 251], 1, 4).own_nodes == [0, 1, 3, 4, 5, 6]
    assert not share_of([128, 128], 1, 4).goes_on


def step_with_drawn_lambdas(case: Case, layout: Layout) -> RankResult:
    """The network's second layer and every table drawn, not constant: else most of lambda's
    gradients are 0 at the start."""
    from mixtron.megatron_ext.mixers.log_linear import level_weights
    from mixtron.megatron_ext.parameters import normal

    with mock.patch.object(level_weights, "constant", return_value=normal(0.5)):
        return step(case, layout)


@pytest.mark.parametrize("layout", [TP2, TP2_SP, CP2, CP4, TP2_CP2], ids=lambda layout: layout.name)
def test_lambdas_that_are_not_constant_have_whole_gradients(layout):
    (reference,) = run_on_ranks(1, step_with_drawn_lambdas, CASE, ONE_RANK)
    for layer, names in enumerate([("hidden_weight", "output_weight", "output_bias"), ("table",)]):
        for name in names:
            shard = reference.shards[f"decoder.layers.{layer}.self_attention.level_weights.{name}"]
            assert shard.gradient is not None
            # Of every level, as the last number along a row.
            assert shard.gradient.unflatten(-1, (-1, 7)).flatten(0, -2).any(0).all()
    results = run_on_ranks(layout.world_size, step_with_drawn_lambdas, CASE, layout)
    check_logits(reference, results)
    check_input_gradients(reference, results)
    check_gradients(reference, results)


def outputs_of_bases(ones: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of a layer on each base with every lambda 1 (or not), and of the plain mixer with the
    same weights."""
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.mixers.kla.config import Config as KLA
    from mixtron.megatron_ext.mixers.log_linear.config import Config
    from mixtron.megatron_ext.mixers.mamba2.config import Config as Mamba2
    from mixtron.megatron_ext.model import build_model, forward
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    device = init_distributed()
    ranks = init_model_parallel(seed=1, device=device)
    shape = {"heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
    fixed = {**shape, "levels": 8, "lambda": "fixed"}
    model = CASE.config(ONE_RANK).model.model_copy(update={"layers": 1, "pattern": ["mixer"]})
    tokens_BT = torch.randint(0, 100, (1, 100), generator=torch.Generator().manual_seed(2))
    batch = make_batch([37, 63], step=0, device=device)
    found = []
    for base, plain in (
        ("gated_linear", Mamba2(**shape)),
        ("gated_delta", KLA(**shape, step_size="learned", normalize_keys=True)),
    ):
        chunks = [
            build_model(
                model, {"mixer": m}, ParallelConfig(), ranks, seed=1, bf16=False, max_tokens=100
            )[0]
            for m in (plain, Config.model_validate({**fixed, "base": base}))
        ]
        weights = chunks[0].state_dict()
        if ones:
            table = chunks[1].state_dict()["decoder.layers.0.self_attention.level_weights.table"]
            name = "decoder.layers.0.self_attention.level_weights.table"
            weights[name] = torch.full_like(table, math.log(math.e - 1))
        chunks[1].load_state_dict(weights, strict=False)
        with torch.no_grad():
            pair = [forward(chunk, model, ranks, tokens_BT, batch)[0] for chunk in chunks]
        found.append((pair[0], pair[1]))
    return found


def test_every_lambda_one_is_the_base_mixer():
    (pairs,) = run_on_ranks(1, outputs_of_bases, True)
    for plain, tree in pairs:
        assert float((plain - tree).norm() / plain.norm()) < 1e-5
    # softplus(0.54) is 0.9992: near, and not the same.
    (pairs,) = run_on_ranks(1, outputs_of_bases, False)
    for plain, tree in pairs:
        assert 1e-7 < float((plain - tree).norm() / plain.norm()) < 1e-3


def lambdas_at_the_start() -> dict[str, torch.Tensor]:
    """Of the debug config's layers, on a random token."""
    from mixtron.megatron_ext.model import build_model
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    config = CASE.config(ONE_RANK)
    ranks = init_model_parallel(seed=1, device=init_distributed())
    (chunk,) = build_model(
        config.model, config.mixers, config.parallel, ranks, seed=1, bf16=True, max_tokens=64
    )
    generator = torch.Generator().manual_seed(4)
    found = {}
    for layer, name in zip(chunk.decoder.layers, config.model.layer_mixers, strict=True):
        module, mixer = layer.self_attention.level_weights, config.mixers[name]
        assert all(p.dtype == torch.float32 for p in module.parameters())
        d_BTE = torch.randn(1, 3, mixer.value_heads * mixer.L, generator=generator).bfloat16()
        found[name] = module(None if mixer.level_weights == "fixed" else d_BTE, d_BTE.shape[:2])
    return {name: x.detach().clone() for name, x in found.items()}


def test_lambdas_start_as_the_papers_do():
    (found,) = run_on_ranks(1, lambdas_at_the_start)
    assert all(x.dtype == torch.float32 for x in found.values())
    for name in ("adaptive", "fixed"):
        torch.testing.assert_close(
            found[name], torch.full_like(found[name], 0.9992), atol=1e-4, rtol=0
        )
    torch.testing.assert_close(found["competing"], torch.full((1, 3, 4, 7), 1 / 7))
    assert found["linear"].std() > 0.1
    assert found["fixed"].shape == (1, 3, 4, 9)


def decode_lengths(tokens: int) -> list[tuple[int, int]]:
    """Of each layer's cache after every decoded token: tokens so far, states held."""
    from mixtron.megatron_ext.batch import decode_batch, prefill_batch
    from mixtron.megatron_ext.model import build_model, forward
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    config = CASE.config(ONE_RANK)
    device = init_distributed()
    ranks = init_model_parallel(seed=1, device=device)
    (chunk,) = build_model(
        config.model, config.mixers, config.parallel, ranks, seed=1, bf16=False, max_tokens=64
    )
    prefill = prefill_batch([3], device)
    cache, held = prefill.cache, []
    assert cache is not None
    with torch.no_grad():
        forward(chunk, config.model, ranks, torch.tensor([[5, 6, 7]]), prefill)
        for count in range(4, tokens + 1):
            forward(chunk, config.model, ranks, torch.tensor([[count]]), decode_batch(cache))
            cache.lengths += 1
            held += [(count, x["states"].shape[1]) for x in cache.layers.values()]
    return held


def test_decode_holds_few_states_and_ends_where_the_tree_does():
    (held,) = run_on_ranks(1, decode_lengths, 64)
    assert held
    assert all(states == n.bit_length() <= required_levels(n) for n, states in held)
    with pytest.raises(Exception, match=r"65 tokens needs log_linear levels=8, found 7"):
        run_on_ranks(1, decode_lengths, 65)


def test_levels_follow_the_sequence_length():
    path = CONFIGS / "debug_log_linear.yaml"
    assert load_config(path).mixers["adaptive"].L == 7
    assert load_config(path).mixers["fixed"].L == 9
    longer = ["data.sequence_length=65", "training.global_batch_tokens=650"]
    assert load_config(path, longer).mixers["adaptive"].L == 8
    with pytest.raises(ConfigError, match=r"mixers.linear.levels=6 .* needs levels=7"):
        load_config(path, ["mixers.linear.levels=6"])
    with pytest.raises(ConfigError, match=r"mlp_activation=gelu needs lambda=mlp"):
        load_config(path, ["mixers.linear.mlp_activation=gelu"])


def test_the_network_is_a_tiny_part_of_a_model_of_0_4b():
    config = load_config(CONFIGS / "log_linear_400m.yaml", ["mixers.log_linear.levels=16"])
    parts = parameters(config)
    assert parts["log_linear.lambda_mlp"] == 24 * (4 * 16**2 + 16)
    assert 3.5e8 < sum(parts.values()) < 4.5e8
    assert parts["log_linear.lambda_mlp"] / sum(parts.values()) < 0.007 / 100
