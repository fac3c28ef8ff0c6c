"""PaTH, PaTH-FoX and FoX on a GPU in bf16 against the definition in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.path_attention import path_attention, path_attention_step, triton_op
from tests.helpers.numerics import assert_close_calibrated

pytestmark = pytest.mark.gpu
FORMS = {"path": "wb", "path-fox": "wbg", "fox": "g", "softmax": ""}
RAGGED = [0, 1, 131, 194, 195, 400, 520, 520]


def make_inputs(T, form, *, B=1, H=4, G=2, K=128, V=128):
    """bf16 q, k, v; fp32 w, beta (0 to 2) and gates."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    inputs = {
        "q_BTHK": draw(B, T, H, K).bfloat16(),
        "k_BTGK": draw(B, T, G, K).bfloat16(),
        "v_BTGV": draw(B, T, G, V).bfloat16(),
    }
    w, beta, gate = draw(B, T, G, K), draw(B, T, G), draw(B, T, H)
    if "w" in FORMS[form]:
        inputs["w_BTGK"] = F.normalize(w, dim=-1)
        inputs["beta_BTG"] = (2.4 * beta.sigmoid() - 0.2).clamp(0, 2)
    if "g" in FORMS[form]:
        inputs["log_forget_BTH"] = F.logsigmoid(gate + 2)
    return {n: x.cuda() for n, x in inputs.items()}


def results(op, inputs, dtype=None):
    """The output and every gradient of sum(output * fixed noise)."""
    leaves = {n: x.to(dtype or x.dtype).requires_grad_() for n, x in inputs.items()}
    o = op(**leaves)
    noise = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    loss = (o * noise.to(o)).sum()
    gradients = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return {"o": o.detach()} | dict(zip(leaves, gradients, strict=True))


def low(x: Tensor) -> Tensor:
    """Rounded to bf16, as what enters a tensor core; autograd rounds the gradient too."""
    return x.bfloat16().float()


def rounded(q_BTHK, k_BTGK, v_BTGV, w_BTGK=None, beta_BTG=None, log_forget_BTH=None, starts=()):
    """The definition in fp32 with the operands of its products rounded to bf16: the carried keys,
    the weights and, in autograd, their gradients."""
    T, H, K = q_BTHK.shape[1:]
    shared = H // k_BTGK.shape[2]
    k, v = (x.float().repeat_interleave(shared, 2) for x in (k_BTGK, v_BTGV))
    w = beta = None
    if w_BTGK is not None and beta_BTG is not None:
        w, beta = (x.repeat_interleave(shared, 2) for x in (w_BTGK, beta_BTG))
    keys, gates, rows, first = k[:, :0], k[:, :0, :, 0], [], 0
    for t in range(T):
        first = t if t in starts else first
        if t and w is not None and beta is not None:
            along = (keys * w[:, t : t + 1]).sum(-1, keepdim=True)
            keys = keys - beta[:, t : t + 1, :, None] * along * w[:, t : t + 1]
        keys = torch.cat([keys, k[:, t : t + 1]], 1)
        if log_forget_BTH is not None:
            gates = gates + log_forget_BTH[:, t : t + 1]
        gates = F.pad(gates, (0, 0, 0, 1))
        logits = (low(keys) * q_BTHK[:, t : t + 1].float()).sum(-1) / K**0.5
        logits.register_hook(low)
        weights = low((logits + gates)[:, first:].softmax(1))
        rows.append(torch.einsum("bsh,bshv->bhv", weights, v[:, first : t + 1]))
    return torch.stack(rows, 1).to(v_BTGV.dtype)


def compare(inputs, cu_seqlens=None):
    cu_seqlens = None if cu_seqlens is None else torch.tensor(cu_seqlens, device="cuda")

    longest = None if cu_seqlens is None else int(cu_seqlens.diff().max())

    def form(backend):
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": longest, "backend": backend}
        return lambda **x: path_attention(**x, **options)

    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    found = results(form("triton"), inputs)
    again = results(form("triton"), inputs)
    exact = results(form("block"), inputs, torch.float64)
    near = results(lambda **x: rounded(**x, starts=starts), inputs)
    for name, x in found.items():
        assert torch.equal(x, again[name]), name
        error, size, other = (
            float(y.double().square().mean().sqrt())
            for y in (x.double() - exact[name], exact[name], near[name].double() - exact[name])
        )
        print(f"{name}: error {error / max(size, 1e-9):.2e}, rounded {other / max(size, 1e-9):.2e}")
    for name, x in found.items():
        if exact[name].abs().max() < 1e-9:  # a single token's but o and dv
            assert x.abs().max() < 1e-3, name
            continue
        # The kernels round what the definition does not: each query as it is carried.
        assert_close_calibrated(x, exact[name], near[name], name, maximum_factor=4.0)


