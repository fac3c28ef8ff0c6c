"""Linear attention on the gated linear op's Triton kernels: once for the values, and once with a
single value of 1 for the normaliser."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.gated_linear_attention.triton_op import run_triton
from mixtron.kernels.triton_tools import check_takes

ONES_DIM = 16
"""Value channels beside the one that is 1: tensor cores take no fewer."""


def weighted_sums(
    phi_q_BTHK: Tensor,
    phi_k_BTHK: Tensor,
    v_BTHV: Tensor,
    initial_state_BHKW: Tensor | None,
    cu_seqlens: Tensor | None,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """[B, T, H, V + 1] fp32: the values' weighted sum and the sum of the weights; and [S | z] after
    the last token, fp32. Features and values in bf16 on a GPU, K and V of 64 or 128.

    Raises:
        ValueError: a dtype, device or width that it cannot take.
    """
    check_takes(phi_q_BTHK, v_BTHV, "phi_q_BTHK")
    V = v_BTHV.shape[-1]
    no_decay_BTH = torch.zeros(v_BTHV.shape[:3], device=v_BTHV.device)
    ones_BTHX = F.pad(torch.ones_like(v_BTHV[..., :1]), (0, ONES_DIM - 1))
    S_BHKV = z_BHKX = None
    if initial_state_BHKW is not None:
        S_BHKV = initial_state_BHKW[..., :V]
        z_BHKX = F.pad(initial_state_BHKW[..., V:], (0, ONES_DIM - 1))
    sums, states = zip(
        *(
            run_triton(
                phi_q_BTHK, phi_k_BTHK, values, no_decay_BTH, state, cu_seqlens, 1.0, rows, True
            )
            for values, state in ((v_BTHV, S_BHKV), (ones_BTHX, z_BHKX))
        ),
        strict=True,
    )
    return _joined(*sums), _joined(*states)


def _joined(values: Tensor, ones: Tensor) -> Tensor:
    return torch.cat([values, ones[..., :1]], dim=-1)
