"""The gradient of keys and values for Hopper, emulated, against Triton's in its interpreter; and
its machine code."""

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
    logits, d = piece.carried.logits.clone(), CarriedGradients.empty(piece.carried)
    found, ds = triton_op.Gradients.empty(piece.inputs, None), None
    if piece.gates is not None:
        ds = torch.empty_like(lse), torch.empty(piece.layout.levels + 1, *lse.shape)
    triton_op.attend_keys(piece, do, lse, delta, less, found, d, None if ds is None else ds[1])
    gradients = [found.v, d.k_right, d.k]
    if ds is None:
        return gradients
    if not piece.warp_specialized:
        # In Triton's form queries' kernel has these sums inside tiles, and writes over the logits.
        triton_op.attend_queries(piece, do, lse, delta, less, found, d, ds)
        piece.carried.logits.copy_(logits)
    columns = ds[1][..., : do.shape[1]]
    if piece.warp_specialized and do.shape[2] == found.v.shape[2]:
        assert columns[1:].isnan().all()
        columns = columns[:1]
    return [*gradients, columns.sum(0)]


for B, T, H, G, gated, offsets in [
    (2, 130, 1, 1, False, None),
    (1, 260, 4, 2, True, None),
    (1, 600, 2, 1, True, [0, 1, 100, 384, 600, 600]),
    (1, 640, 1, 1, False, [0, 250, 640]),
    (1, 1100, 1, 1, True, None),
]:
    compare_gradients(gradients_of, draw_piece(B, T, H, G, gated, offsets))
    print("equal", T, flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [f"equal {T}" for T in (130, 260, 600, 640, 1100)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_machine_code(gated, packed, tmp_path):
    """Walks spill next to nothing, and no product waits for another."""
    x = piece_to_compile(gated, packed)
    rows_BHS = torch.empty(1, 2, x.layout.S)
    columns_PBHS = torch.empty(x.layout.levels + 1, *rows_BHS.shape) if gated else None
    of_rows = x.inputs.q, rows_BHS, rows_BHS
    assert x.carried is not None
    gradients, dv_BTGV = CarriedGradients.empty(x.carried), torch.empty_like(x.inputs.v)

    def launch():
        hopper_op.attend_keys(x, *of_rows, gradients, dv_BTGV, columns_PBHS)

    text = machine_code(hopper_op, "launch_keys", launch, tmp_path)
    # Of two consumers: a block's four products, a map's, and of values in one or two blocks inside.
    # A gate wants dp of these blocks too.
    inside = 4 + 8 if gated else 4
    assert instructions(text)["HGMMA"] == 2 * (8 + 8 + 4 + 4 + 8) + 3 * inside
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * (3 + 1) + 3 * (1 + gated)
    # A branch back from a wait at the code's end, or for the next head, is another loop.
    bodies = [x for x in loops(text, products=8 + 8 + 4 + 4) if x.count("\n") < 600]
    walks = [instructions(body) for body in bodies]
    assert len(walks) == 2
    # Registers hold what a walk changes; of 280 to 460 instructions a few are for the rest.
    assert not any(x["STL"] for x in walks)
    assert all(x["LDL"] <= 0.04 * sum(x.values()) for x in walks)
