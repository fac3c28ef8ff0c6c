"""Numbers that layers report of a step beside the loss, for TensorBoard and metrics.jsonl."""

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mixtron.megatron_ext.host_copy import HostCopy


class Scalars:
    """Means by name over everything that layers add in a step; of one rank until `means`."""

    def __init__(self):
        self._totals: dict[tuple[str, ...], tuple[Tensor, Tensor | int]] = {}
        self._reduced: HostCopy | None = None

    def add(self, names: tuple[str, ...], sums: Tensor, counts: Tensor | int) -> None:
        """Adds to each named mean: the sum over some items, and how many they are, [names] each.

        All ranks of a pipeline stage add the same names in the same order. A count that the host
        knows stays there: copied to the device in every layer, it would wait for the device.
        """
        sums = sums.detach().double()
        if names in self._totals:
            earlier_sums, earlier_counts = self._totals[names]
            sums, counts = earlier_sums + sums, earlier_counts + counts
        self._totals[names] = sums, counts

    def add_mean(self, name: str, values: Tensor) -> None:
        """Adds every element of `values` to one named mean."""
        total = values.detach().sum(dtype=torch.float64)
        self.add((name,), total[None], values.numel())

    def add_all(self, other: "Scalars") -> None:
        """Adds what another has; it may change afterwards."""
        if not other._totals:
            return
        counts = [count for _, count in other._totals.values()]
        sums = torch.cat([sums for sums, _ in other._totals.values()])
        parts = sums.split([len(names) for names in other._totals])
        for names, part, count in zip(other._totals, parts, counts, strict=True):
            self.add(names, part, count.clone() if isinstance(count, Tensor) else count)

    def reduce(self, groups: ProcessGroupCollection) -> None:
        """Launches the sums over ranks, before the step waits for the device. All ranks call it."""
        if self._totals:
            sums = torch.cat([sums for sums, _ in self._totals.values()])
            reduced = torch.stack([sums, self._counts()])
            dist.all_reduce(reduced, group=groups.tp)
            dist.all_reduce(reduced, group=groups.dp_cp)
            self._reduced = HostCopy(reduced)

    def means(self, groups: ProcessGroupCollection) -> dict[str, float]:
        """Over all ranks, and known to all; names without items are left out. All ranks call it,
        after `reduce`."""
        found: dict[str, float] = {}
        if self._reduced is not None:
            names = (name for key in self._totals for name in key)
            found = {n: s / c for n, s, c in zip(names, *self._reduced.tolist(), strict=True) if c}
        if groups.pp.size() > 1:
            stages: list = [None] * groups.pp.size()
            dist.all_gather_object(stages, found, group=groups.pp)
            found = {name: mean for stage in stages for name, mean in stage.items()}
        return found

    def _counts(self) -> Tensor:
        """Of all names, fp64; those of the host in one copy."""
        sums, counts = zip(*self._totals.values(), strict=True)
        known = [
            0 if isinstance(n, Tensor) else n for s, n in zip(sums, counts, strict=True) for _ in s
        ]
        found = torch.tensor(known, dtype=torch.float64).to(sums[0].device, non_blocking=True)
        for own, n in zip(found.split([len(s) for s in sums]), counts, strict=True):
            if isinstance(n, Tensor):
                own.copy_(n)
        return found
