"""The Triton forms of linear and log-linear attention on a GPU, against their definition in fp64.

What they may lose is what the definition loses in bf16: that is attention with [T, T] weights,
which are rounded before they multiply the values.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.gated_linear_attention import gated_linear_attention, triton_op
from mixtron.kernels.linear_attention import linear_attention, linear_attention_reference
from mixtron.kernels.log_linear_attention import chunk, log_linear_attention
from tests.helpers.numerics import assert_close_calibrated
from tests.kernels.gated import run

pytestmark = pytest.mark.gpu
PACKED = [1, 130, 63, 1, 61, 300]
OPS = ("one_state", "channel", "log_linear")
LEVELS = 17


@pytest.fixture(autouse=True)
def poisoned_workspaces():
    """Whatever a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(op, T, *, B=1, H=2, J=4, K=64, V=64):
    generator = torch.Generator("cuda").manual_seed(T)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    inputs = {
        "q": draw(B, T, H, K).bfloat16(),
        "k": F.normalize(draw(B, T, H, K), dim=-1).bfloat16(),
        "v": draw(B, T, J, V).bfloat16(),
        "log_decay": -0.1 * F.softplus(draw(*((B, T, H, K) if op == "channel" else (B, T, J)))),
    }
    if op.startswith("log_linear"):
        inputs["lambda"] = draw(B, T, J, LEVELS)
    if op == "log_linear_delta":
        inputs["beta"] = draw(B, T, J).sigmoid()
    return inputs


def kernel(op, lengths, **options):
    def one_state(q, k, v, log_decay):
        cu = None
        if lengths is not None:
            cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0), q.shape[1]], device="cuda")
        packed = {"cu_seqlens": cu, "backend": "triton", **options}
        return gated_linear_attention(q, k, v, log_decay, **packed)[0]

    def log_linear(q, k, v, log_decay, lambda_, beta=None):
        packed = {"lengths": lengths, "backend": "triton"}
        return log_linear_attention(q, k, v, log_decay, beta, lambda_, **packed)

    return log_linear if op.startswith("log_linear") else one_state


def scores(q_BTJK, k_BTJK, log_decay, past_TT):
    """[B, J, T, T]: <q_i, k_j>, decayed from after j to i; one channel after another."""
    G = log_decay.cumsum(1)
    if G.dim() == 3:
        G_BJT = G.transpose(1, 2)
        between = (G_BJT[..., :, None] - G_BJT[..., None, :]).masked_fill(~past_TT, -torch.inf)
        return torch.einsum("bijk,bsjk->bjis", q_BTJK, k_BTJK) * between.exp()
    total = 0
    for channel in range(G.shape[-1]):
        q_BJT, k_BJT = (x[..., channel].transpose(1, 2) for x in (q_BTJK, k_BTJK))
        G_BJT = G[..., channel].repeat_interleave(q_BTJK.shape[2] // G.shape[2], dim=2)
        G_BJT = G_BJT.transpose(1, 2)
        between = (G_BJT[..., :, None] - G_BJT[..., None, :]).masked_fill(~past_TT, -torch.inf)
        total = total + q_BJT[..., :, None] * k_BJT[..., None, :] * between.exp()
    return total


def definition(lengths):
    """[T, T] weights in the gates' dtype, rounded to that of v."""

    def attend(q, k, v, log_decay, lambda_=None):
        dtype, groups = log_decay.dtype, v.shape[2] // q.shape[2]
        outputs, parts = [], lengths or [q.shape[1]]
        inputs = [q, k, v, log_decay, *([] if lambda_ is None else [lambda_])]
        for own in zip(*(x.split(parts, dim=1) for x in inputs), strict=True):
            q_BTJK, k_BTJK = (x.to(dtype).repeat_interleave(groups, dim=2) for x in own[:2])
            order = torch.arange(q_BTJK.shape[1], device=q.device)
            past = order[:, None] >= order
            weight = scores(q_BTJK, k_BTJK, own[3], past)
            if lambda_ is not None:
                level = (order[:, None] ^ order).double().add(1).log2().ceil().long()
                lambda_BJTL = own[4].transpose(1, 2)
                index = level.expand(*lambda_BJTL.shape[:2], *level.shape)
                weight = weight * lambda_BJTL.gather(3, index)
            weight = (weight * q.shape[-1] ** -0.5).to(v.dtype).to(dtype)
            outputs.append(torch.einsum("bjis,bsjv->bijv", weight, own[2].to(dtype)))
        return torch.cat(outputs, dim=1).to(v.dtype)

    return attend


def check(op, inputs, lengths=None, **options):
    found = run(kernel(op, lengths, **options), inputs, torch.bfloat16)
    again = run(kernel(op, lengths, **options), inputs, torch.bfloat16)
    exact = run(definition(lengths), inputs, torch.float64)
    low = run(definition(lengths), inputs, torch.bfloat16)
    for name, x in exact.items():
        assert torch.equal(found[name], again[name]), name
        # The kernels also round states and what is written to them: the root mean square stays
        # within 2, the one worst of many entries does not have to.
        assert_close_calibrated(found[name], x, low[name], name, maximum_factor=4.0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 1000, 4096])
