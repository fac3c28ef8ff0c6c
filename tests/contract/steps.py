"""What a rank does in the contract: the shipped code, and what is read off it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mixtron.launch.checkpoint import load_checkpoint, load_weights, save_checkpoint
from mixtron.launch.config import RunConfig
from mixtron.launch.data import Sample
from mixtron.launch.micro_batch import MicroBatch, collate, run_micro_batches
from mixtron.megatron_ext.model import build_model, forward, global_parameters
from mixtron.megatron_ext.optimizer import build_optimizer, clip_and_step, wrap_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel
from tests.contract.cases import ONE_RANK, Case, Layout
from tests.contract.faults import injected


@dataclass
class Shard:
    """What one rank holds of one parameter."""

    tensor_dim: int | None
    components: dict[str, int]
    used_rows: int | None
    value: Tensor
    gradient: Tensor | None = None


@dataclass
class RankResult:
    """What one rank saw of one optimizer step."""

    tensor_rank: int
    tensor_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    logits: list[Tensor]
    """[T/cp, V] for each of this rank's micro-batches; empty but on the last pipeline stage."""
    input_gradients: list[Tensor]
    """Of the embedding's output, [local T, D]; empty but on the first pipeline stage."""
    loss: float
    """Mean over all valid tokens of all ranks."""
    shards: dict[str, Shard]
    """By global name; values are the initial ones."""
    gradient_norm: float
    clipped_norm: float


@dataclass
class Model:
    """One rank's model under test."""

    config: RunConfig
    ranks: Ranks
    wrapped: list
    optimizer: object

    def parameters(self) -> Iterator[tuple[str, Any]]:
        for chunk in self.wrapped:
            yield from global_parameters(chunk.module)

    def shards(self) -> dict[str, Shard]:
        return {
            name: Shard(
                p.declaration.tensor_dim,
                p.declaration.components,
                p.declaration.used_rows,
                p.detach().clone(),
            )
            for name, p in self.parameters()
        }


def build(case: Case, layout: Layout, seed: int = 3) -> Model:
    config, parallel = case.config(layout), layout.parallel
    ranks = init_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        seed=1,
        device=init_distributed(),
    )
    chunks = build_model(
        config.model,
        config.mixers,
        parallel,
        ranks,
        seed=seed,
        bf16=False,
        recompute=layout.recompute,
        recomputed=layout.recomputed,  # type: ignore[arg-type]
        max_tokens=max(map(sum, case.documents)) * layout.sequences_per_micro_batch,
    )
    wrapped = wrap_model(chunks, parallel, ranks)
    optimizer = build_optimizer(wrapped, config.optimizer, ranks, bf16=False)
    return Model(config, ranks, wrapped, optimizer)


def micro_batches(case: Case, layout: Layout, model: Model) -> list[MicroBatch]:
    """This rank's share of the case's sequences, as the training loop deals them out."""
    samples, per_micro = (
        case.samples(model.config.model.vocab_size),
        layout.sequences_per_micro_batch,
    )
    ranks = model.ranks
    first = range(ranks.data_rank * per_micro, len(samples), ranks.data_size * per_micro)
    return [collate(samples[i : i + per_micro], 1, ranks) for i in first]


def step(case: Case, layout: Layout) -> RankResult:
    """One optimizer step."""
    with injected(case.fault):
        model = build(case, layout)
        batches = micro_batches(case, layout, model)
        shards = model.shards()
        logits = run_logits(model, batches)
        input_gradients = record_input_gradients(model)
        loss_sum, tokens = accumulate_gradients(model, batches)
        for name, parameter in model.parameters():
            shards[name].gradient = parameter.main_grad.detach().clone()
        clip = model.config.optimizer.clip_grad_norm
        norm, _ = clip_and_step(model.optimizer, clip)  # type: ignore[arg-type]
        ranks = model.ranks
        return RankResult(
            ranks.tensor_rank,
            ranks.tensor_size,
            ranks.context_rank,
            ranks.context_size,
            ranks.data_rank,
            ranks.data_size,
            logits,
            input_gradients,
            loss_sum / tokens,
            shards,
            norm,
            float(model.optimizer.get_grad_norm()),  # type: ignore[attr-defined]
        )


def trained_weights(case: Case, layout: Layout, steps: int) -> dict[str, Shard]:
    """The parameters after some optimizer steps on the same sequences."""
    with injected(case.fault):
        model = build(case, layout)
        batches = micro_batches(case, layout, model)
        for _ in range(steps):
            accumulate_gradients(model, batches)
            clip_and_step(model.optimizer, model.config.optimizer.clip_grad_norm)  # type: ignore[arg-type]
        return model.shards()


