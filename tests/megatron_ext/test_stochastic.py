"""Stochastic attention's permutations under every layout, and tokens travelling to their slots."""

import pytest
import torch
import torch.distributed as dist

from mixtron.megatron_ext.mixers.stochastic.config import Config
from mixtron.megatron_ext.token_exchange import exchange_tokens, slot_pieces, with_rows_before
from tests.contract.cases import FOUR, ONE_RANK, PP2, PP2_VPP2, TP2_CP2, Case, Layout
from tests.helpers.ranks import RankFailure, run_on_ranks

CASE = Case("stochastic", documents=FOUR)
DP2 = Layout("dp2", data=2)
RECOMPUTE = Layout("recompute", recompute=True)


def drawn(case: Case, layout: Layout, step: int) -> dict[int, list[int]]:
    """By global layer number: the hash of what each forward of a layer drew, batch by batch."""
    import dataclasses

    from mixtron.megatron_ext.mixers.stochastic.module import Mixer
    from tests.contract.steps import accumulate_gradients, build, micro_batches

    model = build(case, layout)
    batches = micro_batches(case, layout, model)
    batches = [
        dataclasses.replace(b, batch=dataclasses.replace(b.batch, step=step)) for b in batches
    ]
    layers = [m for chunk in model.wrapped for m in chunk.modules() if isinstance(m, Mixer)]
    hashes = {layer.layer_number: [] for layer in layers}
    for layer in layers:
        layer.on_draw = lambda number, hashes_2: hashes[number].append(int(hashes_2[0]))
    accumulate_gradients(model, batches)
    return hashes


def check_debug_mode(case: Case, layout: Layout, faulty_rank: int | None) -> None:
    from mixtron.megatron_ext.mixers.stochastic.module import Mixer
    from mixtron.megatron_ext.permutation_check import compare_permutations
    from tests.contract.steps import accumulate_gradients, build, micro_batches

    model = build(case, layout)
    if dist.get_rank() == faulty_rank:
        for chunk in model.wrapped:
            for m in chunk.modules():
                if isinstance(m, Mixer) and m.layer_number == 4:
                    m.mixer = m.mixer.model_copy(update={"seed": 1})
    compare_permutations(model.wrapped, model.ranks)
    accumulate_gradients(model, micro_batches(case, layout, model))


@pytest.fixture(scope="module")
def one_rank() -> dict[int, list[int]]:
    return run_on_ranks(1, drawn, CASE, ONE_RANK, 5)[0]


def test_layers_and_steps_draw_anew_and_fixed_ones_do_not(one_rank):
    later = run_on_ranks(1, drawn, CASE, ONE_RANK, 6)[0]
    sa, swa, sa_swa, fixed = 1, 2, 3, 4
    assert one_rank[swa] == []
    everything = one_rank[sa] + one_rank[sa_swa] + one_rank[fixed] + later[sa] + later[sa_swa]
    assert len(set(everything)) == len(everything) == 5 * len(FOUR)
    assert later[fixed] == one_rank[fixed]


@pytest.mark.parametrize("layout", [TP2_CP2, PP2, PP2_VPP2, RECOMPUTE], ids=lambda x: x.name)
def test_every_rank_draws_what_one_rank_draws(layout, one_rank):
    """A process that starts here knows no more than the step: so does one that resumes."""
    ranks = run_on_ranks(layout.world_size, drawn, CASE, layout, 5)
    assert set().union(*ranks) == set(one_rank)
    forwards = 2 if layout.recompute else 1
    for layers in ranks:
        for number, hashes in layers.items():
            assert sorted(hashes) == sorted(one_rank[number] * forwards)


@pytest.mark.parametrize("layout", [TP2_CP2, DP2, PP2], ids=lambda x: x.name)
def test_debug_mode_accepts_equal_permutations(layout):
    run_on_ranks(layout.world_size, check_debug_mode, CASE, layout, None)


@pytest.mark.parametrize("layout", [TP2_CP2, DP2], ids=lambda x: x.name)
def test_debug_mode_finds_a_rank_that_draws_others(layout):
    with pytest.raises(
        RankFailure, match=r"PermutationMismatch: layer 4: \w+-parallel ranks \[1\]"
    ):
        run_on_ranks(layout.world_size, check_debug_mode, CASE, layout, 1)


TOKENS = 24


