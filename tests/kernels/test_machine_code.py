"""ptxas 12.8 leaves the address of an operand of 16 or 32 columns unset in some kernels of four
warps: a product then reads outside of shared memory. No interpreter sees that."""

import dataclasses

import pytest
import torch

from mixtron.kernels.log_linear_attention import triton_delta_op as op
from mixtron.kernels.log_linear_attention.triton_plan import tree_plan
from tests.helpers.machine_code import Compiled, unset_addresses


def scans(K, monkeypatch):
    """The machine code of the delta base's two scans."""
    kernels = [Compiled(op.scan_kernel), Compiled(op.reverse_scan_kernel)]
    monkeypatch.setattr(op, "scan_kernel", kernels[0])
    monkeypatch.setattr(op, "reverse_scan_kernel", kernels[1])
    plan = tree_plan((130,), 0, 64, torch.device("cpu"))
    v_BTJV = torch.empty(1, 130, 4, K, dtype=torch.bfloat16)
    shape = (1, 4, plan.chunks)
    cumulative = torch.empty(*shape, 64)
    X, M = (v_BTJV.new_empty(*shape, 64, 64) for _ in range(2))
    Z, Y = (v_BTJV.new_empty(*shape, 64, K) for _ in range(2))
    maps = (cumulative, X, M, Z, Y, v_BTJV.new_empty(*shape, K, K))
    states = op.scan(v_BTJV, maps, None, None, plan)
    op.reverse_scan(v_BTJV, torch.empty(1, 130, 4, 9), maps, states, plan)
    return [kernel.cubins[0] for kernel in kernels]


@pytest.mark.parametrize("K", [64, 128])
def test_scans_address_what_they_have(K, monkeypatch, tmp_path):
    for cubin in scans(K, monkeypatch):
        assert unset_addresses(cubin, tmp_path) == []


def test_an_unset_address_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(op, "PLAN", dataclasses.replace(op.PLAN, scan_warps=4))
    assert unset_addresses(scans(64, monkeypatch)[0], tmp_path)
