"""State passing: what is sent, and how exact the folded state is."""

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.delta_rule import (
    delta_rule,
    delta_rule_reference,
    delta_rule_segment_map,
)
from tests.helpers.ranks import run_on_ranks

B, H, J, K, V = 1, 2, 4, 8, 16


def make_inputs(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k (norms varying by orders of magnitude), v, log decay (from 0 to -5), eta; fp64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        F.normalize(noise(B, tokens, H, K), dim=-1),
        noise(B, tokens, H, K) * noise(B, tokens, H, 1).exp(),
        noise(B, tokens, J, V),
        -noise(B, tokens, J).exp() * torch.tensor([1e-4, 1e-2, 0.1, 1.0], dtype=torch.float64),
        noise(B, tokens, J).sigmoid(),
    ]


def by_segments(inputs: list[torch.Tensor], segments: int) -> torch.Tensor:
    """The outputs when each segment gets its state from the maps of those before it, in fp32."""
    tokens = inputs[0].shape[1] // segments
    state = torch.zeros(B, J, K, V)
    outputs = []
    for start in range(0, tokens * segments, tokens):
        part = [x[:, start : start + tokens].float() for x in inputs]
        o, _ = delta_rule(*part, step_size="kaczmarz", initial_state_BJKV=state)
        transition, write = delta_rule_segment_map(*part[1:], step_size="kaczmarz")
        state = transition @ state + write
        outputs.append(o)
    return torch.cat(outputs, dim=1)


def test_eight_context_ranks_are_as_exact_as_one():
    inputs = make_inputs(1024)
    exact, _ = delta_rule_reference(*inputs, step_size="kaczmarz")
    errors = {n: float((by_segments(inputs, n) - exact).norm() / exact.norm()) for n in (1, 8)}
    # Within the spread of a rounding error's size over draws, which was seen to be a few per cent.
    assert errors[8] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("step_size", ["kaczmarz", "learned", "longhorn"])
def test_segment_map_is_the_map_of_the_state(step_size):
    _, *writes = make_inputs(150)
    writes[0] = F.normalize(writes[0], dim=-1)
    cu_seqlens = torch.tensor([0, 150])
    transition, write = delta_rule_segment_map(*writes, step_size=step_size, cu_seqlens=cu_seqlens)
    state = torch.randn(B, J, K, V, dtype=torch.float64)
    q = torch.zeros(B, 150, H, K, dtype=torch.float64)
    _, after = delta_rule_reference(q, *writes, step_size=step_size, initial_state_BJKV=state)
    torch.testing.assert_close(transition @ state + write, after, rtol=1e-9, atol=1e-9)


def test_a_document_start_inside_cuts_the_map():
    _, *writes = make_inputs(70)
    cu_seqlens = torch.tensor([0, 30, 70])
    transition, write = delta_rule_segment_map(*writes, step_size="kaczmarz", cu_seqlens=cu_seqlens)
    alone = delta_rule_segment_map(*(x[:, 30:] for x in writes), step_size="kaczmarz")[1]
    assert not transition.any()
    torch.testing.assert_close(write, alone, rtol=1e-9, atol=1e-9)


def bytes_sent(tokens: int) -> tuple[int, list]:
    """What `state_before` hands to the all-gather, and the states that the ranks get."""
    import torch.distributed as dist

    from mixtron.megatron_ext import context_parallel

    sent = []
    plain = dist.all_gather_into_tensor

    def counted(output, part, group, **options):
        sent.append(part.numel() * part.element_size())
        return plain(output, part, group, **options)

    rank, size = dist.get_rank(), dist.get_world_size()
    share = tokens // size
    mine = [x[:, rank * share : (rank + 1) * share].float() for x in make_inputs(tokens)]
    maps = delta_rule_segment_map(*mine[1:], step_size="kaczmarz")
    context_parallel.dist.all_gather_into_tensor = counted
    try:
        state = context_parallel.state_before(*maps, torch.tensor(False), dist.group.WORLD)
    finally:
        context_parallel.dist.all_gather_into_tensor = plain
    return sum(sent), state.tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_do_not_depend_on_the_length(ranks):
    formula = 4 * J * K * (K + V)
    for tokens in (64, 512):
        results = run_on_ranks(ranks, bytes_sent, tokens)
        assert [sent for sent, _ in results] == [formula] * ranks
        _, *writes = make_inputs(tokens)
        before = [w[:, : tokens // ranks * (ranks - 1)] for w in writes]
        exact = delta_rule_segment_map(*before, step_size="kaczmarz")[1]
        found = torch.tensor(results[-1][1], dtype=torch.float64)
        assert (found - exact).norm() < 1e-5 * exact.norm()


def with_an_overflow(diagonal: bool) -> tuple[list, list]:
    """The state before each of four ranks, and the gradient of what it wrote.

    Rank 0 overflows, rank 1 begins another document, a third one begins in rank 2 and overflows in
    rank 3.
    """
    import math

    import torch.distributed as dist

    from mixtron.megatron_ext.context_parallel import state_before

    rank = dist.get_rank()
    transition = torch.full((1, 1, 2, 1 if diagonal else 2), float(rank != 2))
    write = torch.full((1, 1, 2, 3), math.inf if rank in (0, 3) else 1.0 + rank)
    transition.requires_grad_(), write.requires_grad_()
    state = state_before(transition, write, torch.tensor(rank == 1), dist.group.WORLD)
    gradients = torch.autograd.grad(state.sum(), [transition, write])
    return state[0, 0, 0].tolist(), [x[0, 0, 0, 0].item() for x in gradients]


@pytest.mark.parametrize("diagonal", [True, False])
def test_an_overflow_stays_in_its_document(diagonal):
    results = run_on_ranks(4, with_an_overflow, diagonal)
    assert [state for state, _ in results] == [[0.0] * 3, [0.0] * 3, [2.0] * 3, [3.0] * 3]
    # Only rank 1's write reaches rank 2, and only rank 2's rank 3.
    assert [write for _, (_, write) in results] == [0.0, 1.0, 1.0, 0.0]
    assert [transition for _, (transition, _) in results] == [0.0] * 4


def left_behind(backward: bool) -> bool:
    """Whether an exchange outlives its tensors when nobody collects cycles."""
    import gc
    import time
    import weakref

    import torch.distributed as dist

    from mixtron.megatron_ext.context_parallel import StateExchange

    assert dist.group.WORLD is not None
    _, *writes = (x.float().requires_grad_() for x in make_inputs(32))
    gc.collect()
    gc.disable()
    try:
        maps = delta_rule_segment_map(*writes, step_size="kaczmarz")
        exchange = StateExchange(*maps, torch.tensor(False), dist.group.WORLD)
        pending = weakref.ref(exchange.pending)
        state = exchange.state()
        if backward:
            state.sum().backward()
        del exchange, state
        # The thread that received the maps may let go of them a moment later.
        deadline = time.monotonic() + 10
        while pending() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        return pending() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("backward", [True, False])
def test_an_exchange_leaves_nothing_behind(backward):
    assert run_on_ranks(2, left_behind, backward) == [False, False]
