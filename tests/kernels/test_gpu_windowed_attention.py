"""Windowed attention's Triton form on a GPU in bf16 against its fp64 definition on the CPU."""

import pytest
import torch

from mixtron.kernels.windowed_attention import (
    document_permutation,
    gated_sum,
    plan_windows,
    windowed_attention,
    windowed_attention_reference,
    windowed_attention_step,
)
from tests.kernels.test_gpu import compare, run

pytestmark = pytest.mark.gpu
LENGTHS = [1, 130, 63, 1, 400, 61]


def poison():
    """Fills the memory that the next allocations get with NaN."""
    held = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(4)]
    held += [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 20)]
    del held


@pytest.mark.parametrize("order", ["random", "plain"])
@pytest.mark.parametrize("window_side", ["two", "one"])
@pytest.mark.parametrize(
    ("width", "kv_heads", "window", "tiles"),
    [(64, 4, 40, (64, 64)), (64, 1, 300, (64, 64)), (128, 2, 300, (64, 64))],
)
def test_windowed_attention_triton(width, kv_heads, window, tiles, window_side, order):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = {
        name: torch.randn(tokens, h, width, generator=generator, dtype=torch.float64).bfloat16()
        for name, h in (("q", 4), ("k", kv_heads), ("v", kv_heads))
    }
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)
    order_T = torch.arange(tokens)
    if order == "random":
        order_T = document_permutation(cu, tokens, seed=0, step=1, layer=1)
    options = {"window": window, "window_side": window_side}
    query_tile, key_tile = tiles
    plan = plan_windows(
        range(tokens) if order == "plain" else order_T.cuda(),
        cu.cuda(),
        query_tile=query_tile,
        key_tile=key_tile,
        **options,
    )

    def reference(q, k, v):
        return windowed_attention_reference(q, k, v, order_T, LENGTHS, scale=width**-0.5, **options)

    def kernel(q, k, v):
        poison()
        return windowed_attention(q, k, v, plan, backend="triton")

    found = run(kernel, inputs, torch.bfloat16, "cuda")
    again = run(kernel, inputs, torch.bfloat16, "cuda")
    assert all(torch.equal(found[name], again[name]) for name in found)
    compare(
        found,
        run(reference, inputs, torch.float64, "cpu"),
        run(reference, inputs, torch.bfloat16, "cpu"),
    )


@pytest.mark.parametrize("window", [3, 300, 2000])
def test_plans_are_those_of_the_cpu(window):
    tokens = sum(LENGTHS)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)
    options = {"seed": 2**63 - 1, "step": 2**31, "layer": 3}
    order_T = document_permutation(cu, tokens, **options)
    drawn_T = document_permutation(cu.cuda(), tokens, **options, backend="triton")
    assert torch.equal(drawn_T.cpu(), order_T)
    options["step"] = torch.tensor(2**31, device="cuda")
    assert torch.equal(
        document_permutation(cu.cuda(), tokens, **options, backend="triton"), drawn_T
    )
    options = {"window": window, "window_side": "two"}
    expected = plan_windows(order_T, cu, **options)
    found = plan_windows(drawn_T, cu.cuda(), **options, backend="triton")
    for part in ("queries", "keys", "keys_of_queries", "queries_of_keys"):
        for name, x in vars(getattr(expected, part)).items():
            if torch.is_tensor(x):
                assert torch.equal(vars(getattr(found, part))[name].cpu(), x), (part, name)


def test_views_of_a_fused_projection_are_read_where_they_lie():
    fused = torch.randn(200, 3 * 2 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.unflatten(1, (2, 64)) for x in fused.chunk(3, dim=1))
    cu = torch.tensor([0, 200], dtype=torch.int32, device="cuda")
    order_T = document_permutation(cu, 200, seed=0, step=1, layer=1)
    plan = plan_windows(order_T, cu, window=50, window_side="two")
    views, copies = (
        windowed_attention(*x, plan, backend="triton")
        for x in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous()))
    )
    assert torch.equal(views, copies)


@pytest.mark.parametrize("width", [1, 64])
def test_gated_sum(width):
    """Within what rounding fp32 sums to bf16 once allows; gates are views of a projection."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (77, 4, 64), "second": (77, 4, 64), "gates": (77, 2 * 4 * width + 5)}
    inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16()
        for name, shape in shapes.items()
    }

    def plain(first, second, gates):
        weights = [x.unflatten(1, (4, -1)).sigmoid() for x in gates[:, 5:].chunk(2, dim=1)]
        return weights[0] * first + weights[1] * second

    def fused(first, second, gates):
        return gated_sum(first, second, *gates[:, 5:].chunk(2, dim=1))

    compare(
        run(fused, inputs, torch.bfloat16, "cuda"),
        run(plain, inputs, torch.float64, "cpu"),
        run(plain, inputs, torch.bfloat16, "cpu"),
    )


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_decode_step(kv_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (3, 8, 64), "k": (3, 500, kv_heads, 64), "v": (3, 500, kv_heads, 64)}
    inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16()
        for name, shape in shapes.items()
    }
    row_BW = torch.randint(-9, 509, (3, 700), generator=generator)
    attended_BW = (row_BW >= 0) & (row_BW < 500) & (torch.rand(3, 700, generator=generator) < 0.5)

    def step(backend, dtype, device):
        tensors = (x.to(device, dtype) for x in inputs.values())
        where = row_BW.to(device), attended_BW.to(device)
        return {"output": windowed_attention_step(*tensors, *where, backend=backend)}

    compare(
        step("triton", torch.bfloat16, "cuda"),
        step("tiled", torch.float64, "cpu"),
        step("tiled", torch.bfloat16, "cpu"),
    )


@pytest.mark.parametrize(("width", "window", "side"), [(64, 256, "two"), (128, 1024, "one")])
def test_many_tiles(width, window, side):
    """Against the tiled form in fp64, and its own error in bf16."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4097, 1500, 3]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    order_T = document_permutation(cu, sum(lengths), seed=0, step=1, layer=1)
    plan = plan_windows(order_T.cuda(), cu.cuda(), window=window, window_side=side)
    inputs = {
        name: torch.randn(sum(lengths), 2, width, generator=generator, dtype=torch.float64)
        for name in "qkv"
    }
    inputs = {name: x.bfloat16() for name, x in inputs.items()}

    def form(backend):
        return lambda q, k, v: windowed_attention(q, k, v, plan, backend=backend)

    compare(
        run(form("triton"), inputs, torch.bfloat16, "cuda"),
        {k: x.cpu() for k, x in run(form("tiled"), inputs, torch.float64, "cuda").items()},
        run(form("tiled"), inputs, torch.bfloat16, "cuda"),
    )


def test_what_the_kernels_cannot_take_is_refused():
    plan = plan_windows(torch.arange(9), torch.tensor([0, 9]), window=4, window_side="one")
    x = torch.zeros(9, 1, 64, dtype=torch.bfloat16)
    for inputs, said in ((x, "on cpu: the triton form"), (x.float().cuda(), "float32 on cuda")):
        with pytest.raises(ValueError, match=said):
            windowed_attention(inputs, inputs, inputs, plan, backend="triton")
    narrow = x[..., :32].cuda()
    with pytest.raises(ValueError, match="K=32, V=32"):
        windowed_attention(narrow, narrow, narrow, plan, backend="triton")
