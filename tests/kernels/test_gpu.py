"""The ops on a GPU, in the dtype they are trained in, against their fp64 references on the CPU."""

import pytest
import torch

from mixtron.kernels.delta_rule import delta_rule, delta_rule_reference
from mixtron.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_reference,
)
from mixtron.kernels.linear_attention import linear_attention, linear_attention_reference
from mixtron.kernels.log_linear_attention import log_linear_attention
from mixtron.kernels.sd_attention import sd_attention, sd_attention_reference
from mixtron.kernels.softmax_attention import softmax_attention, softmax_attention_reference
from mixtron.kernels.windowed_attention import (
    document_permutation,
    permutation_hash,
    plan_windows,
    windowed_attention,
    windowed_attention_reference,
)
from tests.helpers.numerics import assert_close_calibrated

pytestmark = pytest.mark.gpu
LENGTHS = [1, 130, 63, 1, 61]


def run(op, inputs, dtype, device, gates=()):
    """Output and every gradient of sum(output * fixed noise); gates stay in fp32 or above."""
    leaves = []
    for name, x in inputs.items():
        kind = torch.promote_types(dtype, torch.float32) if name in gates else dtype
        leaves.append(x.detach().to(device, kind).requires_grad_())
    output = op(*leaves)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    (output * noise).sum().backward()
    return {"output": output.detach(), **dict(zip(inputs, (x.grad for x in leaves), strict=True))}


def compare(actual, exact, rounded, maximum_factor=2.0):
    for name in exact:
        assert_close_calibrated(
            actual[name].cpu(),
            exact[name],
            rounded[name].cpu(),
            name=name,
            maximum_factor=maximum_factor,
        )


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_softmax_attention(heads, kv_heads, window):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = {
        name: torch.randn(tokens, h, 64, generator=generator, dtype=torch.float64).bfloat16()
        for name, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)

    def reference(q, k, v):
        return softmax_attention_reference(q, k, v, LENGTHS, scale=64**-0.5, window=window)

    def packed(q, k, v):
        return softmax_attention(q, k, v, LENGTHS, cu.to(q.device), scale=64**-0.5, window=window)

    compare(
        run(packed, inputs, torch.bfloat16, "cuda"),
        run(reference, inputs, torch.float64, "cpu"),
        run(reference, inputs, torch.bfloat16, "cpu"),
    )


@pytest.mark.parametrize("width", [64, 12])
def test_sd_attention(width):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = {
        name: torch.randn(tokens, 4, width, generator=generator, dtype=torch.float64).bfloat16()
        for name in "qkv"
    }
    inputs["d"] = torch.randn(tokens, 4, generator=generator).exp()
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)

    def reference(q, k, v, d):
        return sd_attention_reference(q, k, v, d.to(v.dtype), LENGTHS, scale=width**-0.5)

    def packed(q, k, v, d):
        return sd_attention(q, k, v, d, LENGTHS, cu.to(q.device), scale=width**-0.5)

    compare(
        run(packed, inputs, torch.bfloat16, "cuda", ("d",)),
        run(reference, inputs, torch.float64, "cpu", ("d",)),
        run(reference, inputs, torch.bfloat16, "cpu", ("d",)),
    )


def test_linear_attention():
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = {
        name: torch.randn(1, tokens, 4, 64, generator=generator, dtype=torch.float64).bfloat16()
        for name in "qkv"
    }
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)

    def reference(q, k, v):
        return linear_attention_reference(q, k, v, cu)

    def chunked(q, k, v):
        return linear_attention(q, k, v, cu_seqlens=cu.to(q.device))[0]

    compare(
        run(chunked, inputs, torch.bfloat16, "cuda"),
        run(reference, inputs, torch.float64, "cpu"),
        run(reference, inputs, torch.bfloat16, "cpu"),
    )


