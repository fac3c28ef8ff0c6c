"""PaTH attention by all kernels for Hopper, emulated one after the other, against Triton's."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import torch
import torch.nn.functional as F
from unittest import mock
from mixtron.kernels.path_attention import hopper_carry, hopper_op, path_attention
from mixtron.kernels.path_attention import triton_carry, triton_op
from tests.helpers.gluon_emulator import run

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)
launched = []


def emulated(launch):
    def emulate(grid, *arguments, **constants):
        launched.append(launch.kernel.__name__)
        run(launch.kernel, grid, *arguments, **constants)

    return emulate


for module in (hopper_op, hopper_carry):
    for name in [x for x in vars(module) if x.startswith("launch_")]:
        setattr(module, name, emulated(getattr(module, name)))
K = 128


def draw(*shape):
    return torch.randn(shape, generator=generator)


def results(on_hopper):
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, w, beta, *gates = leaves
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets), "max_seqlen": 420}
    with (
        mock.patch.object(triton_op, "warp_specialized", lambda *x: on_hopper),
        mock.patch.object(triton_carry, "warp_specialized", lambda *x: on_hopper),
    ):
        o = path_attention(
            q, k, v, w, beta, gates[0] if gates else None, backend="triton", **options
        )
        return [o, *torch.autograd.grad(o, leaves, do)]


for B, T, H, G, gated, offsets in [
    (2, 260, 1, 1, False, None),
    (1, 640, 2, 2, True, [0, 1, 130, 550, 640, 640]),
    (1, 400, 2, 1, True, None),
]:
    generator = torch.Generator().manual_seed(T)
    inputs = [draw(B, T, H, K), draw(B, T, G, K), draw(B, T, G, K)]
    inputs += [F.normalize(draw(B, T, G, K), dim=-1), 2 * draw(B, T, G).sigmoid()]
    inputs += [F.logsigmoid(draw(B, T, H) + 2)] if gated else []
    do = draw(B, T, H, K)
    launched.clear()
    expected = results(False)
    assert not launched
    found = results(True)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    print("equal", T, len(set(launched)), flush=True)
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == ["equal 260 5", "equal 640 5", "equal 400 4"]
