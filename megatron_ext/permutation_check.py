"""Debug mode: the permutations that stochastic mixers draw are the same on all ranks that must."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixtron.megatron_ext.mixers.stochastic.module import Mixer
from mixtron.megatron_ext.parallel import Ranks


class PermutationMismatch(Exception):
    """Ranks that hold parts of the same layer and tokens would attend differently."""

    exit_code = 1


def compare_permutations(chunks: Iterable[nn.Module], ranks: Ranks) -> None:
    """From now on each layer compares every permutation that it draws, before it is used.

    Tensor and context ranks must draw the same for every micro-batch; data ranks, whose documents
    differ, for a document of one length. A forward then raises PermutationMismatch on every rank
    that sees a difference, naming the layer and the ranks.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Mixer):
                module.on_draw = partial(_compare, ranks)


def _compare(ranks: Ranks, layer_number: int, hashes_2: Tensor) -> None:
    everywhere, of_documents = hashes_2[1:], hashes_2
    for kind, group, mine in (
        ("data-parallel", ranks.groups.dp_cp, everywhere),
        ("tensor-parallel", ranks.groups.tp, of_documents),
        ("context-parallel", ranks.groups.cp, of_documents),
    ):
        hashes = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(hashes, mine.contiguous(), group=group)
        different = [i for i, other in enumerate(hashes) if not torch.equal(other, hashes[0])]
        if different:
            raise PermutationMismatch(
                f"layer {layer_number}: {kind} ranks {different} draw other permutations than "
                "rank 0 of their group; their seed, step or documents differ"
            )
