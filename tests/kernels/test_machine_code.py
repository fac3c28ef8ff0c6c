"""ptxas 12.8 leaves the address of an operand of 16 or 32 columns unset in some kernels of four
warps: a product then reads outside of shared memory. No interpreter sees that."""

import torch

from mixtron.kernels.log_linear_attention import triton_delta_op as op
from mixtron.kernels.log_linear_attention.triton_plan import tree_plan
from tests.helpers.machine_code import Compiled, disassembled, overwritten, unset_addresses


def scans(K, tokens, monkeypatch):
    """The machine code of the delta base's scan, and from the end, as launched for each range of
    bits."""
    kernels = [
        Compiled(op.log_linear_delta_scan_kernel),
        Compiled(op.log_linear_delta_reverse_scan_kernel),
    ]
    monkeypatch.setattr(op, "log_linear_delta_scan_kernel", kernels[0])
    monkeypatch.setattr(op, "log_linear_delta_reverse_scan_kernel", kernels[1])
    plan = tree_plan((tokens,), 0, 64, torch.device("cpu"))
    v_BTJV = torch.empty(1, tokens, 4, K, dtype=torch.bfloat16)
    shape = (1, 4, plan.chunks)
    cumulative = torch.empty(*shape, 64)
    X, M = (v_BTJV.new_empty(*shape, 64, 64) for _ in range(2))
    Z, Y = (v_BTJV.new_empty(*shape, 64, K) for _ in range(2))
    maps = (cumulative, X, M, Z, Y, v_BTJV.new_empty(*shape, K, K))
    states = op.scan(v_BTJV, maps, None, None, plan)
    op.reverse_scan(v_BTJV, torch.empty(1, tokens, 4, 15), maps, states, plan)
    return [kernel.cubins for kernel in kernels]


def test_scans_address_what_they_have(monkeypatch, tmp_path):
    for cubins in scans(128, 64 * 129, monkeypatch):
        assert len(cubins) == 3
        for cubin in cubins:
            text = disassembled(cubin, tmp_path)
            assert "HGMMA" in text
            assert unset_addresses(text) == []


def test_an_unset_address_is_found():
    """In lines of the scan as it was compiled with 4 warps and 32 columns."""
    assert unset_addresses(FAULTY) == [FAULTY.splitlines()[3].strip()]


def test_an_overwritten_operand_is_found():
    """R4 to R7 are read by a product until it has been waited for, R12 to R15 by the one behind it
    for longer."""
    lines = IN_FLIGHT.splitlines()
    assert overwritten(IN_FLIGHT) == [lines[4].strip(), lines[7].strip()]


IN_FLIGHT = """
        /*0450*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0460*/                   HGMMA.64x128x16.F32.BF16 R88, R12, gdesc[UR4], R88, gsb0 ;
        /*0470*/                   MOV R8, R3 ;
        /*0480*/                   FADD R5, R9, R6 ;
        /*0490*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*04a0*/                   MOV R4, R3 ;
        /*04b0*/                   MOV R15, R3 ;
        /*04c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*04d0*/                   MOV R12, R3 ;
"""
FAULTY = """
        /*0450*/                   ULEA UR50, UR13, UR50, 0x18 ;
        /*0560*/                   UIADD3 UR13, UR50, 0x2000, URZ ;
        /*0590*/                   UIADD3 UR27, UP2, UR27, 0x40, URZ ;
        /*0730*/                   UIADD3 UR26, UP2, UR27, 0x40, URZ ;
        /*0a80*/                   UIADD3.64 UR24, UR20, 0x2, URZ ;
"""
