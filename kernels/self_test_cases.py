"""The cases of `self_test`: each op that has a Triton form, on a few packed documents."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.delta_rule import delta_rule
from mixtron.kernels.delta_rule.decode import StepSize
from mixtron.kernels.gated_linear_attention import gated_linear_attention
from mixtron.kernels.linear_attention import linear_attention, linear_attention_reference
from mixtron.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from mixtron.kernels.log_linear_attention import log_linear_attention, required_levels
from mixtron.kernels.norms import (
    rms_norm,
    rms_norm_reference,
    unit_norm,
    unit_norm_reference,
)
from mixtron.kernels.path_attention import path_attention
from mixtron.kernels.sd_attention import sd_attention, sd_attention_reference
from mixtron.kernels.self_test import Case
from mixtron.kernels.short_convolution import short_convolution, short_convolution_reference
from mixtron.kernels.softmax_attention import apply_rope
from mixtron.kernels.swiglu import swiglu, swiglu_reference
from mixtron.kernels.windowed_attention import (
    document_permutation,
    plan_windows,
    windowed_attention,
    windowed_attention_reference,
)

LENGTHS = [1, 63, 66, 5]
"""Documents that begin and end at chunks' ends and within chunks."""
TOKENS = sum(LENGTHS)
MANY = 128
"""Heads: enough for the forms that fill a GPU with them alone."""


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def unit(*shape: int) -> Tensor:
    return F.normalize(draw(*shape), dim=-1)


def log_decay(*shape: int) -> Tensor:
    return -0.3 * F.softplus(draw(*shape))


