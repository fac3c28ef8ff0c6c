"""The gradient of keys and values for Hopper, emulated, against Triton's in its interpreter; and
its machine code."""

import re

import pytest
import torch

from mixtron.kernels.path_attention import hopper_op
from mixtron.kernels.path_attention.triton_carry import CarriedGradients
from mixtron.kernels.triton_tools import SHARED_MEMORY_BYTES
from tests.helpers.interpreter import run_interpreted
from tests.helpers.machine_code import Compiled, disassembled, instructions, unset_addresses
from tests.kernels.test_hopper_forward import piece

CHECK = """
from dataclasses import replace
import torch
import torch.nn.functional as F
from mixtron.kernels.path_attention import hopper_op, triton_op
from mixtron.kernels.path_attention.triton_carry import CarriedGradients, factors_of
from tests.helpers import gluon_emulator

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)
hopper_op.launch_keys = lambda grid, *x, **constants: gluon_emulator.run(
    hopper_op.hopper_key_kernel, grid, *x, **constants
)
K = 128


def draw(*shape):
    return torch.randn(shape, generator=generator)


def hopper_keys(piece, do, lse, delta, less, found, gradients, columns):
    hopper_op.attend_keys(piece, do, delta, less, gradients, found.v, columns)


def gradients_of(attend_keys, piece, do, lse, delta, less):
    d = CarriedGradients.empty(piece.carried)
    found = triton_op.Gradients.empty(piece.inputs, None)
    columns = None
    if piece.gates is not None:
        columns = torch.empty(piece.layout.levels + 1, *lse.shape)
    attend_keys(piece, do, lse, delta, less, found, d, columns)
    return [x for x in (found.v, d.k_right, d.k, columns) if x is not None]


def rounded(piece):
    x, c = piece.inputs, piece.carried
    low = [y.bfloat16() for y in (x.q, x.k, x.v)]
    carried = replace(
        c, q=c.q.bfloat16(), k=c.k.bfloat16(), logits=c.logits.half(), maps=c.maps.half()
    )
    return replace(piece, inputs=triton_op.Inputs(*low, None), carried=carried)


for B, T, H, G, gated, offsets in [
    (2, 130, 1, 1, False, None),
    (1, 260, 4, 2, True, None),
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
    exact = gradients_of(triton_op.attend_keys, piece, do, lse, delta, less)
    found = gradients_of(hopper_keys, piece, do, lse, delta, less)
    for x, y in zip(exact, found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-4, equal_nan=True)
    low = gradients_of(hopper_keys, rounded(piece), do.bfloat16(), lse, delta, less)
    for x, y in zip(exact, low, strict=True):
        there = ~x.isnan()
        # bf16's 2^-9, in each of several products.
        assert (y.float() - x)[there].norm() <= 0.01 * x[there].norm(), (T, x.shape)
    print("equal", T, gated, flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [
        "equal 130 False",
        "equal 260 True",
        "equal 600 True",
        "equal 640 False",
        "equal 1100 True",
    ]


def walks(text, products=8 + 8 + 4 + 4):
    """The instructions of the loops over blocks: the innermost ones with a block's products."""
    labels, lines, found, begin = {}, [], [], -1
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*/\*\w{4,}\*/", line):
            lines.append(line)
            target = re.search(r"BRA.*(\.L_x_\d+)", line)
            first = labels.get(target[1], -1) if target else -1
            body = "\n".join(lines[first:])
            if first > begin and instructions(body)["HGMMA"] == products:
                found.append(body)
                begin = first
    return found


def overwritten(text):
    """Instructions that write a register which a product in flight reads: one taken from registers,
    until all products have been waited for."""
    flying, found = set(), []
    for line in text.splitlines():
        if product := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line):
            flying |= set(range(int(product[1]), int(product[1]) + 4))
        elif re.search(r"WARPGROUP.DEPBAR.*0x0 ;", line):
            flying = set()
        elif written := re.search(r"\*/\s+(?:@!?U?P\w+ )?(?!ST)([A-Z]\S*) R(\d+)", line):
            width = 4 if "128" in written[1] else 2 if re.search("64|WIDE|CS2R", written[1]) else 1
            if flying & set(range(int(written[2]), int(written[2]) + width)):
                found.append(line.strip())
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_machine_code(gated, packed, monkeypatch, tmp_path):
    """It fits, walks spill next to nothing, and no product waits for another."""
    kernel = Compiled(hopper_op.hopper_key_kernel)
    monkeypatch.setattr(hopper_op, "launch_keys", lambda grid, *x, **y: kernel[grid](*x, **y))
    x = piece(gated, packed)
    rows_BHS = torch.empty(1, 2, x.layout.S)
    columns_PBHS = torch.empty(x.layout.levels + 1, *rows_BHS.shape) if gated else None
    of_rows = x.inputs.q, rows_BHS, rows_BHS
    assert x.carried is not None
    gradients = CarriedGradients.empty(x.carried)
    hopper_op.attend_keys(x, *of_rows, gradients, torch.empty_like(x.inputs.v), columns_PBHS)
    assert kernel.shared_bytes[0] <= SHARED_MEMORY_BYTES[90]
    text = disassembled(kernel.cubins[0], tmp_path)
    # Of two consumers: a block's four products, a map's, and of values in one or two blocks inside.
    assert instructions(text)["HGMMA"] == 2 * (8 + 8 + 4 + 4 + 8) + 4 + 8
    # Products that ptxas does not dare to overlap are waited for one by one.
    assert text.count("WARPGROUP.DEPBAR") == 2 * (3 + 1) + 1 + 2
    assert not overwritten(text)
    assert not unset_addresses(text)
    assert len(walks(text)) == 2
    for body in walks(text):
        found = instructions(body)
        # Registers hold what a walk uses; of 280 to 460 instructions a few are for the rest.
        assert found["LDL"] + found["STL"] <= 0.03 * sum(found.values())