def travelled(order: list[int], before: int, after: int) -> tuple:
    """What arrives at this rank by slot, what comes back, and the gradient of what was sent."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    order_T, share = torch.tensor(order), TOKENS // group.size()
    x_T1 = torch.arange(TOKENS, dtype=torch.float64)[rank * share : (rank + 1) * share, None]
    x_T1.requires_grad_()
    pieces = slot_pieces(TOKENS, group.size(), before, after)
    exchange = exchange_tokens(order_T, order_T, pieces, group)
    arrived_S1 = exchange.to_slots(x_T1)[exchange.row_S]
    # Each slot of rank r's piece weighs r + 1: the gradients tell who got the token.
    (gradient,) = torch.autograd.grad((arrived_S1 * (rank + 1)).sum(), x_T1)
    own = exchange_tokens(order_T, order_T, slot_pieces(TOKENS, group.size(), 0, 0), group)
    back = own.to_tokens(2 * own.to_slots(x_T1))
    return arrived_S1.flatten().tolist(), gradient.flatten().tolist(), back.flatten().tolist()


def planned_without_values(order: list[int]) -> list[tuple]:
    """Of a tensor without values, of which nothing can be read: as little waits on a GPU."""
    group = dist.group.WORLD
    assert group is not None
    order_T = torch.tensor(order)
    pieces = slot_pieces(TOKENS, group.size(), 3, 2)
    plans = [exchange_tokens(x, order_T, pieces, group) for x in (order_T, order_T.to("meta"))]
    return [(p.sent, p.received, p.token_R.shape, p.row_S.shape) for p in plans]


def test_planning_an_exchange_does_not_wait_for_the_device():
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1)).tolist()
    for plain, without_values in run_on_ranks(4, planned_without_values, order):
        assert plain == without_values


@pytest.mark.parametrize("halo", [(0, 0), (2, 1), (9, 0), (30, 30)], ids=str)
@pytest.mark.parametrize("order", ["random", "plain", "reversed"])
def test_tokens_travel_to_every_rank_that_needs_them_and_back(order, halo):
    orders = {
        "random": torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)).tolist(),
        "plain": list(range(TOKENS)),
        "reversed": list(range(TOKENS))[::-1],
    }
    ranks, share = 4, TOKENS // 4
    results = run_on_ranks(ranks, travelled, orders[order], *halo)
    pieces = slot_pieces(TOKENS, ranks, *halo)
    for rank, (arrived, gradient, back) in enumerate(results):
        assert arrived == [orders[order][slot] for slot in pieces[rank]]
        mine = range(rank * share, (rank + 1) * share)
        assert back == [2 * token for token in mine]
        slots = [orders[order].index(token) for token in mine]
        assert gradient == [
            sum(r + 1 for r, piece in enumerate(pieces) if slot in piece) for slot in slots
        ]


def halo_of_rank(rows: int) -> tuple[list, list]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    x_T1 = torch.arange(rank * 3, rank * 3 + 3, dtype=torch.float64)[:, None].requires_grad_()
    seen_S1 = with_rows_before(x_T1, rows, group)
    (gradient,) = torch.autograd.grad(seen_S1.sum(), x_T1)
    return seen_S1.flatten().tolist(), gradient.flatten().tolist()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 8, 100])
def test_halo_from_as_many_ranks_before_as_hold_it(rows):
    results = run_on_ranks(4, halo_of_rank, rows)
    for rank, (seen, gradient) in enumerate(results):
        assert seen == list(range(max(3 * rank - rows, 0), 3 * rank + 3))
        readers = [range(max(3 * r - rows, 0), 3 * r + 3) for r in range(4)]
        assert gradient == [sum(t in r for r in readers) for t in range(3 * rank, 3 * rank + 3)]


def config(**options) -> Config:
    return Config(heads=4, kv_heads=2, head_dim=16, window=9, **options)


def test_flops_count_what_is_attended():
    """Against the masks: the mean over many permutations of the pairs attended."""
    from mixtron.kernels.windowed_attention import attended_pairs
    from mixtron.kernels.windowed_attention.coverage import random_order

    n = 48
    for side in ("two", "one"):
        pairs = torch.stack(
            [
                attended_pairs(random_order(n, layer), [n], window=9, window_side=side).sum()
                for layer in range(300)
            ]
        )
        measured = float(pairs.double().mean()) / n
        sa = config(paths="sa", window_side=side)
        projections = 2 * sa.parameters(64)["projections"]
        predicted = (sa.flops_per_token(64, n) - projections) / (4 * 4 * 16)
        assert predicted == pytest.approx(measured, rel=0.01)
    swa = config(paths="swa")
    pairs = attended_pairs(torch.arange(n), [n], window=9, window_side="one").sum()
    scores = swa.flops_per_token(64, n) - 2 * swa.parameters(64)["projections"]
    assert scores / (4 * 4 * 16) == pytest.approx(float(pairs) / n)


def test_state_of_a_sliding_window_does_not_grow():
    swa, sa = config(paths="swa"), config(paths="sa", decode_capacity=100)
    assert swa.state_bytes(50, 2) == swa.state_bytes(5000, 2) == 2 * 9 * 2 * 16 * 2
    assert sa.state_bytes(50, 2) == 2 * 50 * 2 * 16 * 2 + 2 * 100 * 8
