"""The Triton form against the definition, run by Triton's interpreter: the kernels' arithmetic."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import torch
from mixtron.kernels.sd_attention import sd_attention, triton_op
from tests.kernels import test_sd_attention as common

common.H, common.K = 2, 16


def run(inputs, lengths):
    offsets = common.padded_offsets(lengths)
    return sd_attention(*inputs, lengths, offsets, scale=common.SCALE, backend="triton")


for lengths, own, others in [
    ([1], 64, 64),
    ([65], 64, 64),
    ([300], 128, 64),
    ([1, 7, 140, 1, 2, 57, 64], 64, 32),
]:
    launch = triton_op.Launch(own, others, 4, 1)
    triton_op.LAUNCHES[64] = triton_op.Launches(launch, launch)
    inputs = common.make_inputs(sum(lengths), V=16)
    exact = common.results(common.reference, inputs, lengths)
    found = common.results(run, common.to_dtype(inputs, torch.float32), lengths)
    for name, x in exact.items():
        error = float((found[name] - x).norm())
        # Sums of up to 300 terms in fp32; a token alone has gradients of 0.
        assert error <= 4e-6 * float(x.norm()) + 1e-6, (lengths, name, error, float(x.norm()))
    print("checked", sum(lengths))
"""


def test_interpreted_kernels_equal_the_definition():
    assert run_interpreted(CHECK) == [f"checked {T}" for T in (1, 65, 300, 272)]
