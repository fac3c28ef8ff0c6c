"""The gradient of queries for Hopper, emulated, against Triton's in its interpreter; and its
machine code."""

import pytest
import torch

from mixtron.kernels.path_attention import hopper_op
from mixtron.kernels.path_attention.triton_carry import CarriedGradients, Factors
from mixtron.kernels.triton_tools import SHARED_MEMORY_BYTES
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import Compiled, disassembled, instructions, unset_addresses
from tests.kernels.test_hopper_forward import piece
from tests.kernels.test_hopper_keys import overwritten, walks

CHECK = """
from dataclasses import replace
import torch
import torch.nn.functional as F
from mixtron.kernels.path_attention import hopper_op, triton_op
from mixtron.kernels.path_attention.triton_carry import CarriedGradients, Factors, factors_of
from tests.helpers import gluon_emulator

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)
hopper_op.launch_queries = lambda grid, *x, **constants: gluon_emulator.run(
    hopper_op.hopper_query_kernel, grid, *x, **constants
)
K = 128


def draw(*shape):
    return torch.randn(shape, generator=generator)


def triton_queries(piece, do, lse, delta, d, dq, ds):
    operands, sizes, options = piece.arguments(piece.inputs.plan().queries)
    c, f = piece.carried, piece.factors
    triton_op.launch_queries(
        piece.grid(do.shape[2]), *operands, do, lse, delta, piece.inputs.k, f.w, f.beta, c.XT, c.Y,
        c.maps, dq, d.q_left, d.q, d.logits, d.M, *(ds or (None, None)), *sizes, **options,
    )


def gradients_of(attend_queries, piece, do, lse, delta):
    # The logits are written over.
    logits = piece.carried.logits.clone()
    d, dq, ds = CarriedGradients.empty(piece.carried), torch.empty_like(do), None
    if piece.gates is not None:
        ds = torch.empty_like(lse), torch.empty(piece.layout.levels + 1, *lse.shape)
    attend_queries(piece, do, lse, delta, d, dq, ds)
    found = [dq, d.q_left, d.q, d.logits.clone(), d.M]
    piece.carried.logits.copy_(logits)
    return found if ds is None else [*found, ds[0][..., :T], ds[1][-1, ..., :T]]


def rounded(piece):
    x, c, f = piece.inputs, piece.carried, piece.factors
    low = [y.bfloat16() for y in (x.q, x.k, x.v)]
    fine = {name: getattr(c, name).half() for name in ("logits", "maps", "XT", "Y")}
    carried = replace(c, q=c.q.bfloat16(), k=c.k.bfloat16(), **fine)
    factors = Factors(f.w.half(), f.beta, f.L)
    return replace(piece, inputs=triton_op.Inputs(*low, None), carried=carried, factors=factors)


for B, T, H, G, gated, offsets in [
    (2, 130, 1, 1, False, None),
    (1, 260, 4, 2, True, None),
    # Of so many heads a long tile comes behind a short one.
    (1, 250, 9, 9, False, None),
    (1, 600, 2, 1, True, [0, 1, 100, 384, 600, 600]),
    (1, 640, 1, 1, False, [0, 250, 640]),
    (1, 1100, 1, 1, True, None),
]:
    generator = torch.Generator().manual_seed(T)
    q, k, v, do = draw(B, T, H, K), draw(B, T, G, K), draw(B, T, G, K), draw(B, T, H, K)
    w, beta = F.normalize(draw(B, T, G, K), dim=-1), 2 * draw(B, T, G).sigmoid()
    inputs = triton_op.Inputs(q, k, v, F.logsigmoid(draw(B, T, H) + 2) if gated else None)
    lengths = [T] if offsets is None else [b - a for a, b in zip(offsets, offsets[1:])]
    offsets = None if offsets is None else torch.tensor(offsets)
    layout = inputs.layout(offsets, max(lengths))
    factors, gates = factors_of(w, beta, layout), inputs.gates(layout)
    piece = triton_op.Piece.of(
        inputs, factors, gates, slice(0, B), slice(0, G), layout, K**-0.5
    )
    o, lse = torch.empty(B, T, H, K), torch.empty(B, H, layout.S)
    triton_op.attend(piece, o, lse)
    delta, less = torch.empty_like(lse), torch.empty_like(lse)
    triton_op.launch_delta(
        (layout.tiles, B * H), o, do, lse, None if gates is None else gates.tokens_4BHS[2],
        delta, less, T, layout.S, H, V=K, C=128, GATE=gated, num_warps=4,
    )
    exact = gradients_of(triton_queries, piece, do, lse, delta)
    found = gradients_of(hopper_op.attend_queries, piece, do, lse, delta)
    for x, y in zip(exact, found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-4, equal_nan=True)
    low = gradients_of(hopper_op.attend_queries, rounded(piece), do.bfloat16(), lse, delta)
    # Sums over rows are 0, less what is left of rounding.
    for x, y in zip(exact[:5], low[:5], strict=True):
        there = ~x.isnan()
        # bf16's 2^-9, in each of several products.
        assert (y.float() - x)[there].norm() <= 0.01 * x[there].norm(), (T, x.shape)
    print("equal", T, gated, flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [
        "equal 130 False",
        "equal 260 True",
        "equal 250 False",
        "equal 600 True",
        "equal 640 False",
        "equal 1100 True",
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_machine_code(gated, packed, monkeypatch, tmp_path):
    """It fits, walks spill next to nothing, and no product waits for another."""
    kernel = Compiled(hopper_op.hopper_query_kernel)
    monkeypatch.setattr(hopper_op, "launch_queries", lambda grid, *x, **y: kernel[grid](*x, **y))
    x = piece(gated, packed)
    assert x.carried is not None
    x.factors = Factors(x.carried.Y, torch.empty(1, 1, x.layout.S), x.carried.XT)
    lse_BHS = torch.empty(1, 2, x.layout.S)
    ds = (lse_BHS, torch.empty(x.layout.levels + 1, *lse_BHS.shape)) if gated else None
    gradients = CarriedGradients.empty(x.carried)
    of_rows = x.inputs.q, lse_BHS, lse_BHS
    hopper_op.attend_queries(x, *of_rows, gradients, torch.empty_like(x.inputs.q), ds)
    assert kernel.shared_bytes[0] <= SHARED_MEMORY_BYTES[90]
    text = disassembled(kernel.cubins[0], tmp_path)
    # Of two consumers: a walk's first block, the others and the last one's dq, and a map's product.
    # Inside the tile one of them has one block and the other two, and three of X^T.
    assert instructions(text)["HGMMA"] == 2 * (16 + 20 + 4 + 8) + 3 * (8 + 8 + 4 + 4) + 4 + 3 * 4
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * (2 + 3 + 1 + 1) + 3 * (1 + 1 + 1 + 1) + 4
    assert not overwritten(text)
    assert not unset_addresses(text)
    # Branches back from where the code waits again, at its end, are no loops.
    found = [instructions(x) for x in walks(text, 8 + 8 + 4) if x.count("\n") < 1000]
    assert len(found) == 2
    assert all(x["LDL"] + x["STL"] <= 6 for x in found)
