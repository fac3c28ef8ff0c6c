"""Attention's forward for Hopper, emulated, against Triton's in its interpreter; and its machine
code."""

from tests.helpers.interpreter import run_interpreted

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
