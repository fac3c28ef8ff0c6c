"""The Triton form against the definition, run by Triton's interpreter: the kernels' arithmetic."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import numpy as np
import torch
import torch.nn.functional as F
from mixtron.kernels.path_attention import path_attention, path_attention_step, triton_carry
from mixtron.kernels.path_attention import triton_op
from mixtron.kernels.path_attention.triton_plan import Launch, Plan

# Fresh memory is full of NaN, which shows whether unwritten memory is read.
torch.use_deterministic_algorithms(True)
# Small tiles: few tokens make a tree of three levels. Of the maps' kernels half a program.
triton_carry.SHARES = {name: triton_carry.Share(8, 4) for name in triton_carry.SHARES}
small = Launch(warps=4, stages=1)
triton_op.launch_plan = lambda device, width: Plan(16, 8, small, small, small)
K = 16


def draw(*shape):
    return torch.randn(shape, generator=generator)


def results(inputs, dtype, backend, **options):
    leaves = {n: x.to(dtype).requires_grad_() for n, x in inputs.items()}
    o = path_attention(**leaves, backend=backend, **options)
    loss, leaves = (o * noise.to(dtype)).sum(), list(leaves.values())
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [o.detach(), *gradients]


for T, form, H, G, offsets, B in [
    (1, "fox", 2, 2, None, 2),
    (97, "softmax", 2, 2, None, 1),
    (100, "fox", 2, 1, [0, 1, 2, 33, 64, 65, 100, 100], 1),
    (1, "path-fox", 2, 2, None, 1),
    (100, "path", 2, 1, None, 1),
    (40, "path", 2, 2, None, 2),
    (120, "path-fox", 2, 2, [0, 1, 20, 32, 110, 120, 120], 1),
    (70, "path-fox", 2, 1, [0, 20, 60, 70], 1),
    (40, "path", 4, 1, None, 1),
]:
    triton_op.WORKSPACE_BYTES = 0 if B == 2 else 2**30
    generator = torch.Generator().manual_seed(0)
    noise = draw(B, T, H, K)
    inputs = {"q_BTHK": draw(B, T, H, K), "k_BTGK": draw(B, T, G, K), "v_BTGV": draw(B, T, G, K)}
    if "path" in form:
        inputs["w_BTGK"] = F.normalize(draw(B, T, G, K), dim=-1)
        inputs["beta_BTG"] = (2.4 * draw(B, T, G).sigmoid() - 0.2).clamp(0, 2)
    if "fox" in form:
        inputs["log_forget_BTH"] = F.logsigmoid(draw(B, T, H) + 2)
    options = {}
    if offsets is not None:
        options = {"cu_seqlens": torch.tensor(offsets), "max_seqlen": int(max(np.diff(offsets)))}
    exact = results(inputs, torch.float64, "reference", **options)
    found = results(inputs, torch.float32, "triton", **options)
    for name, x, y in zip(["o", *inputs], exact, found, strict=True):
        error = float((y - x).norm() / (x.norm() + 1))
        # fp32 sums of up to 120 terms; of a single token all but o and dv are zero.
        assert error < 2e-5, (T, form, name, error)
    print("checked", T, form, len(exact), flush=True)

H = 2
# Decoding: two sequences of other lengths in a cache with room, by both forms.
for form, G in [("path-fox", 2), ("fox", 1)]:
    generator = torch.Generator().manual_seed(0)
    caches = [draw(2, 600, G, K), draw(2, 600, G, K), -draw(2, 600, H).abs()]
    length = torch.tensor([570, 32])
    new = [draw(2, H, K), draw(2, G, K), draw(2, G, K)]
    maps = [F.normalize(draw(2, G, K), dim=-1), 2 * draw(2, G).sigmoid()]
    new += maps if "path" in form else [None, None]
    new.append(F.logsigmoid(draw(2, H)))
    found = {}
    for backend in ("block", "triton"):
        own = [x.clone()[:, :580] for x in caches]
        o = path_attention_step(*own, length, *new, backend=backend)
        found[backend] = [o, *(x[b, : length[b] + 1] for x in own for b in range(2))]
    for x, y in zip(*found.values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    print("decoded", form, flush=True)
"""


def test_interpreted_kernels_equal_the_definition():
    assert run_interpreted(CHECK) == [
        "checked 1 fox 5",
        "checked 97 softmax 4",
        "checked 100 fox 5",
        "checked 1 path-fox 7",
        "checked 100 path 6",
        "checked 40 path 6",
        "checked 120 path-fox 7",
        "checked 70 path-fox 7",
        "checked 40 path 6",
        "decoded path-fox",
        "decoded fox",
    ]
