"""The Triton form against the definition, run by Triton's interpreter: the kernels' arithmetic."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import torch
from mixtron.kernels.windowed_attention import plan_windows, windowed_attention
from tests.kernels import test_windowed_attention as common

common.K = common.V = 16


def run(inputs, lengths, order_T, tiles=(64, 64), **options):
    query_tile, key_tile = tiles
    plan = plan_windows(
        order_T, common.offsets(lengths), query_tile=query_tile, key_tile=key_tile, **options
    )
    return windowed_attention(*inputs, plan, scale=common.SCALE, backend="triton")


for lengths, kv_heads, window, side, plain, tiles in [
    ([1], 1, 3, "two", False, (64, 64)),
    ([65], 2, 7, "two", False, (64, 64)),
    ([130], 1, 40, "one", False, (128, 64)),
    ([69, 131], 2, 70, "one", True, (64, 64)),
    ([1, 7, 64, 1, 57, 131], 1, 129, "two", False, (64, 128)),
]:
    T = sum(lengths)
    inputs = common.make_inputs(T, heads=2, kv_heads=kv_heads)
    order_T = torch.arange(T) if plain else common.draw(lengths)
    arguments, options = (lengths, order_T), {"window": window, "window_side": side}
    exact = common.results(common.reference, inputs, *arguments, **options)
    fp32 = common.in_dtype(inputs, torch.float32)
    planned = range(T) if plain else order_T
    found = common.results(run, fp32, lengths, planned, tiles=tiles, **options)
    for name, x in exact.items():
        error = float((found[name] - x).norm())
        # Sums of up to 131 terms in fp32; a token alone has gradients of 0.
        assert error <= 3e-6 * float(x.norm()) + 1e-6, (T, name, error)
    print("checked", T)
"""
PLANS = """
import torch
from mixtron.kernels.windowed_attention import document_permutations, plan_windows
from tests.kernels import test_windowed_attention as common

def parts(order_T, offsets, **options):
    made = plan_windows(order_T, offsets, **options)
    sides = (made.queries, made.keys, made.keys_of_queries, made.queries_of_keys)
    return [x for side in sides for x in vars(side).values() if torch.is_tensor(x)]


pieces = {
    "query_slots": range(100, 200),
    "key_slots": range(60, 261),
    "query_row_S": torch.arange(100).flip(0),
    "key_row_S": torch.arange(201).flip(0),
}
for lengths, options in [
    ([1, 7, 64, 1, 57, 131], {"window": 9, "window_side": "one"}),
    ([1, 7, 64, 1, 57, 131], {"window": 90, "window_side": "two", **pieces}),
    ([700], {"window": 300, "window_side": "two", "tokens": 333, "query_tile": 128}),
]:
    order_T, offsets = common.draw(lengths), common.offsets(lengths)
    drawing = {"seed": 2**63 - 1, "layers": range(7, 9)}
    draws = [
        document_permutations(offsets, sum(lengths), step=step, backend=backend, **drawing)
        for step, backend in (
            (2**31 + 5, "tiled"),
            (2**31 + 5, "triton"),
            (torch.tensor(2**31 + 5), "triton"),
        )
    ]
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    found, expected = (
        parts(order_T, offsets, **options, backend=backend) for backend in ("triton", "tiled")
    )
    assert all(map(torch.equal, found, expected))
    print("checked", len(found))
"""

STEP = """
import torch
from mixtron.kernels.sd_attention import sd_attention_step
from mixtron.kernels.windowed_attention import windowed_attention_step

torch.manual_seed(0)
B, S, W, K, V = 2, 70, 300, 16, 32
for H, G in ((4, 4), (6, 2)):
    q_BHK, room_BSGK = torch.randn(B, H, K), torch.randn(B, S + 9, G, K)
    cached = room_BSGK[:, :S], torch.randn(B, S, G, V)
    row_BW, attended_BW = torch.randint(-5, S + 5, (B, W)), torch.rand(B, W) < 0.2
    attended_BW &= (row_BW >= 0) & (row_BW < S)
    found, expected = (
        windowed_attention_step(q_BHK, *cached, row_BW, attended_BW, backend=backend)
        for backend in ("triton", "tiled")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
q_BHK, k_BHK, d_BH = torch.randn(B, 3, K), torch.randn(B, 3, K), torch.rand(B, 3)
cached = torch.randn(B, S, 3, 2 * K), torch.randn(B, S, 3, V)
age_BS = torch.tensor([[S - 1], [17]]) - torch.arange(S)
found, expected = (
    sd_attention_step(q_BHK, k_BHK, d_BH, *cached, age_BS, scale=0.25, backend=backend)
    for backend in ("triton", "blockwise")
)
torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
print("checked steps")
"""

GATES = """
import torch
from mixtron.kernels.windowed_attention import gated_sum

torch.manual_seed(0)
T, H, K = 21, 3, 16


def plain(first_THK, second_THK, gate1_TH, gate2_TH):
    gate1_THE, gate2_THE = (x.unflatten(1, (H, -1)).sigmoid() for x in (gate1_TH, gate2_TH))
    return gate1_THE * first_THK + gate2_THE * second_THK


for width in (1, K):
    fused = torch.randn(T, 1 + 2 * H * width)
    gates = fused[:, 1:].chunk(2, dim=1)
    inputs = [torch.randn(T, H, K), torch.randn(T, H, K), *gates]
    results = []
    for form in (plain, gated_sum):
        leaves = [x.detach().requires_grad_() for x in inputs]
        o_THK = form(*leaves)
        results.append([o_THK, *torch.autograd.grad((o_THK * inputs[0].cos()).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    print("checked", width)
"""


def test_interpreted_kernels_equal_the_definition():
    assert run_interpreted(CHECK) == [f"checked {T}" for T in (1, 65, 130, 200, 261)]


def test_interpreted_plans_are_those_of_torch():
    assert run_interpreted(PLANS) == ["checked 16"] * 3


def test_interpreted_gates_and_decode_steps_are_those_of_torch():
    assert run_interpreted(GATES + STEP) == ["checked 1", "checked 16", "checked steps"]
