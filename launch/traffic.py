"""Bytes that one rank sends in an optimizer step, by kind.

Collectives are counted as rings over n ranks: an all-gather or reduce-scatter of a tensor of S
bytes sends (n-1)/n S a rank, an all-reduce twice that, an all-to-all (n-1)/n of what the rank
holds. Left out, as a rounding error: token losses, gradient norms, replicated norm weights.
"""

from mixtron.launch.config import RunConfig
from mixtron.launch.memory import (
    element_bytes,
    layers_of_stage,
    micro_batch_tokens,
    micro_batches,
    stage_parameters,
)


def bytes_sent_per_step(config: RunConfig, world_size: int) -> dict[str, float]:
    """By kind, of the pipeline stage that sends the most; kinds that send nothing are left out."""
    stages = [stage_traffic(config, world_size, s) for s in range(config.parallel.pipeline)]
    return max(stages, key=lambda kinds: sum(kinds.values()))


def stage_traffic(config: RunConfig, world_size: int, stage: int) -> dict[str, float]:
    """By kind, of a rank of one pipeline stage."""
    count = micro_batches(config, world_size)
    kinds = {
        "tensor": count * _tensor(config, stage),
        "context": count * _context(config, stage),
        "pipeline": count * _pipeline(config, stage) + _tied_embeddings(config, stage),
        "data": _data(config, world_size, stage),
    }
    return {kind: sent for kind, sent in kinds.items() if sent}


def ring(ranks: int) -> float:
    """The part of a tensor that a ring over some ranks sends from each of them."""
    return (ranks - 1) / ranks


def _sequence_bytes(config: RunConfig) -> int:
    """A micro-batch of hidden states, of all tensor ranks together."""
    return micro_batch_tokens(config) * config.model.hidden_size * element_bytes(config)


def _tensor(config: RunConfig, stage: int) -> float:
    """All-gathers and reduce-scatters of hidden states a micro-batch; an all-reduce is two."""
    parallel = config.parallel
    layers = len(layers_of_stage(config, stage))
    # A layer's forward: both halves gather their input and scatter their output under sequence
    # parallelism, else all-reduce their output.
    forwards = 2 if config.training.recompute == "full" else 1
    # Backward: their transposes; and sequence parallelism gathers each projection's input again.
    again = 1 if parallel.sequence else 0
    exchanges = layers * (4 * forwards + 4 + 2 * again)
    if stage == 0:
        # The embedding: all-reduce forward; reduce-scatter forward and all-gather backward.
        exchanges += 2
    if stage == parallel.pipeline - 1:
        # The output layer: all-reduce of its input's gradient, or a gather and its transpose.
        exchanges += 2
    return exchanges * ring(parallel.tensor) * _sequence_bytes(config)


def _context(config: RunConfig, stage: int) -> float:
    """What the stage's mixers exchange: forward, once more when recomputed, and backward."""
    parallel = config.parallel
    if parallel.context == 1:
        return 0.0
    again = config.training.recompute == "full"
    return sum(
        (3 if again and config.mixers[name].exchanges_again else 2)
        * config.mixers[name].context_bytes_sent(
            micro_batch_tokens(config),
            parallel.tensor,
            parallel.context,
            element_bytes(config),
            config.data.sequence_length,
        )
        for name in layers_of_stage(config, stage)
    )


def _pipeline(config: RunConfig, stage: int) -> float:
    """Hidden states to the next chunk of layers, their gradients to the one before."""
    parallel = config.parallel
    if parallel.pipeline == 1:
        return 0.0
    chunks = parallel.virtual_pipeline
    forward = chunks - (stage == parallel.pipeline - 1)
    backward = chunks - (stage == 0)
    split = parallel.tensor if parallel.sequence else 1
    return (forward + backward) * _sequence_bytes(config) / split


def _tied_embeddings(config: RunConfig, stage: int) -> float:
    """All-reduce of the embedding's fp32 gradient between the first and the last stage."""
    model, parallel = config.model, config.parallel
    if not model.tied_embeddings or parallel.pipeline == 1:
        return 0.0
    if stage not in (0, parallel.pipeline - 1):
        return 0.0
    return 4 * model.padded_vocab_size * model.hidden_size / parallel.tensor


def _data(config: RunConfig, world_size: int, stage: int) -> float:
    """Gradients and updated weights over all ranks that hold the same parameters (data x context).

    Once a step: a reduce-scatter of fp32 gradients and an all-gather of weights.
    """
    replicas = world_size // (config.parallel.tensor * config.parallel.pipeline)
    held, element = stage_parameters(config, stage), element_bytes(config)
    if config.zero is None:
        return held * (4 + element) * ring(replicas)
    count = micro_batches(config, world_size)
    if config.zero.zero_stage == 3:
        # Weights are gathered forward and backward, gradients scattered after each micro-batch.
        forwards = 2 if config.training.recompute == "full" else 1
        return count * held * (4 + (1 + forwards) * element) * ring(replicas)
    # ZeRO all-reduces gradients: at stage 2 those of each micro-batch.
    reductions = count if config.zero.zero_stage == 2 else 1
    return held * (reductions * 8 + element) * ring(replicas)
