"""Tiles' gradients by the kernel for Hopper, emulated, against Triton's, interpreted; and its
machine code."""

import re

import pytest
import torch

from mixtron.kernels.path_attention import hopper_carry
from mixtron.kernels.path_attention.triton_plan import layout_of
from mixtron.kernels.triton_tools import SHARED_MEMORY_BYTES
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import Compiled, disassembled, instructions, unset_addresses
from tests.kernels.test_hopper_keys import overwritten

CHECK = """
import torch
import torch.nn.functional as F
from mixtron.kernels.path_attention import hopper_carry, triton_carry
from mixtron.kernels.path_attention.triton_plan import layout_of
from tests.helpers.gluon_emulator import run

K = C = 128
kernel = hopper_carry.launch_tile_gradient.kernel
hopper_carry.launch_tile_gradient = lambda *x, **y: run(kernel, *x, **y)
NAMES = "dk", "dw", "dbeta"


def draw(*shape):
    return torch.randn(shape, generator=generator)


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
    generator = torch.Generator().manual_seed(0)
    q, k = (draw(B, T, H + 1, K)[:, :, 1:] for _ in range(2))
    options = None, None
    if offsets is not None:
        options = torch.tensor(offsets), int(torch.tensor(offsets).diff().max())
    layout, scale = layout_of(T, H + 1, C, *options), K**-0.5
    w, beta = F.normalize(draw(B, T, H, K), dim=-1), 2 * draw(B, T, H).sigmoid()
    factors = triton_carry.factors_of(w, beta, layout)
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
        hopper_carry.tile_gradients(
            q.to(dtype), k.to(dtype), w, beta, L, XT, Y, *(x.to(dtype) for x in read),
            scale, layout, *(x[:, :, 1:] for x in found),
        )
        for name, x, y in zip(NAMES, expected, found, strict=True):
            assert not y[:, :, 0].any()
            error = float((y.float() - x).norm() / x.norm())
            assert error < bound, (T, name, dtype, error)
    print("checked", B, T, flush=True)
"""


def test_the_emulated_kernel_equals_the_interpreted_one():
    assert run_interpreted(CHECK) == [
        "checked 1 100",
        "checked 2 200",
        "checked 1 900",
        "checked 1 1100",
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_machine_code(packed, monkeypatch, tmp_path):
    """It fits a multiprocessor without spills, with as many products of 64 x 64 x 64 as the blocks
    that are there need, and none of them waits for another."""
    kernel = Compiled(hopper_carry.launch_tile_gradient.kernel)
    launch = "launch_tile_gradient"
    monkeypatch.setattr(hopper_carry, launch, lambda grid, *x, **y: kernel[grid](*x, **y))
    ends = torch.tensor([0, 100, 512]) if packed else None
    layout = layout_of(512, 2, 128, ends, 412 if packed else None)
    q, k = torch.empty(2, 1, 512, 2, 128, dtype=torch.bfloat16)
    w, L, XT, Y = torch.empty(4, 1, 2, 512, 128, dtype=torch.float16)
    dlogits, dM, dq_left, dk_right = torch.empty(4, 1, 2, 512, 128, dtype=torch.bfloat16)
    dmaps = q.new_empty(1, 2, layout.nodes, 128, 128)
    dw, beta, dbeta = torch.empty(1, 512, 2, 128), torch.empty(1, 2, 512), torch.empty(1, 512, 2)
    hopper_carry.tile_gradients(
        q, k, w, beta, L, XT, Y, dlogits, dM, dq_left, dk_right, dmaps,
        0.1, layout, torch.empty_like(k), dw, dbeta,
    )  # fmt: skip
    assert kernel.shared_bytes[0] <= SHARED_MEMORY_BYTES[90]
    text = disassembled(kernel.cubins[0], tmp_path)
    blocks = sum(int(n) // 64 for n in re.findall(r"HGMMA\.64x(\d+)x16", text))
    assert blocks == 4 * 106
    found = instructions(text)
    assert not found["STL"]
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 12 + 14
    assert not overwritten(text)
    assert not unset_addresses(text)
