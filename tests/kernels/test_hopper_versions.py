"""Queries and keys in versions by the kernels for Hopper, emulated, against Triton's, interpreted;
and their machine code."""

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

# Fresh memory is full of NaN, which shows what is not written, and whether that is read.
torch.use_deterministic_algorithms(True)


def emulated(q, k, factors, carried, dtype, fine):
    x = {name: torch.empty_like(y, dtype=dtype) for name, y in vars(carried).items()}
    x |= {name: torch.empty_like(x[name], dtype=fine) for name in ("XT", "logits")}
    w, L, Y, maps = (y.to(fine) for y in (factors.w, factors.L, carried.Y, carried.maps))
    operands = q.to(dtype), k.to(dtype), w, factors.beta, L, Y, maps
    found = (x[name] for name in ("XT", "logits", "q", "k"))
    with on_hopper():
        hopper_carry.versions(*operands, scale, layout, *found)
    return x


def compare(found, carried, bound):
    for name in ("q", "k", "XT", "logits"):
        x, y = getattr(carried, name), found[name].float()
        if name == "logits":
            # No query sees the others.
            seen_SC = torch.arange(layout.S)[:, None] % C >= torch.arange(C)
            x, y = x[..., seen_SC], y[..., seen_SC]
        assert torch.equal(x.isnan(), y.isnan()), (T, name)
        error = float((y - x).nan_to_num().norm() / (x.nan_to_num().norm() + 1e-9))
        assert error < bound, (T, name, error)


for B, T, G, R, offsets in [
    (2, 200, 1, 1, None),
    (1, 900, 1, 2, None),
    (1, 100, 1, 1, None),
    (1, 1100, 1, 1, [0, 1, 130, 600, 1100, 1100]),
]:
    torch.manual_seed(0)
    # Of the heads that lie there the last ones are taken.
    q, k = draw(B, T, (G + 1) * R, K)[:, :, R:], draw(B, T, G + 1, K)[:, :, 1:]
    layout, scale = layout_of(T, (G + 1) * R, C, *documents(offsets)), K**-0.5
    factors = triton_carry.factors_of(*draw_maps(B, T, G), layout)
    carried = triton_carry.carry(q, k, factors, scale, layout)
    compare(emulated(q, k, factors, carried, torch.float32, torch.float32), carried, 1e-6)
    # bf16 results of operands in fp16 and bf16.
    compare(emulated(q, k, factors, carried, torch.bfloat16, torch.float16), carried, 2**-8)
    print("checked", T, flush=True)
"""


def test_emulated_kernels_equal_the_interpreted_ones():
    assert run_interpreted(CHECK) == [f"checked {T}" for T in (200, 900, 100, 1100)]


@pytest.mark.parametrize("packed", [False, True])
def test_machine_code(packed, tmp_path):
    """Without spills but for a few scalars, and with as many products of 64 x 64 x 16 as the blocks
    that are not zero need: 18 + 8 of 64 x 64 x 64 for the first half, 20 + 8 for the second."""
    layout = layout_to_compile(packed)
    q, k = torch.empty(2, 1, 500, 2, 128, dtype=torch.bfloat16)
    w, L, Y, XT, logits = torch.empty(5, 1, 2, layout.S, 128, dtype=torch.float16)
    maps = w.new_empty(1, 2, layout.nodes, 128, 128)
    versions = q.new_empty(1, 2, layout.versions, 128, 128)
    operands = q, k, w, torch.empty(1, 2, layout.S), L, Y, maps

    def launch():
        hopper_carry.versions(*operands, 0.1, layout, XT, logits, versions, versions)

    text = machine_code(hopper_carry, "launch_version", launch, tmp_path)
    found = instructions(text)
    assert found["HGMMA"] == 4 * (26 + 28)
    assert found["STL"] <= (8 if packed else 0)
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * (3 + 3 + 2)