def logits_of_streams(
    case: Case, layout: Layout, streams: list[tuple[np.ndarray, tuple[int, ...]]]
) -> list[Tensor]:
    """Logits [T/cp, V] of each stream, given as tokens [T] and its documents' lengths."""
    with injected(case.fault):
        model = build(case, layout)
        result = []
        for tokens, lengths in streams:
            starts = np.cumsum([0, *lengths[:-1]])
            sample = Sample(np.append(tokens, 0), starts, np.ones(len(tokens), dtype=bool))
            result += run_logits(model, [collate([sample], 1, model.ranks)])
        return result


def saved_and_loaded(
    case: Case, layout: Layout, source: Path | None, folder: Path, number: int
) -> tuple[Path, dict[str, Shard], list[Tensor]]:
    """Loads the weights of checkpoint `source` (None: trains a step instead), saves a checkpoint.

    Returns:
        The new checkpoint, the weights in it and their logits.
    """
    with injected(case.fault):
        model = build(case, layout, seed=number)
        batches = micro_batches(case, layout, model)
        if source is None:
            accumulate_gradients(model, batches)
            clip_and_step(model.optimizer, 0.0)  # type: ignore[arg-type]
        else:
            load_weights(source, model.wrapped, model.ranks)
        report = save_checkpoint(
            folder,
            number,
            model.wrapped,
            model.optimizer,  # type: ignore[arg-type]
            model.ranks,
            state={},
            config={},
        )
        return report.path, model.shards(), run_logits(model, batches)


def losses_of_steps(case: Case, steps: int) -> list[float]:
    """The loss in each step on one rank."""
    with injected(case.fault):
        model = build(case, ONE_RANK)
        batches = micro_batches(case, ONE_RANK, model)
        losses = []
        for _ in range(steps):
            loss_sum, tokens = accumulate_gradients(model, batches)
            clip_and_step(model.optimizer, model.config.optimizer.clip_grad_norm)  # type: ignore
            losses.append(loss_sum / tokens)
        return losses


def resumed_step(
    case: Case, layout: Layout, source: Path | None, folder: Path, number: int
) -> tuple[Path, float, dict[str, Shard]]:
    """Optimizer step `number` from checkpoint `source` (None: the first), then a checkpoint.

    Returns:
        The new checkpoint, the loss in the step and the weights after it.
    """
    with injected(case.fault):
        model = build(case, layout, seed=3 if source is None else 3 + number)
        optimizer: Any = model.optimizer
        if source is not None:
            load_checkpoint(source, model.wrapped, optimizer, model.ranks)
        batches = micro_batches(case, layout, model)
        loss_sum, tokens = accumulate_gradients(model, batches)
        clip_and_step(optimizer, model.config.optimizer.clip_grad_norm)
        parts = (model.wrapped, optimizer, model.ranks)
        report = save_checkpoint(folder, number, *parts, state={}, config={})
        return report.path, loss_sum / tokens, model.shards()


def run_logits(model: Model, batches: list[MicroBatch]) -> list[Tensor]:
    """Forward alone through the pipeline; empty but on the last stage."""
    logits = []

    def forward_step(iterator, chunk):
        micro = next(iterator)
        output = forward(chunk, model.config.model, model.ranks, micro.tokens_BT, micro.batch)
        return output, collect

    def collect(logits_BTV):
        logits.append(logits_BTV[0].detach().clone())
        return logits_BTV.sum(), torch.tensor(1, dtype=torch.int), None

    iterators = [iter(batches) for _ in model.wrapped]
    tokens = model.ranks.context_size * batches[0].tokens_BT.shape[1]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model.wrapped,
        num_microbatches=len(batches),
        seq_length=tokens,
        micro_batch_size=1,
        decoder_seq_length=tokens,
        forward_only=True,
    )
    return logits


def record_input_gradients(model: Model) -> list[Tensor]:
    """A list that the next backward fills, in the order of the micro-batches."""
    gradients = []

    def watch(module, inputs, output):
        output.register_hook(lambda grad: gradients.append(grad[:, 0].clone()))

    for chunk in model.wrapped:
        if chunk.module.pre_process:
            chunk.module.embedding.register_forward_hook(watch)
    return gradients


def accumulate_gradients(model: Model, batches: list[MicroBatch]) -> tuple[float, int]:
    """Forward and backward; afterwards `main_grad` is whole, not only in this data rank's shard."""
    for chunk in model.wrapped:
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()  # type: ignore[attr-defined]
    totals = run_micro_batches(model.wrapped, model.config, model.ranks, batches, train=True)
    loss_sum, tokens = totals.tolist()
    for chunk in model.wrapped:
        for bucket_group in chunk.bucket_groups:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    return loss_sum, int(tokens)
