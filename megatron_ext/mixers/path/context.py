"""The keys of earlier context ranks, carried to this rank's first token."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mixtron.kernels.path_attention import PastKeys, Segment, past_with
from mixtron.megatron_ext.context_parallel import gather


def past_of_ranks_before(
    segment: Segment, v_BTGV: Tensor, group: dist.ProcessGroup
) -> tuple[PastKeys | None, Tensor]:
    """The past of this rank's queries (None on the first rank), and its own values.

    Every rank sends its keys carried to the end of its tokens, its composed map and its gates in
    one fp32 message, its values in another. The values are returned because every rank's backward
    takes part in the exchange, also that of a rank that uses nothing of it.
    """
    tensors = {name: x for name, x in vars(segment).items() if x is not None}
    sizes = [x.numel() for x in tensors.values()]
    flat = torch.cat([x.reshape(-1) for x in tensors.values()])
    gathered, values = gather(flat, group), gather(v_BTGV[0], group)
    past = None
    for before in range(group.rank()):
        parts = zip(tensors.items(), gathered[before].split(sizes), strict=True)
        theirs = replace(segment, **{name: part.view_as(x) for (name, x), part in parts})
        past = past_with(past, theirs, values[before][None])
    unused = 0 * (gathered[group.rank()].sum() + values[group.rank()].sum())
    return past, v_BTGV + unused.to(v_BTGV.dtype)
