"""What overflows in a document stays there: the next one has the outputs and gradients it has
without, to the bit."""

import math
from collections.abc import Sequence

import pytest
import torch

from mixtron.kernels.delta_rule import delta_rule, delta_rule_segment_map
from mixtron.kernels.gated_linear_attention import gated_linear_attention, gated_linear_segment_map
from mixtron.kernels.log_linear_attention import continue_states, log_linear_attention
from mixtron.kernels.path_attention import path_attention, path_segment

FIRST, T = 200, 330
"""The second document begins within a chunk of the first, where chunks are not of one document."""
H, K, V, LEVELS = 2, 8, 4, 11
OPS = ("delta rule", "head decay", "channel decay", "log-linear", "log-linear delta")
OFFSETS = {"cu_seqlens": torch.tensor([0, FIRST, T])}
STEP_SIZE = "learned"


def make_inputs(op: str) -> dict[str, torch.Tensor]:
    """fp32; `state` is what the first document begins with."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    inputs = {"q": noise(1, T, H, K), "k": noise(1, T, H, K) / K, "v": noise(1, T, H, V)}
    decays = (1, T, H, K) if op == "channel decay" else (1, T, H)
    inputs["log_decay"] = -0.05 * noise(*decays).exp()
    if "delta" in op:
        inputs["beta"] = noise(1, T, H).sigmoid()
    if "log-linear" in op:
        inputs["lambda"] = noise(1, T, H, LEVELS).exp()
    inputs["state"] = noise(1, *((LEVELS,) if "log-linear" in op else ()), H, K, V)
    return inputs


def run(op: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    *rest, state = inputs.values()
    match op:
        case "delta rule":
            o, _ = delta_rule(*rest, step_size=STEP_SIZE, initial_state_BJKV=state, **OFFSETS)
        case "head decay" | "channel decay":
            o, _ = gated_linear_attention(*rest, initial_state_BJKV=state, **OFFSETS)
        case _:
            q, k, v, log_decay, *beta, lambda_ = rest
            o = log_linear_attention(
                *(q, k, v, log_decay, beta[0] if beta else None, lambda_),
                lengths=[FIRST, T - FIRST],
                initial_states_BSJKV=state,
                initial_position=0b101010101,
            )
    return o


def of_the_second(op: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its outputs and gradients, and the gradient of the state before the first document."""
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    o = run(op, inputs)[:, FIRST:]
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((o * weights).sum(), list(inputs.values()))
    found = {f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}
    state = found.pop("dstate")
    return {"o": o, **{name: x[:, FIRST:] for name, x in found.items()}, "dstate": state}


@pytest.mark.parametrize("where", ["state", "token"])
@pytest.mark.parametrize("op", OPS)
def test_an_overflow_stays_in_its_document(op, where):
    inputs = make_inputs(op)
    expected = of_the_second(op, inputs)
    if where == "state":
        inputs["state"].fill_(math.inf)
    else:
        # Chunks of the delta rule and gated linear attention may hold tokens of two documents.
        inputs["v"][:, FIRST - 1 if "log-linear" in op else 20] = math.inf
    found = of_the_second(op, inputs)
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name
    assert not found["dstate"].any()


@pytest.mark.parametrize("op", OPS[:3])
def test_an_overflow_before_a_document_is_not_in_the_segments_map(op):
    _, k, v, *gates, _ = make_inputs(op).values()
    segment_map, options = gated_linear_segment_map, {}
    if op == "delta rule":
        segment_map, options = delta_rule_segment_map, {"step_size": STEP_SIZE}
    expected = segment_map(k, v, *gates, **OFFSETS, **options)
    v[:, 20] = math.inf
    for x, y in zip(segment_map(k, v, *gates, **OFFSETS, **options), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("E", [1, K])
def test_states_that_a_transition_of_zeros_drops_may_be_infinite(E):
    states = torch.full((1, LEVELS, H, K, V), math.inf, requires_grad=True)
    own = torch.randn(1, LEVELS, H, K, V, requires_grad=True)
    transition = torch.zeros(1, H, K if E > 1 else 1, E, requires_grad=True)
    after = continue_states(states, 5, 6, (transition, own))
    assert torch.equal(after, own)
    gradients = torch.autograd.grad(after.sum(), [states, transition])
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_overflow_stays_in_its_document_of_path_attention(mapped, gated):
    """The second document begins a block: what lies in the same one meets in a product."""
    first, T = 64, 96
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v, w = (noise(1, T, H, 16) for _ in range(4))
    gates = [None, None, -noise(1, T, H).abs() if gated else None]
    if mapped:
        gates[:2] = [torch.nn.functional.normalize(w, dim=-1), 2 * noise(1, T, H).sigmoid()]
    offsets = torch.tensor([0, first, T])

    def second(overflows: Sequence[int]) -> list[torch.Tensor]:
        inputs = [x if x is None else x.clone().requires_grad_() for x in (q, k, v, *gates)]
        for place in overflows:
            inputs[place].data[:, 5] = -math.inf
        o = path_attention(*inputs, cu_seqlens=offsets, max_seqlen=T)[:, first:]
        segment = path_segment(*inputs[1:2], *inputs[3:], cu_seqlens=offsets).k_BTGK[:, first:]
        used = [x for x in inputs if x is not None]
        gradients = torch.autograd.grad(o.sum() + segment.square().sum(), used)
        return [o, segment, *(x[:, first:] for x in gradients)]

    found = second([1, 2, *([3] if mapped else []), *([5] if gated else [])])
    for x, y in zip(found, second([]), strict=True):
        assert torch.equal(x, y)