def test_lengths(op, T):
    # The definition of the longest has T^2 numbers, times K with a decay a channel.
    sizes = {"B": 2} if T < 4096 else {"H": 1, "J": 1}
    check(op, make_inputs(op, T, **sizes))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128)])
def test_packed(op, dims):
    check(op, make_inputs(op, sum(PACKED), K=dims[0], V=dims[1]), PACKED)


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("T", [sum(PACKED), 2000])
def test_one_state_in_one_scan(dims, T, monkeypatch):
    monkeypatch.setattr(triton_op, "PLAN", replace(triton_op.PLAN, fewest_programs=1))
    inputs = make_inputs("one_state", T, K=dims[0], V=dims[1])
    check("one_state", inputs, PACKED if sum(PACKED) == T else None)


@pytest.mark.parametrize("op", ["one_state", "channel"])
def test_rows_side_by_side(op):
    lengths = [100, 28, 64, 192]
    check(op, make_inputs(op, sum(lengths)), lengths, rows=2)


@pytest.mark.parametrize("op", [*OPS, "log_linear_delta"])
def test_a_long_document_is_as_exact_as_a_short_one(op):
    """Against the chunked form in fp64, which equals the definition to 1e-9."""

    def chunked(q, k, v, log_decay, lambda_=None, beta=None):
        if lambda_ is None:
            return gated_linear_attention(q, k, v, log_decay)[0]
        return log_linear_attention(q, k, v, log_decay, beta, lambda_)

    def errors(T):
        inputs = make_inputs(op, T, H=1, J=1)
        found, again = (run(kernel(op, None), inputs, torch.bfloat16) for _ in range(2))
        exact = run(chunked, inputs, torch.float64)
        for name, x in found.items():
            assert torch.equal(x, again[name]), name
        return {name: float((found[name] - x).norm() / x.norm()) for name, x in exact.items()}

    short, long = errors(2048), errors(32768)
    for name, error in long.items():
        # Longer documents have more terms, of either sign.
        assert error < 2 * short[name], (name, error, short[name])


# Roundings to bf16, of up to 2^-9 each: of states, of what is written and of weights; on the delta
# base of the chunks' maps too.
@pytest.mark.parametrize(("op", "roundings"), [("log_linear", 3), ("log_linear_delta", 4)])
def test_initial_states_and_a_tree_that_goes_on(op, roundings):
    """The fp64 chunked form takes the same states; a position may be in the middle of a chunk."""
    generator = torch.Generator("cuda").manual_seed(0)
    for position in (64, 100, 1000):
        inputs = make_inputs(op, 300)
        shape = (1, LEVELS, 4, 64, 64)
        inputs["states"] = torch.randn(shape, generator=generator, device="cuda").bfloat16()

        def form(backend, position=position):
            def call(q, k, v, log_decay, lambda_, *beta_and_states):
                *beta, states_BSJKV = beta_and_states
                options = {"initial_position": position, "backend": backend}
                options["initial_states_BSJKV"] = states_BSJKV.to(lambda_.dtype)
                beta = beta[0] if beta else None
                return log_linear_attention(q, k, v, log_decay, beta, lambda_, **options)

            return call

        found = run(form("triton"), inputs, torch.bfloat16)
        exact = run(form("chunk"), inputs, torch.float64)
        for name, x in exact.items():
            error = float((found[name].double() - x).norm() / x.norm())
            assert error < roundings * 2**-9, (position, name, error)


