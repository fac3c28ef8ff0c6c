"""Numbers that layers report of a step beside the loss, for TensorBoard and metrics.jsonl."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


class Scalars:
    """Means by name over everything that layers add in a step; of one rank until `means`."""

    def __init__(self):
        self._totals: dict[tuple[str, ...], Tensor] = {}

    def add(self, names: tuple[str, ...], sums: Tensor, counts: Tensor) -> None:
        """Adds to each named mean: the sum over some items, and how many they are, [names] each.

        All ranks of a pipeline stage add the same names in the same order.
        """
        added = torch.stack([sums.detach().double(), counts.double()])
        self._totals[names] = self._totals[names] + added if names in self._totals else added

    def add_mean(self, name: str, values: Tensor) -> None:
        """Adds every element of `values` to one named mean."""
        count = torch.tensor([values.numel()], device=values.device)
        self.add((name,), values.detach().sum(dtype=torch.float64)[None], count)

    def means(self, groups: ProcessGroupCollection) -> dict[str, float]:
        """Over all ranks, and known to all; names without items are left out. All ranks call it."""
        found: dict[str, float] = {}
        if self._totals:
            totals = torch.cat(list(self._totals.values()), dim=1)
            dist.all_reduce(totals, group=groups.tp)
            dist.all_reduce(totals, group=groups.dp_cp)
            names = (name for key in self._totals for name in key)
            found = {n: s / c for n, s, c in zip(names, *totals.tolist(), strict=True) if c}
        if groups.pp.size() > 1:
            stages: list = [None] * groups.pp.size()
            dist.all_gather_object(stages, found, group=groups.pp)
            found = {name: mean for stage in stages for name, mean in stage.items()}
        return found
