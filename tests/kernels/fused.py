"""Ops that have one form for each device, and the cases that Triton's form is held to."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.delta_rule import decay_and_step_size
from mixtron.kernels.dense import dense
from mixtron.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from mixtron.kernels.norms import (
    add_rms_norm,
    add_rms_norm_factor,
    by_token,
    gated_norm_factor,
    rms_norm,
    rms_norm_reference,
    unit_norm,
    unit_norm_reference,
)
from mixtron.kernels.short_convolution import (
    short_convolution,
    short_convolution_parts,
    short_convolution_reference,
)
from mixtron.kernels.softmax_attention import apply_rope
from mixtron.kernels.split import split, viewed
from mixtron.kernels.swiglu import swiglu, swiglu_factor, swiglu_reference

LENGTHS = [1, 2, 30, 1, 65, 3]
TOKENS = sum(LENGTHS)


@dataclass(frozen=True)
class Case:
    inputs: dict[str, Tensor]
    """fp64, rounded to bf16."""
    op: Callable[..., Tensor]
    """Of the inputs, in Triton's form."""
    reference: Callable[..., Tensor]


def cases() -> dict[str, Case]:
    found = {}
    for width, heads in ((128, 3), (96, 1), (1000, 1)):
        found[f"rms_norm {width}"] = norm_case(width, heads, gated=False)
        found[f"gated rms_norm {width}"] = norm_case(width, heads, gated=True)
    for adds in (True, False):
        for factor in (True, False):
            found[f"add_rms_norm {adds} factor={factor}"] = add_case(adds, factor)
    found["gated rms_norm factor"] = gated_factor_case()
    found["swiglu factor"] = swiglu_factor_case()
    found["unit_norm"] = unit_case()
    found["unit_norm in fp32"] = unit_case(torch.float32)
    for width in (1, 4):
        for silu in (False, True):
            found[f"short_convolution {width} silu={silu}"] = convolution_case(width, silu)
    found["short_convolution of two columns"] = convolution_case(4, True, columns=2)
    found["short_convolution of parts"] = parts_case((32, 16, 32))
    found["short_convolution of two parts"] = parts_case((16, 64))
    found["swiglu"] = swiglu_case()
    found["decay and step size"] = gates_case()
    found["rope"] = rope_case()
    found["parts of a projection"] = split_case()
    found["parts in one piece"] = dense_case()
    found["linear_cross_entropy"] = loss_case()
    return found


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().double()


def positions(device) -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).to(device)


def norm_case(width: int, heads: int, *, gated: bool) -> Case:
    """x and the gate are slices of one wider tensor, as a fused projection leaves them."""
    inputs = {
        "joined": noise(TOKENS, 1, 2 * heads * width + 8),
        "weight": 1 + 0.1 * noise(width),
    }
    inputs["weight"] = inputs["weight"].bfloat16().double()

    def parts(joined):
        x, gate = joined[..., 8:].split(heads * width, dim=-1)
        return (part.unflatten(-1, (heads, width)) for part in (x, gate))

    def op(joined, weight):
        x, gate = parts(joined)
        return rms_norm(x, weight, 1e-5, gate=gate if gated else None, backend="triton")

    def reference(joined, weight):
        x, gate = parts(joined)
        return rms_norm_reference(x, weight, 1e-5, gate=gate if gated else None)

    return Case(inputs, op, reference)


def add_case(adds: bool, factor: bool) -> Case:
    """Rows of one term or two, one of them a slice; sum and a product of the norm side by side, as
    one output."""
    width = 96
    inputs = {"joined": noise(TOKENS, 1, width + 8), "added": noise(TOKENS, 1, width, seed=1)}
    inputs["norm"] = (1 + 0.1 * noise(width)).bfloat16().double()
    inputs["weight"] = (noise(40, width) / 8).bfloat16().double()

    def op(joined, added, norm, weight):
        terms = joined[..., 8:], added if adds else None
        if factor:
            normed = add_rms_norm_factor(*terms, norm, 1e-5, backend="triton")
            product = normed.times(weight, adds=False)
            (total,) = normed.beside
        else:
            total, normed = add_rms_norm(*terms, norm, 1e-5, backend="triton")
            product = normed @ weight.t()
        return torch.cat([total, product, added], dim=-1)

    def reference(joined, added, norm, weight):
        total = joined[..., 8:] + (added if adds else 0)
        product = rms_norm_reference(total, norm, 1e-5) @ weight.t()
        return torch.cat([total, product, added], dim=-1)

    return Case(inputs, op, reference)


