"""Faults that the contract must catch, put into the code under test for the length of a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear

from mixtron.launch import micro_batch
from mixtron.megatron_ext import model, parameters, projections
from mixtron.megatron_ext.batch import make_batch
from mixtron.megatron_ext.mixers import mixer_module


@contextmanager
def injected(fault: str | None) -> Iterator[None]:
    """The code under test with one of `FAULTS` in it; None leaves it as it is."""
    if fault is None:
        yield
        return
    with FAULTS[fault]():
        yield


def _replaced_mixers(breakage):
    """Every mixer class goes through `breakage`, which returns a subclass."""
    return mock.patch.object(model, "mixer_module", lambda name: breakage(mixer_module(name)))


def partial_replicated_gradient():
    """A parameter used by each rank's own heads, whose gradient nobody sums."""
    keep = staticmethod(lambda ctx, *grads: (None, *grads))
    return mock.patch.object(parameters._SumGradients, "backward", keep)


def document_leak():
    """A mixer that takes the whole stream for one document."""

    def breakage(mixer):
        class Leaky(mixer):
            def forward(self, hidden_TBD, *, packed_seq_params, **kwargs):
                batch = packed_seq_params
                whole = make_batch(
                    [sum(batch.lengths)],
                    step=batch.step,
                    device=batch.position_ids.device,
                    context_rank=batch.context_rank,
                    context_size=batch.context_size,
                )
                return super().forward(hidden_TBD, packed_seq_params=whole, **kwargs)

        return Leaky

    return _replaced_mixers(breakage)


def unmarked_shard():
    """A mixer whose tensor-parallel shards Megatron takes for replicas."""

    def breakage(mixer):
        class Unmarked(mixer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                for parameter in self.parameters():
                    parameter.tensor_model_parallel = False

        return Unmarked

    return _replaced_mixers(breakage)


def mean_of_means():
    """A loss averaged over each micro-batch before they are averaged."""

    def mean(mask_BT, summed):
        loss, count, report = plain(mask_BT, summed)
        return loss / count, torch.ones_like(count), report

    plain = micro_batch._reported
    return mock.patch.object(micro_batch, "_reported", mean)


def own_initial_weights():
    """Every tensor-parallel rank draws numbers of its own."""

    def initialise(named, seed, tensor_rank, tensor_size):
        parameters.initialise(named, seed + tensor_rank, tensor_rank, tensor_size)

    return mock.patch.object(model, "initialise", initialise)


def fused_checkpoint_key():
    """A fused projection stored as one matrix: its rows are in another order at another TP."""
    return mock.patch.object(
        projections.FusedColumnParallel,
        "sharded_state_dict",
        ColumnParallelLinear.sharded_state_dict,
    )


FAULTS = {
    "partial replicated gradient": partial_replicated_gradient,
    "document leak": document_leak,
    "unmarked shard": unmarked_shard,
    "mean of means": mean_of_means,
    "rank's own initial weights": own_initial_weights,
    "fused checkpoint key": fused_checkpoint_key,
}
