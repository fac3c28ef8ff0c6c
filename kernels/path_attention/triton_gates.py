"""Sums of log gates in the pieces that the kernels add up, and the gate's gradient."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.path_attention.blocks import sums_behind

LOG2_E = 1.4426950408889634
LEAST = -64.0
"""Beyond that nothing is left, and larger sums would cost the others their precision."""


@dataclass
class GateSums:
    """In units of log 2."""

    tokens_4BHS: Tensor
    """From the left edge of each token's tile to the token, its own included, and behind the token
    to the tile's right edge; the same for blocks."""
    blocks_BHN: Tensor
    """Of whole blocks."""

    def part(self, rows: slice, heads: slice) -> "GateSums":
        return GateSums(self.tokens_4BHS[:, rows, heads], self.blocks_BHN[rows, heads])


def gate_sums(log_forget_BTH: Tensor, S: int, C: int, block: int) -> GateSums:
    gate_BHT = log_forget_BTH.float().clamp(min=LEAST).transpose(1, 2) * LOG2_E
    gate_BHS = F.pad(gate_BHT, (0, S - gate_BHT.shape[-1]))
    sums = []
    for length in (C, block):
        gate_BHNC = gate_BHS.unflatten(-1, (-1, length))
        sums += [gate_BHNC.cumsum(-1).flatten(-2), sums_behind(gate_BHNC).flatten(-2)]
    return GateSums(torch.stack(sums), gate_BHS.unflatten(-1, (-1, block)).sum(-1))


def gate_gradient(
    ds_BHS: Tensor, log_forget_BTH: Tensor, start_S: Tensor | None, end_S: Tensor | None
) -> Tensor:
    """From what each token's row has more than its column: the gate of token l is in the logits of
    i >= l and j < l, and pairs with both i, j >= l are in as many rows as columns.

    fp64, because it is a running difference.
    """
    T = log_forget_BTH.shape[1]
    # A row of zeros more: on a GPU torch scans a single row in an order that varies.
    rows_BHT = F.pad(ds_BHS[..., :T].double(), (0, 0, 0, 1))
    behind_BHS = rows_BHT.flip(-1).cumsum(-1).flip(-1)[:, :-1]
    position_T = torch.arange(T, device=ds_BHS.device)
    if start_S is None or end_S is None:
        first_T = position_T == 0
    else:
        first_T = position_T == start_S[:T]
        behind_BHS = behind_BHS - F.pad(behind_BHS, (0, 1))[..., end_S[:T].long()]
    dgate_BHT = behind_BHS.masked_fill(first_T, 0)
    return dgate_BHT.transpose(1, 2).to(log_forget_BTH.dtype)
