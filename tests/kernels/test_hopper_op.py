"""PaTH attention by all kernels for Hopper, emulated one after the other, against Triton's."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import torch
from mixtron.kernels.path_attention import path_attention
from tests.kernels.hopper_cases import K, documents, draw, draw_inputs, on_hopper

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)


def results(inputs, do, cu_seqlens, max_seqlen):
    leaves = [x.detach().requires_grad_() for x in inputs]
    options = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "backend": "triton"}
    o = path_attention(*leaves, **options)
    return [o, *torch.autograd.grad(o, leaves, do)]


for B, T, H, G, gated, offsets in [
    (2, 260, 1, 1, False, None),
    (1, 640, 2, 2, True, [0, 1, 130, 550, 640, 640]),
    (1, 400, 2, 1, True, None),
]:
    arguments = draw_inputs(B, T, H, G, gated), draw(B, T, H, K), *documents(offsets)
    expected = results(*arguments)
    with on_hopper() as launched:
        found = results(*arguments)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    print("equal", T, len(set(launched)), flush=True)


def beside(x):
    # The same, where no box may begin.
    room = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    assert room.data_ptr() % 16
    return room.copy_(x)


inputs, do, *offsets = arguments
with on_hopper():
    moved = results([beside(x) for x in inputs], beside(do), *offsets)
assert all(map(torch.equal, moved, found))
print("equal anywhere")
"""


def test_it_equals_the_triton_form():
    assert run_interpreted(CHECK) == [
        "equal 260 5",
        "equal 640 5",
        "equal 400 4",
        "equal anywhere",
    ]