@pytest.mark.parametrize("step_size", ["kaczmarz", "learned", "longhorn"])
def test_delta_rule_chunk(step_size):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    key = noise(1, tokens, 2, 64)
    inputs = {
        "q": torch.nn.functional.normalize(noise(1, tokens, 2, 64), dim=-1).bfloat16(),
        "k": (
            torch.nn.functional.normalize(key, dim=-1) if step_size == "learned" else key
        ).bfloat16(),
        "v": noise(1, tokens, 4, 64).bfloat16(),
        "log_decay": -torch.nn.functional.softplus(noise(1, tokens, 4)),
        "eta": noise(1, tokens, 4).sigmoid(),
    }
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)

    def reference(q, k, v, g, eta):
        return delta_rule_reference(
            q, k, v, g, eta, step_size=step_size, cu_seqlens=cu.to(q.device)
        )[0]

    def chunked(q, k, v, g, eta):
        return delta_rule(q, k, v, g, eta, step_size=step_size, cu_seqlens=cu.to(q.device))[0]

    gates = ("log_decay", "eta")
    compare(
        run(chunked, inputs, torch.bfloat16, "cuda", gates),
        run(reference, inputs, torch.float64, "cpu", gates),
        run(reference, inputs, torch.bfloat16, "cpu", gates),
    )


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gated_linear_attention_chunk(decay):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = (1, tokens, 4) if decay == "head" else (1, tokens, 4, 64)
    inputs = {
        "q": noise(1, tokens, 4, 64).bfloat16(),
        "k": noise(1, tokens, 4, 64).bfloat16(),
        "v": noise(1, tokens, 4, 64).bfloat16(),
        "log_decay": -torch.nn.functional.softplus(noise(*shape)),
    }
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)

    def reference(q, k, v, g):
        return gated_linear_attention_reference(q, k, v, g, cu_seqlens=cu.to(q.device))[0]

    def chunked(q, k, v, g):
        return gated_linear_attention(q, k, v, g, cu_seqlens=cu.to(q.device))[0]

    compare(
        run(chunked, inputs, torch.bfloat16, "cuda", ("log_decay",)),
        run(reference, inputs, torch.float64, "cpu", ("log_decay",)),
        run(reference, inputs, torch.bfloat16, "cpu", ("log_decay",)),
    )


def test_permutation_has_the_bits_of_the_cpu():
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    options = {"seed": 2**63 - 1, "step": 12_345, "layer": 7}
    orders = [document_permutation(x, sum(LENGTHS), **options) for x in (cu, cu.cuda())]
    assert torch.equal(orders[0], orders[1].cpu())
    assert int(permutation_hash(orders[0])) == int(permutation_hash(orders[1]))


@pytest.mark.parametrize("window_side", ["two", "one"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
def test_windowed_attention_tiled(heads, kv_heads, window_side):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = {
        name: torch.randn(tokens, h, 64, generator=generator, dtype=torch.float64).bfloat16()
        for name, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0), tokens], dtype=torch.int32)
    order_T = document_permutation(cu, tokens, seed=0, step=1, layer=1)
    options = {"window": 40, "window_side": window_side}

    def reference(q, k, v):
        return windowed_attention_reference(q, k, v, order_T, LENGTHS, scale=64**-0.5, **options)

    def tiled(q, k, v):
        plan = plan_windows(order_T.to(q.device), cu.to(q.device), **options)
        return windowed_attention(q, k, v, plan)

    compare(
        run(tiled, inputs, torch.bfloat16, "cuda"),
        run(reference, inputs, torch.float64, "cpu"),
        run(reference, inputs, torch.bfloat16, "cpu"),
    )


@pytest.mark.parametrize("base", ["gated_linear", "gated_delta"])
def test_log_linear_attention_chunk(base):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": noise(1, tokens, 2, 64).bfloat16(),
        "k": torch.nn.functional.normalize(noise(1, tokens, 2, 64), dim=-1).bfloat16(),
        "v": noise(1, tokens, 4, 64).bfloat16(),
        "log_decay": -0.1 * torch.nn.functional.softplus(noise(1, tokens, 4)),
        "lambda": noise(1, tokens, 4, 9),
    }
    if base == "gated_delta":
        inputs["beta"] = noise(1, tokens, 4).sigmoid()

    def form(backend):
        def call(q, k, v, g, lambda_, beta=None):
            return log_linear_attention(q, k, v, g, beta, lambda_, lengths=LENGTHS, backend=backend)

        return call

    gates = ("log_decay", "lambda", "beta")
    compare(
        run(form("chunk"), inputs, torch.bfloat16, "cuda", gates),
        run(form("reference"), inputs, torch.float64, "cpu", gates),
        run(form("reference"), inputs, torch.bfloat16, "cpu", gates),
    )
