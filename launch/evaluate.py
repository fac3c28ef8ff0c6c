"""Loss on named validation sets."""

import dataclasses

import torch

from mixtron.launch import heartbeat
from mixtron.launch.config import RunConfig
from mixtron.launch.data import AnySample, AnyValidation
from mixtron.launch.micro_batch import collate, run_micro_batches
from mixtron.launch.signals import StopFlag
from mixtron.megatron_ext.batch import EVALUATION_STEP
from mixtron.megatron_ext.parallel import Ranks


@torch.no_grad()
def evaluate(
    wrapped: list,
    config: RunConfig,
    ranks: Ranks,
    validation: dict[str, AnyValidation],
    stop: StopFlag | None = None,
) -> dict[str, float] | None:
    """Mean loss a token of each set, or None when a signal asked to stop in the middle."""
    losses = {}
    for name, data in validation.items():
        total, count = 0.0, 0
        per_round = ranks.data_size * config.training.micro_batch_sequences
        for first in range(0, len(data), per_round):
            heartbeat.beat("evaluate")
            if stop is not None and stop.agreed(ranks.device):
                return None
            mine = first + ranks.data_rank * config.training.micro_batch_sequences
            samples = [
                _sample_or_blank(data, i)
                for i in range(mine, mine + config.training.micro_batch_sequences)
            ]
            micro = collate(samples, EVALUATION_STEP, ranks)
            totals = run_micro_batches(wrapped, config, ranks, [micro], train=False)
            loss_sum, tokens = totals.tolist()
            total, count = total + loss_sum, count + tokens
        losses[name] = total / count
    return losses


def _sample_or_blank(data: AnyValidation, index: int) -> AnySample:
    """Past the end: a sample that counts nothing, so that all ranks run the same rounds."""
    if index < len(data):
        return data.read(index)
    sample = data.read(0)
    return dataclasses.replace(sample, label_mask=sample.label_mask & False)
