"""From samples to what one rank feeds the model, and one pass of a list of micro-batches."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mixtron.launch.config import RunConfig
from mixtron.launch.data import AnySample
from mixtron.megatron_ext.batch import Batch, make_batch, sent
from mixtron.megatron_ext.deepspeed_engine import ZeroModel
from mixtron.megatron_ext.model import forward
from mixtron.megatron_ext.parallel import Ranks
from mixtron.megatron_ext.scalars import Scalars


@dataclass(frozen=True)
class MicroBatch:
    tokens_BT: Tensor
    """[1, T/cp] int64: this context rank's share of the flattened stream."""
    labels_BT: Tensor
    mask_BT: Tensor
    """[1, T/cp] bool: whether the label counts."""
    batch: Batch


def collate(
    samples: list[AnySample], step: int, ranks: Ranks, scalars: Scalars | None = None
) -> MicroBatch:
    """Flattens samples to one stream, in which each sample also begins a document.

    Into `scalars` the layers report; tokens whose label counts are told apart from the others.
    """
    sequence = samples[0].inputs.size
    lengths = [
        int(length)
        for sample in samples
        for length in np.diff(np.append(sample.document_starts, sequence))
    ]
    batch = make_batch(
        lengths,
        step=step,
        device=ranks.device,
        sequences=len(samples),
        context_rank=ranks.context_rank,
        context_size=ranks.context_size,
    )
    share = len(samples) * sequence // ranks.context_size
    mine = slice(ranks.context_rank * share, (ranks.context_rank + 1) * share)

    def local(arrays: Iterable[np.ndarray]) -> Tensor:
        return sent(torch.from_numpy(np.concatenate(list(arrays))[mine])[None], ranks.device)

    mask_BT = local(s.label_mask for s in samples)
    if scalars is not None:
        batch.scalars = scalars
        batch.token_kinds = {"scored": mask_BT[0], "unscored": ~mask_BT[0]}
    return MicroBatch(
        tokens_BT=local(s.inputs for s in samples),
        labels_BT=local(s.labels for s in samples),
        mask_BT=mask_BT,
        batch=batch,
    )


def run_micro_batches(
    wrapped: list, config: RunConfig, ranks: Ranks, micro_batches: list[MicroBatch], *, train: bool
) -> Tensor:
    """Forward (and backward when training) of this rank's micro-batches through the pipeline.

    Returns:
        [2] fp64 on the device, which may still be at work: the loss summed over valid tokens and
        their number, over all ranks; equal on every rank.
    """
    for chunk in wrapped:
        if chunk.training != train:  # it goes through every module, while the GPU waits
            chunk.train(train)
    tokens = ranks.context_size * micro_batches[0].tokens_BT.shape[1]

    def forward_step(iterator, chunk):
        micro = next(iterator)
        scored = micro.labels_BT, micro.mask_BT
        output = forward(chunk, config.model, ranks, micro.tokens_BT, micro.batch, *scored)
        return output, partial(_reported, micro.mask_BT)

    iterators = [iter(micro_batches) for _ in wrapped]
    if train and isinstance(wrapped[0], ZeroModel):
        results = wrapped[0].run_micro_batches(forward_step, micro_batches, ranks)
    else:
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(wrapped) > 1 else iterators[0],
            model=wrapped,
            num_microbatches=len(micro_batches),
            seq_length=tokens,
            micro_batch_size=1,
            decoder_seq_length=tokens,
            forward_only=not train,
        )
    totals = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for result in results:  # empty but on the last pipeline stage
        totals += result
    dist.all_reduce(totals, group=ranks.groups.dp_cp)
    dist.all_reduce(totals, group=ranks.groups.pp)
    return totals


def _reported(mask_BT: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The form that Megatron's schedule takes: loss to differentiate, tokens, what to report."""
    count = mask_BT.sum().to(torch.int)
    return loss, count, torch.stack([loss.detach().double(), count.double()])