@pytest.mark.parametrize("op", ["one_state", "channel"])
def test_states_in_and_out(op):
    """Against the chunked form in fp64."""
    inputs = make_inputs(op, 300)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs["state"] = torch.randn(1, 4, 64, 64, generator=generator, device="cuda").bfloat16()

    def form(backend):
        def call(q, k, v, log_decay, state):
            state = state.to(log_decay.dtype)
            options = {"initial_state_BJKV": state, "backend": backend}
            o, final = gated_linear_attention(q, k, v, log_decay, **options)
            return torch.cat([o.flatten(), final.flatten()])

        return call

    found = run(form("triton"), inputs, torch.bfloat16)
    exact = run(form("chunk"), inputs, torch.float64)
    for name, x in exact.items():
        error = float((found[name].double() - x).norm() / x.norm())
        # Roundings to bf16 of states, of what is written and of weights, of up to 2^-9 each.
        assert error < 3 * 2**-9, (name, error)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_normalised_linear_attention(dims):
    cu = torch.tensor([0, *torch.tensor(PACKED).cumsum(0)], device="cuda")
    inputs = make_inputs("one_state", sum(PACKED), H=4, K=dims[0], V=dims[1])
    inputs = {name: inputs[name] for name in "qkv"}

    def triton(q, k, v):
        return linear_attention(q, k, v, cu_seqlens=cu, backend="triton")[0]

    def reference(q, k, v):
        return linear_attention_reference(q, k, v, cu)

    found, again = (run(triton, inputs, torch.bfloat16) for _ in range(2))
    exact, low = (run(reference, inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, x in exact.items():
        assert torch.equal(found[name], again[name]), name
        assert_close_calibrated(found[name], x, low[name], name, maximum_factor=4.0)


def rounded_maps(*inputs, exact=chunk._chunk_maps):
    """Of each chunk, in bf16 as tensor cores take them; the decay across it is not."""
    scores, read, absorb, transition = exact(*inputs)
    eye_KK = torch.eye(transition.shape[-1], device=transition.device)
    across = inputs[2].sum(-2).exp().unsqueeze(-1) * eye_KK
    low = [x.bfloat16().float() for x in (scores, read, absorb, across - transition)]
    return *low[:3], across - low[3]


@pytest.mark.parametrize(
    ("lengths", "dims"),
    [([T], (64, 64)) for T in (1, 2, 63, 64, 65, 127, 1000, 4096)]
    + [(PACKED, (64, 64)), (PACKED, (128, 64)), (PACKED, (128, 128))],
    ids=str,
)
def test_delta_base(lengths, dims, monkeypatch):
    """Against the chunked form in fp64; and that form with its chunks' maps rounded."""
    # A token or two give the gates four numbers a head: enough heads to tell errors by.
    rows = 16 if sum(lengths) <= 2 else 1
    inputs = make_inputs("log_linear_delta", sum(lengths), B=rows, K=dims[0], V=dims[1])
    lengths = lengths if len(lengths) > 1 else None

    def form(backend):
        def call(q, k, v, log_decay, lambda_, beta):
            options = {"lengths": lengths, "backend": backend}
            return log_linear_attention(q, k, v, log_decay, beta, lambda_, **options)

        return call

    found, again = (run(form("triton"), inputs, torch.bfloat16) for _ in range(2))
    exact = run(form("chunk"), inputs, torch.float64)
    monkeypatch.setattr(chunk, "_chunk_maps", rounded_maps)
    low = run(form("chunk"), inputs, torch.bfloat16)
    for name, x in exact.items():
        assert torch.equal(found[name], again[name]), name
        assert_close_calibrated(found[name], x, low[name], name, maximum_factor=4.0)
