"""Products under sequence parallelism, against the whole product on one rank."""

import pytest
import torch
import torch.distributed as dist

from mixtron.megatron_ext import sequence_products
from mixtron.megatron_ext.parallel import init_distributed
from mixtron.megatron_ext.sequence_products import gathered_product, scattered_product
from tests.helpers.ranks import run_on_ranks

T, B, D, N = 7, 2, 6, 8
"""Tokens of a rank, sequences, and both widths of the whole weight."""


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def gradients(out, dout, *leaves):
    return torch.autograd.grad(out, leaves, dout)


def part(size: int, rank: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def gathered(adds: bool) -> None:
    init_distributed()
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, weight, bias, dout = drawn(ranks * T, B, D), drawn(N, D), drawn(N), drawn(ranks * T, B, N)
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    expected = x @ weight.t() + bias
    dx, dweight, dbias = gradients(expected, dout, x, weight, bias)

    own, columns = part(T, rank), part(N // ranks, rank)
    mine = [y.detach().clone().requires_grad_() for y in (x[own], weight[columns], bias[columns])]
    mine[1].main_grad = torch.ones_like(mine[1])
    out = gathered_product(*mine, group, adds=adds)
    close(out, expected[..., columns])
    found = gradients(out, dout[..., columns], *mine)
    close(found[0], dx[own])
    close(mine[1].main_grad - 1 if adds else found[1], dweight[columns])
    close(found[2], dbias[columns])


def scattered_in_parts(adds: bool, part_tokens: int) -> None:
    # The rank's process serves other tests too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_products, "PART_TOKENS", part_tokens)
        scattered(adds)


def scattered(adds: bool) -> None:
    init_distributed()
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, weight, dout = drawn(ranks * T, B, N), drawn(D, N), drawn(ranks * T, B, D)
    for leaf in (x, weight):
        leaf.requires_grad_()
    expected = x @ weight.t()
    dx, dweight = gradients(expected, dout, x, weight)

    own, columns = part(T, rank), part(N // ranks, rank)
    mine = [y.detach().clone().requires_grad_() for y in (x[..., columns], weight[:, columns])]
    mine[1].main_grad = torch.ones_like(mine[1])
    out = scattered_product(*mine, group, adds=adds)
    close(out, expected[own])
    found = gradients(out, dout[own], *mine)
    close(found[0], dx[..., columns])
    close(mine[1].main_grad - 1 if adds else found[1], dweight[:, columns])


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered(ranks, adds):
    run_on_ranks(ranks, gathered, adds)


@pytest.mark.parametrize("part_tokens", [3, 7, 8192])
@pytest.mark.parametrize("ranks", [2, 4])
def test_scattered_in_parts(ranks, part_tokens):
    run_on_ranks(ranks, scattered_in_parts, part_tokens == 3, part_tokens)
