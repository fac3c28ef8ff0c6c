"""The output layer: logits, or the loss of labels without holding logits."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from mixtron.kernels.linear_cross_entropy import linear_cross_entropy


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, split over the vocabulary, with a loss.

    The loss is computed inside `forward`, so that the layer's hooks, which wait for its weights,
    run before they are read.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_TBD: Tensor,
        weight=None,
        labels_BT=None,
        mask_BT: Any = None,
        vocab_size: int = 0,
        **options,
    ):
        """With labels and mask [1, T]: the cross-entropy summed over tokens where the mask is True,
        0-dimensional in fp32; else as Megatron's."""
        if labels_BT is None:
            return super().forward(hidden_TBD, weight=weight, **options)
        weight_VD = self.weight if weight is None else weight
        assert weight_VD is not None
        if self.sequence_parallel:
            hidden_TBD = gather_from_sequence_parallel_region(
                hidden_TBD, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            hidden_TBD = copy_to_tensor_model_parallel_region(hidden_TBD, group=self.tp_group)
        group: Any = self.tp_group
        rank, entries = group.rank(), weight_VD.shape[0]
        return linear_cross_entropy(
            hidden_TBD.squeeze(1),
            weight_VD,
            labels_BT[0] - rank * entries,
            mask_BT[0],
            used=used_entries(entries, vocab_size, rank),
            combine=self._combine if group.size() > 1 else None,
        )

    def _combine(self, lse_T: Tensor, label_logit_T: Tensor) -> tuple[Tensor, Tensor]:
        """The vocabulary's statistics from those of its slices."""
        group: Any = self.tp_group
        slices = [torch.empty_like(lse_T) for _ in range(group.size())]
        dist.all_gather(slices, lse_T, group=group)
        dist.all_reduce(label_logit_T, group=group)
        return torch.stack(slices).logsumexp(0), label_logit_T


def used_entries(entries: int, vocab_size: int, tensor_rank: int) -> int:
    """How many of a rank's `entries` of the padded vocabulary are in the true one."""
    return min(max(vocab_size - tensor_rank * entries, 0), entries)
