"""Every kernel, compiled without a GPU, fits the shared memory of those it has launches for."""

import pytest
import torch

from mixtron.kernels import self_test_cases
from mixtron.kernels.delta_rule import delta_rule, triton_plan
from mixtron.kernels.path_attention import path_attention
from mixtron.kernels.path_attention import triton_plan as path_plan
from mixtron.kernels.self_test import results
from mixtron.kernels.triton_tools import SHARED_MEMORY_BYTES
from tests.kernels.launches import recorded

CASES = {case.name: case for case in self_test_cases.all_cases()}


def launches(case, capability, monkeypatch):
    monkeypatch.setattr(triton_plan, "architecture", lambda device: capability)
    monkeypatch.setattr(path_plan, "large", lambda device: capability == 90)
    inputs = {n: x if n in case.wide else x.bfloat16() for n, x in case.inputs.items()}
    weight = torch.zeros(case.reference(*inputs.values()).shape)
    with recorded() as found:
        results(case.triton, inputs, weight)
    return found


def assert_fits(found, capability):
    for (name, *compiled_for), shared_bytes in found.items():
        assert shared_bytes(capability) <= SHARED_MEMORY_BYTES[capability], (name, compiled_for)


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
def test_the_largest_kernel_fits(capability, monkeypatch):
    case = CASES["delta_rule (kaczmarz, K 128, V 128)"]
    found = launches(case, capability, monkeypatch)
    names = [name for name, *_ in found]
    assert names == [
        "prepare_kernel",
        "scan_kernel",
        "reverse_scan_kernel",
        "pairs_kernel",
        "states_kernel",
        "gradient_kernel",
    ]
    assert_fits({k: x for k, x in found.items() if k[0] == "gradient_kernel"}, capability)


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
def test_the_maps_of_pieces_fit(capability, monkeypatch):
    """One head is cut in pieces; their maps are loaded by tensor descriptors."""
    monkeypatch.setattr(triton_plan, "architecture", lambda device: capability)
    q_BTHK = torch.zeros(1, 256, 1, 128).bfloat16()
    eta_BTH = torch.zeros(1, 256, 1)
    with recorded() as found:
        options = {"step_size": "kaczmarz", "backend": "triton"}
        delta_rule(q_BTHK, q_BTHK, q_BTHK, eta_BTH, eta_BTH, **options)
    maps = {k: x for k, x in found.items() if k[0] == "piece_maps_kernel"}
    assert maps
    assert_fits(maps, capability)


def test_heads_that_share_keys_fit(monkeypatch):
    """PaTH's tiles take the query heads of a key/value head together."""
    monkeypatch.setattr(path_plan, "large", lambda device: True)
    q_BTHK, k_BTGK = (torch.zeros(1, 256, heads, 128).bfloat16() for heads in (8, 1))
    inputs = (q_BTHK, k_BTGK, k_BTGK, k_BTGK.float(), k_BTGK[..., 0].float())
    leaves = [x.requires_grad_() for x in inputs]
    with recorded() as found:
        o_BTHV = path_attention(*leaves, backend="triton")
        torch.autograd.grad(o_BTHV.sum(), leaves, allow_unused=True)
    largest = {k: x for k, x in found.items() if k[0] == "tile_gradient_kernel"}
    assert largest
    assert_fits(largest, 90)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        (name, capability)
        for name in CASES
        for capability in SHARED_MEMORY_BYTES
        # The op refuses PaTH's maps on an A100 by name.
        if capability > 80 or "PaTH" not in name
    ],
)
def test_every_kernel_fits(name, capability, monkeypatch):
    found = launches(CASES[name], capability, monkeypatch)
    assert found
    assert_fits(found, capability)
