"""Tiles' gradients by the kernel for Hopper, emulated, against Triton's, interpreted; and its
machine code."""

import re

import pytest
import torch

from mixtron.kernels.path_attention import hopper_carry
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import instructions
from tests.kernels.hopper_cases import layout_to_compile, machine_code

CHECK = """
import torch
from mixtron.kernels.path_attention import hopper_carry, triton_carry
from mixtron.kernels.path_attention.triton_plan import layout_of
from tests.kernels.hopper_cases import C, K, documents, draw, draw_maps, on_hopper

NAMES = "dk", "dw", "dbeta"


def room(dtype):
    # Of the heads that lie there the last ones are written to.
    dk, dw = torch.zeros(B, T, H + 1, K, dtype=dtype), torch.zeros(B, T, H + 1, K)
    return dk, dw, torch.zeros(B, T, H + 1)


def triangle(seen_SC, unwritten_SC):
    x = torch.where(seen_SC, draw(B, H, layout.S, C), 0.0)
    return torch.where(unwritten_SC, float("nan"), x)


for B, T, H, offsets in [
    (1, 100, 1, None),
    (2, 200, 2, None),
    (1, 900, 1, None),
    (1, 1100, 1, [0, 1, 130, 600, 1100, 1100]),
]:
    torch.manual_seed(0)
    q, k = (draw(B, T, H + 1, K)[:, :, 1:] for _ in range(2))
    layout, scale = layout_of(T, H + 1, C, *documents(offsets)), K**-0.5
    factors = triton_carry.factors_of(*draw_maps(B, T, H), layout)
    carried = triton_carry.carry(q, k, factors, scale, layout)
    token_S1 = torch.arange(layout.S)[:, None]
    row_S1, column_C = token_S1 % C, torch.arange(C)
    # Attention's gradients are zeros where there are no tokens and no pairs of them.
    seen_SC = (row_S1 >= column_C) & (token_S1 < T)
    if offsets is not None:
        seen_SC &= token_S1 - row_S1 + column_C >= layout.start_S[:, None]
    # Nobody writes this quarter, so nobody may read it.
    unwritten_SC = (row_S1 < C // 2) & (column_C >= C // 2)
    read = [triangle(seen_SC, unwritten_SC) for _ in range(2)]
    read += [torch.where(token_S1 < T, draw(B, H, layout.S, K), 0.0) for _ in range(2)]
    read.append(draw(B, H, layout.nodes, K, K))
    factors = vars(factors) | {"XT": carried.XT, "Y": carried.Y}
    factors["L"].masked_fill_(unwritten_SC, float("nan"))
    factors["XT"].masked_fill_(unwritten_SC.view(-1, C, C).mT.reshape(-1, C), float("nan"))
    beta = factors.pop("beta")

    expected = room(torch.float32)
    triton_carry.launch_tile_gradient(
        (layout.tiles, B * H),
        q, k, factors["w"], beta, layout.start_S, factors["L"], factors["XT"], factors["Y"], *read,
        *(x[:, :, 1:] for x in expected), scale, T, layout.S, H + 1, H, layout.nodes,
        LOW=triton_carry.LOW, R=1, K=K, C=C, DOCUMENTS=offsets is not None,
        num_warps=8, num_stages=1,
    )
    for dtype, fine, bound in [
        (torch.float32, torch.float32, 1e-6),
        # The order of sums is the same, but operands are rounded.
        (torch.bfloat16, torch.float16, 2**-7),
    ]:
        w, L, XT, Y = (factors[name].to(fine) for name in ("w", "L", "XT", "Y"))
        found = room(dtype)
        with on_hopper():
            hopper_carry.tile_gradients(
                q.to(dtype), k.to(dtype), w, beta, L, XT, Y, *(x.to(dtype) for x in read),
                scale, layout, *(x[:, :, 1:] for x in found),
            )
        for name, x, y in zip(NAMES, expected, found, strict=True):
            assert not y[:, :, 0].any()
            error = float((y.float() - x).norm() / x.norm())
            assert error < bound, (T, name, dtype, error)
    print("checked", T, flush=True)
"""


def test_the_emulated_kernel_equals_the_interpreted_one():
    assert run_interpreted(CHECK) == [f"checked {T}" for T in (100, 200, 900, 1100)]


@pytest.mark.parametrize("packed", [False, True])
def test_machine_code(packed, tmp_path):
    """Without spills, with as many products of 64 x 64 x 64 as the blocks that are there need, and
    none of them waits for another."""
    layout = layout_to_compile(packed)
    q, k, dk = torch.empty(3, 1, 500, 2, 128, dtype=torch.bfloat16)
    w, L, XT, Y = torch.empty(4, 1, 2, layout.S, 128, dtype=torch.float16)
    read = torch.empty(4, 1, 2, layout.S, 128, dtype=torch.bfloat16)
    dmaps = q.new_empty(1, 2, layout.nodes, 128, 128)
    operands = q, k, w, torch.empty(1, 2, layout.S), L, XT, Y, *read, dmaps
    found = dk, torch.empty(1, 500, 2, 128), torch.empty(1, 500, 2)

    def launch():
        hopper_carry.tile_gradients(*operands, 0.1, layout, *found)

    text = machine_code(hopper_carry, "launch_tile_gradient", launch, tmp_path)
    blocks = sum(int(n) // 64 for n in re.findall(r"HGMMA\.64x(\d+)x16", text))
    assert blocks == 4 * 106
    assert not instructions(text)["STL"]
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 12 + 14