def gated_factor_case() -> Case:
    """The gate is a part of a projection, whose gradient is written beside that of the rest."""
    inputs = {"joined": noise(TOKENS, 1, 64 + 8), "o": noise(1, TOKENS, 2, 32)}
    inputs["norm"] = (1 + 0.1 * noise(32)).bfloat16().double()
    inputs["weight"] = (noise(40, 64) / 8).bfloat16().double()

    def by_head(x):
        return x.transpose(0, 1).unflatten(-1, (2, 32))

    def op(joined, o, norm, weight):
        gate, rest = split(joined, [64, 8])
        gate, place = viewed(gate, by_head)
        options = {"gate_place": place, "backend": "triton"}
        product = gated_norm_factor(o, norm, gate, 1e-5, **options).times(weight, adds=False)
        return torch.cat([product, rest], dim=-1)

    def reference(joined, o, norm, weight):
        gate, rest = joined.split([64, 8], dim=-1)
        normed = rms_norm_reference(o, norm, 1e-5, gate=by_head(gate))
        return torch.cat([by_token(normed) @ weight.t(), rest], dim=-1)

    return Case(inputs, op, reference)


def unit_case(dtype: torch.dtype | None = None) -> Case:
    inputs = {"x": noise(1, TOKENS, 3, 64)}
    op = lambda x: unit_norm(x, dtype=dtype, backend="triton")  # noqa: E731
    return Case(inputs, op, unit_norm_reference)


def convolution_case(width: int, silu: bool, columns: int = 1) -> Case:
    E = 80
    inputs = {"joined": noise(TOKENS, columns, E + 24), "weight": noise(E, width)}

    def part(joined):
        return joined[..., 16 : 16 + E]

    def op(joined, weight):
        position_T = positions(joined.device)
        return short_convolution(part(joined), weight, position_T, silu=silu, backend="triton")

    def reference(joined, weight):
        y = short_convolution_reference(part(joined), weight, positions(joined.device))
        return y * torch.sigmoid(y) if silu else y

    return Case(inputs, op, reference)


def parts_case(widths: tuple[int, ...]) -> Case:
    """Joined again in another order, so that each part's gradient has strides of its own."""
    plain = convolution_case(4, True)

    def op(joined, weight):
        x_TBE, position_T = joined[..., 16 : 16 + sum(widths)], positions(joined.device)
        options = {"silu": True, "backend": "triton"}
        parts = short_convolution_parts(x_TBE, weight, position_T, widths, **options)
        assert all(part.is_contiguous() for part in parts)
        return torch.cat(parts[::-1], dim=-1)

    def reference(joined, weight):
        parts = plain.reference(joined, weight).split(widths, dim=-1)
        return torch.cat(parts[::-1], dim=-1)

    return Case(plain.inputs, op, reference)


def gates_case() -> Case:
    """Slices of wider rows; some decays beyond where softplus is linear, some small."""
    inputs = {"joined": 8 * noise(TOKENS, 1, 20), "rate": noise(6), "bias": noise(6, seed=1)}

    def form(backend):
        def op(joined, rate, bias):
            wide = torch.promote_types(joined.dtype, torch.float32)
            _, decay, _, step, _ = split(joined, [2, 6, 4, 6, 2])
            options = rate.to(wide), bias.to(wide)
            return torch.cat(decay_and_step_size(decay, step, *options, backend=backend))

        return op

    return Case(inputs, form("triton"), form("torch"))


def swiglu_case() -> Case:
    inputs = {"joined": noise(TOKENS, 1, 2 * 72)}
    return Case(inputs, lambda x: swiglu(x, backend="triton"), swiglu_reference)


