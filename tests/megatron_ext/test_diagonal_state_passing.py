"""State passing where the transition is diagonal: outputs, and every gradient on every rank."""

import pytest
import torch

from mixtron.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_segment_map,
)
from tests.helpers.ranks import run_on_ranks

T, H, J, K, V = 96, 2, 4, 8, 6
DOCUMENTS = {
    "one": [0, T],
    "ragged": [0, 5, 6, 70, T],
    "aligned": [0, T // 4, T // 2, T],
}
NAMES = ("q", "k", "v", "log_decay")


def make_inputs(decay: str) -> list[torch.Tensor]:
    """q, k, v and a log decay from 0 to -5; fp32."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    log_decay = noise(1, T, J) if decay == "head" else noise(1, T, H, K)
    return [noise(1, T, H, K), noise(1, T, H, K), noise(1, T, J, V), -0.05 * log_decay.exp()]


def output_weights() -> torch.Tensor:
    return torch.randn(1, T, J, V, generator=torch.Generator().manual_seed(1))


def on_a_rank(decay: str, offsets: list[int]) -> tuple[list, int]:
    """This rank's outputs and gradients, and the bytes of its map of the state."""
    import torch.distributed as dist

    from mixtron.megatron_ext import context_parallel

    rank, share = dist.get_rank(), T // dist.get_world_size()
    mine = slice(rank * share, (rank + 1) * share)
    q, k, v, log_decay = (x[:, mine].clone().requires_grad_() for x in make_inputs(decay))
    cu_seqlens = (torch.tensor(offsets) - rank * share).clamp(0, share)
    decay_map, write = gated_linear_segment_map(k, v, log_decay, cu_seqlens=cu_seqlens)
    map_bytes = decay_map.nbytes + write.nbytes
    starts_document = torch.tensor(rank * share in offsets)
    group = dist.group.WORLD
    assert group is not None
    state = context_parallel.state_before(decay_map, write, starts_document, group)
    o, _ = gated_linear_attention(
        q, k, v, log_decay, initial_state_BJKV=state, cu_seqlens=cu_seqlens
    )
    gradients = torch.autograd.grad((o * output_weights()[:, mine]).sum(), [q, k, v, log_decay])
    return [x.detach().tolist() for x in (o, *gradients)], map_bytes


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_context_ranks_equal_one_rank(decay, ranks, documents):
    offsets = DOCUMENTS[documents]
    results = run_on_ranks(ranks, on_a_rank, decay, offsets)
    assert [map_bytes for _, map_bytes in results] == [4 * J * K * (1 + V)] * ranks
    inputs = [x.double().requires_grad_() for x in make_inputs(decay)]
    o, _ = gated_linear_attention_reference(*inputs, cu_seqlens=torch.tensor(offsets))
    exact = [o, *torch.autograd.grad((o * output_weights()).sum(), inputs)]
    found = [
        torch.cat([torch.tensor(x) for x in parts], dim=1)
        for parts in zip(*(tensors for tensors, _ in results), strict=True)
    ]
    for name, x, y in zip(("o", *NAMES), found, exact, strict=True):
        # fp32 sums of about a hundred terms.
        assert (x - y).norm() < 2e-6 * y.norm(), name