def offsets(x: Tensor) -> Tensor:
    """cu_seqlens, padded."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return torch.tensor([0, *ends, TOKENS], dtype=torch.int32, device=x.device)


def positions(x: Tensor) -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).to(x.device)


def delta_rule_case(K: int, V: int, *, step_size: StepSize, decay: bool = True) -> Case:
    inputs = {
        "q": unit(1, TOKENS, 1, K),
        "k": unit(1, TOKENS, 1, K) if step_size == "learned" else draw(1, TOKENS, 1, K),
        "v": draw(1, TOKENS, 2, V),
        "eta": draw(1, TOKENS, 2).sigmoid(),
    }
    if decay:
        inputs["log_decay"] = log_decay(1, TOKENS, 2)

    def form(backend):
        def call(q, k, v, eta, log_decay=None):
            options = {"step_size": step_size, "cu_seqlens": offsets(q), "backend": backend}
            return delta_rule(q, k, v, log_decay, eta, **options)[0]

        return call

    name = f"{step_size}{'' if decay else ' without decay'}, K {K}, V {V}"
    wide = ("eta", "log_decay")
    return Case("delta_rule", name, inputs, wide, form("triton"), form("reference"))


def gated_linear_case(K: int, V: int, *, channel: bool, value_heads: int = 2) -> Case:
    J, heads = value_heads, 2 if channel else 1
    inputs = {
        "q": draw(1, TOKENS, heads, K),
        "k": unit(1, TOKENS, heads, K),
        "v": draw(1, TOKENS, J, V),
        "log_decay": log_decay(1, TOKENS, J, K) if channel else log_decay(1, TOKENS, J),
    }

    def form(backend):
        def call(q, k, v, log_decay):
            options = {"cu_seqlens": offsets(q), "backend": backend}
            return gated_linear_attention(q, k, v, log_decay, **options)[0]

        return call

    name = f"a decay a {'channel' if channel else 'head'}, K {K}, V {V}, {J} heads"
    triton, reference = form("triton"), form("reference")
    return Case("gated_linear_attention", name, inputs, ("log_decay",), triton, reference)


def linear_case(K: int, V: int, heads: int = 2) -> Case:
    inputs = {name: draw(1, TOKENS, heads, width) for name, width in [("q", K), ("k", K), ("v", V)]}
    return Case(
        "linear_attention",
        f"K {K}, V {V}, {heads} heads",
        inputs,
        (),
        lambda q, k, v: linear_attention(q, k, v, cu_seqlens=offsets(q), backend="triton")[0],
        lambda q, k, v: linear_attention_reference(q, k, v, offsets(q)),
    )


def log_linear_case(K: int, V: int, *, delta: bool) -> Case:
    inputs = {
        "q": draw(1, TOKENS, 1, K),
        "k": unit(1, TOKENS, 1, K),
        "v": draw(1, TOKENS, 2, V),
        "log_decay": log_decay(1, TOKENS, 2),
        "lambda": draw(1, TOKENS, 2, required_levels(max(LENGTHS))),
    }
    if delta:
        inputs["beta"] = draw(1, TOKENS, 2).sigmoid()

    def form(backend):
        def call(q, k, v, log_decay, lambda_, beta=None):
            options = {"lengths": LENGTHS, "backend": backend}
            return log_linear_attention(q, k, v, log_decay, beta, lambda_, **options)

        return call

    name = f"{'gated delta' if delta else 'gated linear'}, K {K}, V {V}"
    wide = ("log_decay", "lambda", "beta")
    triton, reference = form("triton"), form("reference")
    return Case("log_linear_attention", name, inputs, wide, triton, reference)


def path_case(K: int, *, maps: bool, gate: bool) -> Case:
    inputs = {name: draw(1, TOKENS, heads, K) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    if maps:
        inputs["w"] = unit(1, TOKENS, 1, K)
        inputs["beta"] = 2 * draw(1, TOKENS, 1).sigmoid()
    if gate:
        inputs["log_forget"] = log_decay(1, TOKENS, 2)
    names = {"w": "w_BTGK", "beta": "beta_BTG", "log_forget": "log_forget_BTH"}

    def form(backend):
        def call(q, k, v, *others):
            given = {names[n]: x for n, x in zip(list(inputs)[3:], others, strict=True)}
            options = {"cu_seqlens": offsets(q), "max_seqlen": max(LENGTHS), "backend": backend}
            return path_attention(q, k, v, **given, **options)

        return call

    names_of = {(1, 0): "PaTH", (1, 1): "PaTH-FoX", (0, 1): "FoX", (0, 0): "softmax"}
    name = names_of[maps, gate]
    wide, label = ("w", "beta", "log_forget"), f"{name}, K {K}"
    return Case("path_attention", label, inputs, wide, form("triton"), form("reference"))


def windowed_case(K: int, *, window_side: str) -> Case:
    inputs = {name: draw(TOKENS, heads, K) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    order = {"seed": 0, "step": 1, "layer": 1}
    options = {"window": 20, "window_side": window_side}

    def triton(q, k, v):
        cu = offsets(q)
        order_T = document_permutation(cu, TOKENS, **order, backend="triton")
        plan = plan_windows(order_T, cu, **options, backend="triton")  # pyright: ignore
        return windowed_attention(q, k, v, plan, backend="triton")

    def reference(q, k, v):
        order_T = document_permutation(offsets(q), TOKENS, **order)  # pyright: ignore
        return windowed_attention_reference(q, k, v, order_T, LENGTHS, scale=K**-0.5, **options)  # pyright: ignore

    name = f"{window_side}-sided, K {K}"
    return Case("windowed_attention", name, inputs, (), triton, reference)


def sd_case(K: int) -> Case:
    inputs = {name: draw(TOKENS, 2, K) for name in "qkv"} | {"d": draw(TOKENS, 2).exp()}

    def triton(q, k, v, d):
        return sd_attention(q, k, v, d, LENGTHS, offsets(q), scale=K**-0.5, backend="triton")

    def reference(q, k, v, d):
        return sd_attention_reference(q, k, v, d, LENGTHS, scale=K**-0.5)

    return Case("sd_attention", f"K {K}", inputs, ("d",), triton, reference)


def small_cases() -> list[Case]:
    """Ops that run in Triton on every GPU."""
    small = [norm_case(), unit_case(), convolution_case()]
    return [*small, swiglu_case(), rope_case(), loss_case()]


def norm_case() -> Case:
    inputs = {
        "x": draw(TOKENS, 2, 128),
        "weight": 1 + 0.1 * draw(128),
        "gate": draw(TOKENS, 2, 128),
    }
    return Case(
        "norms",
        "gated RMS",
        inputs,
        (),
        lambda x, weight, gate: rms_norm(x, weight, 1e-5, gate=gate, backend="triton"),
        lambda x, weight, gate: rms_norm_reference(x, weight, 1e-5, gate=gate),
    )


def unit_case() -> Case:
    inputs = {"x": draw(1, TOKENS, 2, 64)}
    triton = lambda x: unit_norm(x, backend="triton")  # noqa: E731
    return Case("norms", "unit", inputs, (), triton, unit_norm_reference)


def swiglu_case() -> Case:
    inputs = {"joined": draw(TOKENS, 1, 144)}
    triton = lambda joined: swiglu(joined, backend="triton")  # noqa: E731
    return Case("swiglu", "72 channels", inputs, (), triton, swiglu_reference)


def convolution_case() -> Case:
    def triton(x, weight):
        return short_convolution(x, weight, positions(x), silu=True, backend="triton")

    def reference(x, weight):
        return F.silu(short_convolution_reference(x, weight, positions(x)))

    inputs = {"x": draw(TOKENS, 1, 72), "weight": draw(72, 4)}
    return Case("short_convolution", "4 taps, SiLU", inputs, (), triton, reference)


def rope_case() -> Case:
    def form(backend):
        def call(x):
            angle = positions(x)[:, None] / 10.0 ** torch.arange(24).to(x.device)
            wide = torch.promote_types(x.dtype, torch.float32)
            return apply_rope(x, angle.cos().to(wide), angle.sin().to(wide), backend=backend)

        return call

    inputs = {"x": draw(TOKENS, 3, 48)}
    return Case("softmax_attention", "RoPE", inputs, (), form("triton"), form("torch"))


def loss_case() -> Case:
    """70 entries, of which 61 are in use."""
    label_T = torch.randint(0, 61, (TOKENS,), generator=torch.Generator().manual_seed(3))

    share_T = torch.arange(TOKENS) % 3

    def triton(hidden, weight):
        options = {"used": 61, "chunk_tokens": 32, "backend": "triton"}
        tokens = label_T.to(hidden.device), share_T.to(hidden.device)
        return linear_cross_entropy(hidden, weight, *tokens, **options)

    def reference(hidden, weight):
        loss_T = linear_cross_entropy_reference(hidden, weight, label_T, used=61)
        return (loss_T * share_T).sum()

    inputs = {"hidden": draw(TOKENS, 48), "weight": draw(70, 48) / 4}
    return Case("linear_cross_entropy", "70 entries", inputs, (), triton, reference)


def all_cases() -> list[Case]:
    """Every form, of the widths that configs use most."""
    found = [
        delta_rule_case(K, V, step_size=step_size)
        for step_size in ("kaczmarz", "learned", "longhorn")
        for K, V in ((64, 64), (128, 128))
    ]
    found.append(delta_rule_case(128, 128, step_size="kaczmarz", decay=False))
    for K, V in ((64, 64), (128, 128)):
        found += [gated_linear_case(K, V, channel=channel) for channel in (False, True)]
        found.append(gated_linear_case(K, V, channel=False, value_heads=MANY))
        found += [log_linear_case(K, V, delta=delta) for delta in (False, True)]
        found += [linear_case(K, V, heads) for heads in (2, MANY)]
    for K in (64, 128):
        found += [
            path_case(K, maps=maps, gate=gate) for maps in (True, False) for gate in (True, False)
        ]
        found += [windowed_case(K, window_side=side) for side in ("one", "two")]
        found.append(sd_case(K))
    return found + small_cases()
