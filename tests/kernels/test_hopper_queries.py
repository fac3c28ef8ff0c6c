"""The gradient of queries for Hopper, emulated, against Triton's in its interpreter; and its
machine code."""

import pytest
import torch

from mixtron.kernels.path_attention import hopper_op
from mixtron.kernels.path_attention.triton_carry import CarriedGradients
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import instructions, loops
from tests.kernels.hopper_cases import machine_code, piece_to_compile

CHECK = """
import torch
from mixtron.kernels.path_attention import triton_op
from mixtron.kernels.path_attention.triton_carry import CarriedGradients
from tests.kernels.hopper_cases import compare_gradients, draw_piece

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)


def gradients_of(piece, do, lse, delta, less):
    # The logits are written over.
    logits = piece.carried.logits.clone()
    d, ds = CarriedGradients.empty(piece.carried), None
    found = triton_op.Gradients.empty(piece.inputs, None)
    if piece.gates is not None:
        ds = torch.empty_like(lse), torch.empty(piece.layout.levels + 1, *lse.shape)
    triton_op.attend_queries(piece, do, lse, delta, less, found, d, ds)
    gradients = [found.q, d.q_left, d.q, d.logits.clone(), d.M]
    piece.carried.logits.copy_(logits)
    return gradients if ds is None else [*gradients, ds[0][..., : do.shape[1]]]


for B, T, H, G, gated, offsets in [
    (2, 130, 1, 1, False, None),
    (1, 260, 4, 2, True, None),
    # More heads than begin together: the others' long tiles come behind their short ones.
    (1, 250, 9, 9, False, None),
    (1, 600, 2, 1, True, [0, 1, 100, 384, 600, 600]),
    (1, 640, 1, 1, False, [0, 250, 640]),
    (1, 1100, 1, 1, True, None),
]:
    # Sums over rows are 0, less what is left of rounding.
    piece = draw_piece(B, T, H, G, gated, offsets)
    compare_gradients(gradients_of, piece, sums=1 if gated else 0)
    print("equal", T, flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [f"equal {T}" for T in (130, 260, 250, 600, 640, 1100)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_machine_code(gated, packed, tmp_path):
    """Walks spill next to nothing, and no product waits for another."""
    x = piece_to_compile(gated, packed)
    lse_BHS = torch.empty(1, 2, x.layout.S)
    rows_BHS = lse_BHS if gated else None
    of_rows = x.inputs.q, lse_BHS, lse_BHS
    assert x.carried is not None
    gradients, dq_BTHK = CarriedGradients.empty(x.carried), torch.empty_like(x.inputs.q)

    def launch():
        hopper_op.attend_queries(x, *of_rows, gradients, dq_BTHK, rows_BHS)

    text = machine_code(hopper_op, "launch_queries", launch, tmp_path)
    # Of two consumers: a walk's first block, the others and the last one's dq, and a map's product.
    # Inside the tile one of them has one block and the other two, and three of X^T.
    assert instructions(text)["HGMMA"] == 2 * (16 + 20 + 4 + 8) + 3 * (8 + 8 + 4 + 4) + 4 + 3 * 4
    # Products that ptxas does not dare to overlap are waited for one by one. Of the tile's, dp's of
    # three blocks are, and three times those of the way through it.
    assert text.count("WARPGROUP.DEPBAR") == 2 * (2 + 3 + 1 + 1) + 3 + 2 * 3
    # Branches back from where the code waits again, at its end, are no loops.
    bodies = [x for x in loops(text, products=8 + 8 + 4) if x.count("\n") < 1000]
    walks = [instructions(body) for body in bodies]
    assert len(walks) == 2
    assert all(x["LDL"] + x["STL"] <= 6 for x in walks)
