"""The short convolution of mixers, over context ranks and in decoding."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mixtron.kernels.short_convolution import short_convolution_parts
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.context_parallel import rows_before
from mixtron.megatron_ext.parameters import uniform
from mixtron.megatron_ext.sharded_module import ShardedModule
from mixtron.megatron_ext.state_relay import Neighbours


class _ReplaceFirst(torch.autograd.Function):
    """A tensor with other first rows, in place unless it is a view of one that others share."""

    @staticmethod
    def forward(ctx, x, first):
        ctx.rows = len(first)
        if x._is_view():
            return torch.cat([first, x[ctx.rows :]])
        ctx.mark_dirty(x)
        x[: ctx.rows] = first
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        rest = grad.clone()
        rest[: ctx.rows] = 0
        return rest, grad[: ctx.rows]


class _Ends(torch.autograd.Function):
    """A tensor, its first and its last rows. Backward adds their gradients to the tensor's, in
    place: a convolution makes that anew, and slices would fill and add whole tensors."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return x.view_as(x), x[:rows].clone(), x[-rows:].clone()

    @staticmethod
    def backward(ctx, grad, first, last):  # type: ignore[override]
        grad[: ctx.rows] += first
        grad[-ctx.rows :] += last
        return grad, None


class ShortConvolution(ShardedModule):
    """Causal depthwise convolution that starts anew at every document, then SiLU (by default).

    Under context parallelism a rank takes the last width - 1 tokens of the one before it: gathered
    from all, or by `relayed` from that one alone (see state_relay.py).

    One weight [channels/tp, width] over all components, one checkpoint key a component. Drawn
    uniformly in +-1/sqrt(width), the bound of a convolution with that fan-in.
    """

    def __init__(
        self,
        config: TransformerConfig,
        components: dict[str, int],
        width: int,
        tp_group,
        cp_group,
        *,
        silu: bool = True,
        relayed: bool = False,
    ):
        super().__init__(config, tp_group)
        self.cp_group = cp_group
        self.beside = Neighbours(cp_group) if relayed else None
        self.silu = silu
        self.widths = tuple(size // tp_group.size() for size in components.values())
        bound = width**-0.5
        self.weight = self.new_parameter(
            (sum(components.values()) // tp_group.size(), width),
            uniform(-bound, bound),
            tensor_dim=0,
            components=components,
        )

    def components(
        self, x_TBE: Tensor, batch: Batch, count: int | None = None
    ) -> tuple[Tensor, ...]:
        """`forward`, each component, or the first `count`, a tensor of its own."""
        widths = self.widths[:count]
        # As a module: with overlap its call waits for the weights.
        return self(x_TBE[..., : sum(widths)] if count else x_TBE, batch, widths)

    def forward(self, x_TBE: Tensor, batch: Batch, widths: tuple[int, ...] = ()) -> Any:
        """One tensor, or parts of these widths; of x's channels, all or the first."""
        parts = self._parts(x_TBE, batch, widths or (x_TBE.shape[-1],))
        return parts if widths else parts[0]

    def _parts(self, x_TBE: Tensor, batch: Batch, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        halo, position_T = self.weight.shape[1] - 1, batch.position_ids
        weight_EW = (
            self.weight if x_TBE.shape[-1] == len(self.weight) else self.weight[: sum(widths)]
        )
        convolve = partial(
            short_convolution_parts, weight_EW=weight_EW, widths=widths, silu=self.silu
        )
        if batch.context_size == 1 or halo == 0:
            return convolve(x_TBE, position_T=position_T)
        # As if the share began a document; then its first tokens anew, with those before them.
        own_T = torch.arange(len(position_T), device=position_T.device).minimum(position_T)
        first_T = F.pad(position_T[:halo], (halo, 0))
        x_TBE, own_TBE, last_TBE = _Ends.apply(x_TBE, min(halo, len(x_TBE)))  # type: ignore[misc]
        first_TBE = torch.cat([self._rows_before(last_TBE, halo, batch), own_TBE])
        firsts = convolve(first_TBE, position_T=first_T)
        return tuple(
            _ReplaceFirst.apply(y_TBE, first[halo:])
            for y_TBE, first in zip(convolve(x_TBE, position_T=own_T), firsts, strict=True)
        )

    def _rows_before(self, last_TBE: Tensor, halo: int, batch: Batch) -> Tensor:
        if self.beside is not None:
            return self.beside.rows_before(last_TBE, halo, batch.received)
        return rows_before(last_TBE, halo, self.cp_group)

    def tails(self, x_TBE: Tensor, lengths: list[int]) -> Tensor:
        """Each document's inputs [N, width - 1, E] that its next tokens still reach; zeros before
        its first."""
        rows = self.weight.shape[1] - 1
        parts = x_TBE[:, 0].split(lengths)
        return torch.stack([F.pad(x_TE, (0, 0, rows, 0))[len(x_TE) :] for x_TE in parts])

    def step(self, x_BE: Tensor, tail_BWE: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each sequence: its output [B, E] and the new tail."""
        window_BWE = torch.cat([tail_BWE, x_BE[:, None]], dim=1)
        y_BE = (window_BWE.float() * self.weight.float().t().flip(0)).sum(1)
        y_BE = y_BE.to(x_BE.dtype)
        return F.silu(y_BE) if self.silu else y_BE, window_BWE[:, 1:]
