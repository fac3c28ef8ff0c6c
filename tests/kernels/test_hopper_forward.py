"""Attention's forward for Hopper, emulated, against Triton's in its interpreter; and its machine
code."""

import pytest
import torch

from mixtron.kernels.path_attention import hopper_op
from mixtron.kernels.path_attention.triton_carry import Carried
from mixtron.kernels.path_attention.triton_gates import GateSums
from mixtron.kernels.path_attention.triton_op import Inputs, Piece
from mixtron.kernels.path_attention.triton_plan import layout_of
from mixtron.kernels.triton_tools import SHARED_MEMORY_BYTES
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import Compiled, disassembled, instructions, unset_addresses

CHECK = """
import torch
import torch.nn.functional as F
from mixtron.kernels.path_attention import hopper_op, triton_op
from mixtron.kernels.path_attention.triton_carry import factors_of
from tests.helpers import gluon_emulator

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)
hopper_op.launch_forward = lambda grid, *x, **constants: gluon_emulator.run(
    hopper_op.hopper_forward_kernel, grid, *x, **constants
)
K = 128


def draw(*shape):
    return torch.randn(shape, generator=generator)


for B, T, H, G, gated, offsets in [
    (1, 128, 1, 1, False, None),
    (2, 260, 2, 2, False, None),
    (1, 1100, 2, 1, True, None),
    (1, 700, 2, 1, True, [0, 1, 100, 384, 700, 700]),
    (1, 640, 1, 1, False, [0, 250, 640]),
]:
    generator = torch.Generator().manual_seed(T)
    q, k, v = draw(B, T, H, K), draw(B, T, G, K), draw(B, T, G, K)
    w, beta = F.normalize(draw(B, T, G, K), dim=-1), 2 * draw(B, T, G).sigmoid()
    inputs = triton_op.Inputs(q, k, v, F.logsigmoid(draw(B, T, H) + 2) if gated else None)
    lengths = [T] if offsets is None else [b - a for a, b in zip(offsets, offsets[1:])]
    offsets = None if offsets is None else torch.tensor(offsets)
    layout = inputs.layout(offsets, max(lengths))
    factors, gates = factors_of(w, beta, layout), inputs.gates(layout)
    everything = slice(0, B), slice(0, G)
    piece = triton_op.Piece.of(inputs, factors, gates, *everything, layout, K**-0.5)
    found = []
    for attend in (triton_op.attend, hopper_op.attend):
        o, lse = torch.empty(B, T, H, K), torch.empty(B, H, layout.S)
        attend(piece, o, lse)
        found.append((o, lse[..., :T]))
    for x, y in zip(*found):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
    print("equal", T, gated, flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [
        "equal 128 False",
        "equal 260 False",
        "equal 1100 True",
        "equal 700 True",
        "equal 640 False",
    ]


def piece(gated, packed):
    """Of two query heads that share a key; as large as it is on a GPU, and nothing but zeros."""
    T, H = 500, 2
    offsets = torch.tensor([0, 300, T]) if packed else None
    layout = layout_of(T, H, 128, offsets, T)
    q_BTHK, k_BTGK = (torch.zeros(1, T, heads, 128).bfloat16() for heads in (H, 1))
    fine_BHSC = torch.zeros(1, H, layout.S, 128).half()
    q, k = (fine_BHSC.new_zeros(1, heads, layout.versions, 128, 128).bfloat16() for heads in (H, 1))
    carried = Carried(q, k, fine_BHSC, *[fine_BHSC] * 3)
    gates = None
    if gated:
        gates = GateSums(torch.zeros(4, 1, H, layout.S), torch.zeros(1, H, layout.S // 64))
    inputs = Inputs(q_BTHK, k_BTGK, k_BTGK, None)
    return Piece(inputs, None, gates, carried, layout, 1.0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_machine_code(gated, packed, monkeypatch, tmp_path):
    """It fits, nothing is spilled, and no product waits for another."""
    kernel = Compiled(hopper_op.hopper_forward_kernel)
    monkeypatch.setattr(hopper_op, "launch_forward", lambda grid, *x, **y: kernel[grid](*x, **y))
    x = piece(gated, packed)
    o_BTHV, lse_BHS = torch.empty_like(x.inputs.q), torch.empty(1, 2, x.layout.S)
    hopper_op.attend(x, o_BTHV, lse_BHS)
    assert kernel.shared_bytes[0] <= SHARED_MEMORY_BYTES[90]
    text = disassembled(kernel.cubins[0], tmp_path)
    assert unset_addresses(text) == []
    found = instructions(text)
    # 64 x 128 x 16 each: of two consumers logits, values of all blocks but the last, and of it.
    assert found["HGMMA"] == 2 * 3 * 8
    assert not found["LDL"] + found["STL"]
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * 3
