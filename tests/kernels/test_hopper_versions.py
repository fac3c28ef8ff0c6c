"""Queries and keys in versions by the kernels for Hopper, emulated, against Triton's, interpreted;
and their machine code."""

import pytest
import torch

from mixtron.kernels.path_attention import hopper_carry
from mixtron.kernels.path_attention.triton_plan import layout_of
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import Compiled, disassembled, instructions, unset_addresses
from tests.kernels.test_hopper_keys import overwritten

CHECK = """
import torch
import torch.nn.functional as F
from mixtron.kernels.path_attention import hopper_carry, triton_carry
from mixtron.kernels.path_attention.triton_plan import layout_of
from tests.helpers.gluon_emulator import run

# Fresh memory is full of NaN, which shows what is not written, and whether that is read.
torch.use_deterministic_algorithms(True)
K = C = 128
kernel = hopper_carry.launch_version.kernel
hopper_carry.launch_version = lambda *x, **y: run(kernel, *x, **y)


def draw(*shape):
    return torch.randn(shape, generator=generator)


def emulated(q, k, factors, carried, dtype, fine):
    x = {name: torch.empty_like(y, dtype=dtype) for name, y in vars(carried).items()}
    x |= {name: torch.empty_like(x[name], dtype=fine) for name in ("XT", "logits")}
    w, L, Y, maps = (y.to(fine) for y in (factors.w, factors.L, carried.Y, carried.maps))
    operands = q.to(dtype), k.to(dtype), w, factors.beta, L, Y, maps
    found = (x[name] for name in ("XT", "logits", "q", "k"))
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
    generator = torch.Generator().manual_seed(0)
    # Of the heads that lie there the last ones are taken.
    q, k = draw(B, T, (G + 1) * R, K)[:, :, R:], draw(B, T, G + 1, K)[:, :, 1:]
    options = None, None
    if offsets is not None:
        options = torch.tensor(offsets), int(torch.tensor(offsets).diff().max())
    layout, scale = layout_of(T, (G + 1) * R, C, *options), K**-0.5
    w, beta = F.normalize(draw(B, T, G, K), dim=-1), 2 * draw(B, T, G).sigmoid()
    factors = triton_carry.factors_of(w, beta, layout)
    carried = triton_carry.carry(q, k, factors, scale, layout)
    compare(emulated(q, k, factors, carried, torch.float32, torch.float32), carried, 1e-6)
    # bf16 results of operands in fp16 and bf16.
    compare(emulated(q, k, factors, carried, torch.bfloat16, torch.float16), carried, 2**-8)
    print("checked", B, T, flush=True)
"""


def test_emulated_kernels_equal_the_interpreted_ones():
    assert run_interpreted(CHECK) == [
        "checked 2 200",
        "checked 1 900",
        "checked 1 100",
        "checked 1 1100",
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_machine_code(packed, monkeypatch, tmp_path):
    """Without spills but for a few scalars, and with as many products of 64 x 64 x 16 as the blocks
    that are not zero need: 18 + 8 of 64 x 64 x 64 for the first half, 20 + 8 for the second."""
    kernel = Compiled(hopper_carry.launch_version.kernel)
    monkeypatch.setattr(hopper_carry, "launch_version", lambda grid, *x, **y: kernel[grid](*x, **y))
    ends = torch.tensor([0, 100, 512]) if packed else None
    layout = layout_of(512, 2, 128, ends, 412 if packed else None)
    q, k = (torch.empty(1, 512, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    w, L, XT, Y, logits = torch.empty(5, 1, 2, 512, 128, dtype=torch.float16)
    maps = w.new_empty(1, 2, layout.nodes, 128, 128)
    versions = q.new_empty(1, 2, layout.versions, 128, 128)
    beta = torch.empty(1, 2, 512)
    hopper_carry.versions(q, k, w, beta, L, Y, maps, 0.1, layout, XT, logits, versions, versions)
    assert kernel.shared_bytes[0] < 227 * 2**10
    text = disassembled(kernel.cubins[0], tmp_path)
    found = instructions(text)
    assert found["HGMMA"] == 4 * (26 + 28)
    assert found["STL"] <= (8 if packed else 0)
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * (3 + 3 + 2)
    assert not overwritten(text)
    assert not unset_addresses(text)
