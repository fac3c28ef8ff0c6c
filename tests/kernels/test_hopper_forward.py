"""Attention's forward for Hopper, emulated, against Triton's in its interpreter; and its machine
code."""

import pytest
import torch

from mixtron.kernels.path_attention import hopper_op
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import instructions
from tests.kernels.hopper_cases import machine_code, piece_to_compile

CHECK = """
import torch
from mixtron.kernels.path_attention import triton_op
from tests.kernels.hopper_cases import K, draw_piece, on_hopper, rounded

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)


def results(piece):
    B, T, H, _ = piece.inputs.q.shape
    o, lse = torch.empty(B, T, H, K), torch.empty(B, H, piece.layout.S)
    triton_op.attend(piece, o, lse)
    return o, lse[..., :T]


for B, T, H, G, gated, offsets in [
    (1, 128, 1, 1, False, None),
    (2, 260, 2, 2, False, None),
    (1, 1100, 2, 1, True, None),
    (1, 700, 2, 1, True, [0, 1, 100, 384, 700, 700]),
    (1, 640, 1, 1, False, [0, 250, 640]),
]:
    piece = draw_piece(B, T, H, G, gated, offsets)
    expected = results(piece)
    with on_hopper() as launched:
        found, low = results(piece), results(rounded(piece))
    assert launched == ["hopper_forward_kernel"] * 2
    for x, y, near in zip(expected, found, low):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
        # bf16's 2^-9, in each of several products.
        assert (near - x).norm() <= 0.01 * x.norm()
    print("equal", T, flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [f"equal {T}" for T in (128, 260, 1100, 700, 640)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_machine_code(gated, packed, tmp_path):
    """Nothing is spilled, and no product waits for another."""
    x = piece_to_compile(gated, packed)
    o_BTHV, lse_BHS = torch.empty_like(x.inputs.q), torch.empty(1, 2, x.layout.S)

    def launch():
        hopper_op.attend(x, o_BTHV, lse_BHS)

    text = machine_code(hopper_op, "launch_forward", launch, tmp_path)
    found = instructions(text)
    # 64 x 128 x 16 each: of two consumers logits, values of all blocks but the last, and of it.
    assert found["HGMMA"] == 2 * 3 * 8
    assert not found["LDL"] + found["STL"]
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * 3