# Most of a first run is compilation: both widths, shares of heads and forms, but not all of each.
@pytest.mark.parametrize(
    ("form", "width"),
    [*((form, 128) for form in FORMS), ("path-fox", 64), ("fox", 64)],
)
def test_packed_documents(form, width):
    compare(make_inputs(520, form, K=width, V=width), RAGGED)


@pytest.mark.parametrize("form", ["path", "path-fox", "fox"])
def test_heads_with_keys_of_their_own(form):
    compare(make_inputs(200, form, B=2, G=4))


@pytest.mark.parametrize("form", ["path", "path-fox"])
def test_many_heads_with_keys_of_their_own(form):
    """More tiles than multiprocessors, and documents."""
    compare(make_inputs(1100, form, H=24, G=24), [0, 1, 300, 700, 1100])


def test_four_heads_share_keys():
    compare(make_inputs(300, "path", H=4, G=1))


@pytest.mark.parametrize("form", ["path", "path-fox", "fox"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 500])
def test_lengths(T, form):
    compare(make_inputs(T, form))


@pytest.mark.parametrize("form", ["path", "path-fox", "fox"])
@pytest.mark.parametrize(
    ("T", "offsets"), [(1000, None), (4096, None), (4096, [0, 1000, 1100, 3500, 4096])]
)
def test_error_does_not_grow(T, offsets, form):
    """Against the blockwise form in fp64, which equals the definition to 1e-9. bf16 has an error of
    2^-9 an entry; that of a gradient is a few of them, whatever the length."""
    inputs, options = make_inputs(T, form), {}
    if offsets is not None:
        options = {"cu_seqlens": torch.tensor(offsets, device="cuda"), "max_seqlen": 2400}
    found = results(lambda **x: path_attention(**x, **options, backend="triton"), inputs)
    exact = results(lambda **x: path_attention(**x, **options), inputs, torch.float64)
    for name, x in found.items():
        error = float((x.double() - exact[name]).norm() / exact[name].norm())
        print(f"{form} {T} {offsets} {name}: {error:.2e}")
        assert error < 0.02, name


@pytest.mark.parametrize("G", [2, 4])
@pytest.mark.parametrize("form", ["path", "path-fox", "fox"])
def test_nothing_unwritten_is_read(form, G, monkeypatch):
    """Fresh memory is filled with NaN; the heads are taken one by one."""
    inputs = make_inputs(700, form, G=G)
    expected = results(lambda **x: path_attention(**x, backend="triton"), inputs)
    monkeypatch.setattr(triton_op, "WORKSPACE_BYTES", 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = results(lambda **x: path_attention(**x, backend="triton"), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x in found.items():
        assert not x.isnan().any(), name
        if form == "fox":
            assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("form", ["path", "path-fox"])
def test_inputs_that_begin_anywhere(form):
    """They need not begin where copies by boxes may."""
    inputs = make_inputs(500, form)
    moved = {
        n: torch.cat([x.new_empty(1), x.flatten()])[1:].view(x.shape) for n, x in inputs.items()
    }
    assert all(x.data_ptr() % 16 for x in moved.values())

    def attend(**x):
        o = path_attention(**x, backend="triton")
        return torch.cat([o.new_zeros(1), o.flatten()])[1:].view(o.shape)

    found, expected = results(attend, moved), results(attend, inputs)
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("form", ["path-fox", "fox"])
def test_decode_step(form):
    """Both forms on the same caches of 2,000 rows, of two sequences."""
    inputs = {n: x[0] for n, x in make_inputs(4002, form).items()}
    length = torch.tensor([1990, 700], device="cuda")
    kind = torch.float32 if form == "path-fox" else torch.bfloat16
    names = ("k_BTGK", "v_BTGV", "log_forget_BTH")
    stacked = [inputs[n][:4000].unflatten(0, (2, -1)) for n in names]
    caches = [stacked[0].to(kind), stacked[1], stacked[2]]
    new = [inputs[n][4000:] if n in inputs else None for n in ("q_BTHK", *names[:2])]
    new += [inputs[n][4000:] if n in inputs else None for n in ("w_BTGK", "beta_BTG", names[2])]
    found = []
    for backend in ("block", "triton"):
        own = [x.clone() for x in caches]
        o = path_attention_step(*own, length, *new, backend=backend)
        found.append([o, *(x[b, : length[b] + 1] for x in own for b in range(2))])
    for x, y in zip(*found, strict=True):
        # fp32 sums of 2,000 terms; o is rounded to bf16.
        tolerance = 2**-8 if x.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_refuses_what_it_cannot_run():
    inputs = make_inputs(64, "fox", K=32, V=32)
    with pytest.raises(ValueError, match="K=32, V=32"):
        path_attention(**inputs, backend="triton")