def swiglu_factor_case() -> Case:
    inputs = {"joined": noise(TOKENS, 1, 2 * 72), "weight": (noise(40, 72) / 8).bfloat16().double()}

    def op(joined, weight):
        return swiglu_factor(joined, backend="triton").times(weight, adds=False)

    return Case(inputs, op, lambda joined, weight: swiglu_reference(joined) @ weight.t())


def rope_case() -> Case:
    inputs = {"joined": noise(TOKENS, 3 * 48 + 16)}

    def form(backend):
        def op(joined):
            x_THK = joined[:, 16:].unflatten(-1, (3, 48))
            angle = positions(joined.device)[:, None] / 10.0 ** torch.arange(24).to(joined.device)
            wide = torch.promote_types(joined.dtype, torch.float32)
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            return apply_rope(x_THK, cos, sin, backend=backend)

        return op

    return Case(inputs, form("triton"), form("torch"))


def split_case() -> Case:
    """A convolved part, a norm's gate, a rotated part and one that no op asks for: the gradients of
    the first three are written side by side."""
    widths = [80, 2 * 32, 3 * 48, 6]
    inputs = {"joined": noise(TOKENS, 1, sum(widths)), "o": noise(TOKENS, 1, 2, 32)}
    inputs |= {"weight": noise(80, 4), "norm": (1 + 0.1 * noise(32)).bfloat16().double()}

    def form(backend, split):
        def op(joined, o, weight, norm):
            raw, gate, raw_q, rest = split(joined, widths)
            position_T = positions(joined.device)
            angle = position_T[:, None] / 10.0 ** torch.arange(24).to(joined.device)
            angle = angle.to(torch.promote_types(joined.dtype, torch.float32))
            gate, gate_place = viewed(gate, lambda x: x.unflatten(-1, (2, 32)))
            q, q_place = viewed(raw_q, lambda x: x.reshape(TOKENS, 3, 48))
            convolved = short_convolution(raw, weight, position_T, silu=True, backend=backend)
            o = rms_norm(o, norm, 1e-5, gate=gate, gate_place=gate_place, backend=backend)
            options = {"place": q_place, "backend": backend}
            q = apply_rope(q, angle.cos(), angle.sin(), **options)
            return torch.cat([convolved, o.flatten(-2), q.reshape(TOKENS, 1, -1), 2 * rest], dim=-1)

        return op

    plain = lambda x, widths: x.split(widths, dim=-1)  # noqa: E731
    return Case(inputs, form("triton", split), form("torch", plain))


def dense_case() -> Case:
    inputs = {"joined": noise(TOKENS, 1, 80 + 32 + 8)}

    def form(one_piece):
        def op(joined):
            first, second, _ = joined.split([80, 32, 8], dim=-1)
            return torch.cat([2 * one_piece(first), 3 * one_piece(second)], dim=-1)

        return op

    return Case(inputs, form(lambda x: dense(x, backend="triton")), form(lambda x: x))


def loss_case() -> Case:
    """70 entries, of which 61 are in use; chunks of 32 tokens, the last one shorter."""
    inputs = {"hidden": noise(TOKENS, 48), "weight": noise(70, 48)}
    inputs["weight"] = (inputs["weight"] / 4).bfloat16().double()
    label_T = torch.randint(0, 61, (TOKENS,), generator=torch.Generator().manual_seed(3))

    share_T = torch.arange(TOKENS) % 3

    def op(hidden, weight):
        tokens = label_T.to(hidden.device), share_T.to(hidden.device)
        options = {"used": 61, "chunk_tokens": 32, "backend": "triton"}
        return linear_cross_entropy(hidden, weight, *tokens, **options)

    def reference(hidden, weight):
        label, share = label_T.to(hidden.device), share_T.to(hidden.device)
        return (linear_cross_entropy_reference(hidden, weight, label, used=61) * share).sum()

    return Case(inputs, op, reference)


def results(form: Callable, inputs: dict[str, Tensor], dtype, device) -> dict[str, Tensor]:
    """Output, and every gradient of sum(output * fixed noise)."""
    leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in inputs.values()]
    output = form(*leaves)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    (output * weights).sum().backward()
    grads = dict(zip(inputs, (x.grad for x in leaves), strict=True))
    return {"output": output.detach(), **grads}
