"""A rank's GPU memory at the peak of a training step, predicted part by part.

What `torch.cuda.max_memory_allocated` reports. The CUDA context, NCCL's buffers and what the
allocator holds without using it come on top.
"""

import math

from mixtron.launch.config import RunConfig
from mixtron.launch.estimate import NORM_PARAMETERS

ZERO_MAX_LIVE = 1_000_000_000
"""DeepSpeed's default for `stage3_max_live_parameters`."""
CHUNK_LOGITS = 2**27
"""Of kernels/linear_cross_entropy/op.py, which imports torch."""
MASK_BYTES = 1
"""Of a dropout mask, an element."""


def memory_per_rank(config: RunConfig, world_size: int) -> dict[str, float]:
    """Bytes by part, of the pipeline stage that needs the most. They sum to the peak."""
    stages = [stage_memory(config, world_size, s) for s in range(config.parallel.pipeline)]
    return max(stages, key=lambda parts: sum(parts.values()))


def stage_memory(config: RunConfig, world_size: int, stage: int) -> dict[str, float]:
    """Bytes by part of a rank of one pipeline stage."""
    parallel = config.parallel
    held = stage_parameters(config, stage)
    # The optimizer's state is spread over all ranks that hold the same parameters.
    owned = held / (world_size // (parallel.tensor * parallel.pipeline))
    activations = _activations(config, world_size, stage)
    return {
        **(zero_states if config.zero else _model_states)(config, held, owned),
        "activations": activations,
        "temporary": max(_loss(config, stage), _layer_backward(config, stage))
        + _gathered_sequence(config),
    }


def _model_states(config: RunConfig, held: float, owned: float) -> dict[str, float]:
    return {
        "weights": held * element_bytes(config),
        "gradients": held * 4,  # one contiguous fp32 buffer
        # fp32 weights are their own main copy.
        "optimizer": owned * (8 if config.training.precision == "fp32" else 12),
    }


def zero_states(config: RunConfig, held: float, owned: float) -> dict[str, float]:
    """The same under ZeRO, at most: stage 3 need not hold `max_live` parameters at once."""
    zero = config.zero
    assert zero is not None
    element, stage, offloaded = element_bytes(config), zero.zero_stage, zero.offload != "none"
    max_live = zero.zero_optimization.stage3_max_live_parameters or ZERO_MAX_LIVE
    weights = held if stage < 3 else min(held, max_live)
    if stage == 3 and zero.offload != "optimizer+weights":
        weights += owned
    # Stage 1 sums over micro-batches beside every parameter, then into this rank's part. The part
    # is on the GPU with an offloaded optimizer as well, but at stage 3.
    gradients = owned if stage > 1 else held + owned
    # Stages 1 and 2 hold fp32 weights a second time.
    optimizer = owned * (8 if config.training.precision == "fp32" and stage == 3 else 12)
    bucket, buffers = zero.zero_optimization.reduce_bucket_size, 2 if config.parallel.overlap else 1
    if offloaded and bucket >= held:
        # All is reduced at the end of backward; the next one begins before the host has it.
        buffers *= 2
    # Gradients pass to the host through room for the largest.
    passing = element * _largest_parameter(config) if offloaded and stage < 3 else 0.0
    return {
        "weights": weights * element,
        "gradients": 0.0 if offloaded and stage == 3 else gradients * 4,
        "optimizer": 0.0 if offloaded else optimizer,
        "gradient buckets": buffers * 4.0 * bucket + passing,
    }


def _largest_parameter(config: RunConfig) -> float:
    """Elements: of the embedding or of an MLP's fused projection."""
    model = config.model
    rows = max(model.padded_vocab_size, (model.mlp_matrices - 1) * model.ffn_hidden_size)
    return rows * model.hidden_size / config.parallel.tensor


def host_memory(config: RunConfig, world_size: int) -> dict[str, float]:
    """Bytes by part that ZeRO holds in host memory for a rank; empty where nothing is offloaded."""
    zero = config.zero
    if zero is None or zero.offload == "none":
        return {}
    owned = stage_parameters(config, 0) / (world_size // config.parallel.tensor)

    def transferred(size: float) -> float:
        """torch rounds pinned memory up to a power of two."""
        return 2.0 ** math.ceil(math.log2(size)) if zero.pin_memory else size

    parts = {"optimizer": 12 * owned, "gradients": transferred(4 * owned)}
    if zero.zero_stage == 3:
        parts["gradients"] *= 2  # collected in one buffer, and stepped from another
    else:
        parts["optimizer"] = transferred(4 * owned) + 8 * owned
    if zero.zero_stage < 3 or zero.offload == "optimizer+weights":
        parts["weights"] = transferred(element_bytes(config) * owned)
    return parts


def element_bytes(config: RunConfig) -> int:
    """Of weights and activations."""
    return 4 if config.training.precision == "fp32" else 2


def micro_batch_tokens(config: RunConfig) -> int:
    """Tokens of a micro-batch on one context rank."""
    tokens = config.training.micro_batch_sequences * config.data.sequence_length
    return tokens // config.parallel.context


def micro_batches(config: RunConfig, world_size: int) -> int:
    """Micro-batches that one rank works through in a step."""
    data_ranks = world_size // config.parallel.model_ranks
    return config.global_batch_sequences // (data_ranks * config.training.micro_batch_sequences)


def layers_of_stage(config: RunConfig, stage: int) -> list[str]:
    """The mixers of the layers on one pipeline rank, chunk after chunk."""
    parallel, mixers = config.parallel, config.model.layer_mixers
    size = len(mixers) // (parallel.pipeline * parallel.virtual_pipeline)
    starts = range(stage * size, len(mixers), parallel.pipeline * size)
    return [name for start in starts for name in mixers[start : start + size]]


def stage_parameters(config: RunConfig, stage: int) -> float:
    """Parameters on one rank of a stage. What mixers replicate over tensor ranks counts as split:
    norms of a head's width, a rounding error."""
    model, parallel = config.model, config.parallel
    width = model.hidden_size
    layers = layers_of_stage(config, stage)
    split = sum(sum(config.mixers[name].parameters(width).values()) for name in layers)
    split += len(layers) * model.mlp_parameters
    vocabulary = model.padded_vocab_size * width
    first, last = stage == 0, stage == parallel.pipeline - 1
    split += vocabulary * first
    # Tied embeddings are held a second time where the first stage is not the last.
    split += vocabulary * (last and not (first and model.tied_embeddings))
    norms = NORM_PARAMETERS[model.norm] * (2 * len(layers) + last) * width
    return split / parallel.tensor + norms


def _activations(config: RunConfig, world_size: int, stage: int) -> float:
    """What waits for backward at the moment when the most does."""
    layers = layers_of_stage(config, stage)
    if config.training.recompute == "full":
        per_token = len(layers) * _residual_bytes(config)
    else:
        per_token = sum(_layer_bytes(config, name) for name in layers)
    per_token *= _passes_in_flight(config, world_size, stage)
    if config.training.layer_graphs:
        # A recorded layer writes its input's gradient where the one before it reads it.
        per_token += len(layers) * _residual_bytes(config)
    if stage == config.parallel.pipeline - 1:
        # The final norm's input, and in place of its output, which the loss takes of the whole
        # sequence, its gradient.
        per_token += _norm_bytes(config) - _residual_bytes(config)
        per_token += config.model.hidden_size * element_bytes(config)
    if stage == 0 and config.model.dropout > 0:
        per_token += _residual_bytes(config) / element_bytes(config) * MASK_BYTES
    return per_token * micro_batch_tokens(config)


def _passes_in_flight(config: RunConfig, world_size: int, stage: int) -> float:
    """Forward passes through all of the stage's layers whose backward has not begun.

    1F1B runs as many ahead as there are stages behind this one; the interleaved schedule more, in
    passes of one chunk.
    """
    parallel, count = config.parallel, micro_batches(config, world_size)
    behind = parallel.pipeline - stage
    chunks = parallel.virtual_pipeline
    if chunks == 1:
        return min(behind, count)
    return min(2 * (behind - 1) + (chunks - 1) * parallel.pipeline + 1, count * chunks) / chunks


def _residual_bytes(config: RunConfig) -> float:
    """A token of the residual stream; sequence parallelism splits it over tensor ranks."""
    split = config.parallel.tensor if config.parallel.sequence else 1
    return config.model.hidden_size * element_bytes(config) / split


def _norm_bytes(config: RunConfig) -> float:
    """A norm's input, and its output as the next projection's input, a token."""
    return (1 if config.model.norm == "none" else 2) * _residual_bytes(config)


def _context_shape(config: RunConfig) -> tuple[int, int, int, int, int]:
    """The arguments of a mixer's methods that are about context ranks."""
    parallel, tokens = config.parallel, micro_batch_tokens(config)
    length = config.data.sequence_length
    return tokens, parallel.tensor, parallel.context, element_bytes(config), length


def _layer_bytes(config: RunConfig, name: str) -> float:
    """What autograd keeps of one layer, a token."""
    model, element = config.model, element_bytes(config)
    tensor, residual = config.parallel.tensor, _residual_bytes(config)
    recomputed = config.training.recomputed
    kept = 2 * (residual if "norm" in recomputed else _norm_bytes(config))
    if model.dropout > 0:
        kept += 2 * residual / element * MASK_BYTES
    mixer = config.mixers[name]
    kept += mixer.activation_bytes_per_token(model.hidden_size, tensor, element)
    if "conv" in recomputed:
        kept -= mixer.convolution_bytes_per_token(tensor, element)
    if "gate" in recomputed:
        kept -= mixer.gated_bytes_per_token(element)
    if config.parallel.context > 1:
        kept += mixer.context_bytes_kept(*_context_shape(config)) / micro_batch_tokens(config)
    return kept + _mlp_bytes(config)


def _mlp_bytes(config: RunConfig) -> float:
    """SwiGLU's input, two halves, and its output unless it is computed again, a token."""
    matrices = config.model.mlp_matrices - ("mlp_act" in config.training.recomputed)
    kept = matrices * config.model.ffn_hidden_size
    return kept * element_bytes(config) / config.parallel.tensor


def _layer_backward(config: RunConfig, stage: int) -> float:
    """What the backward of one layer needs beside what is kept; with recomputation, all of it."""
    model, tensor = config.model, config.parallel.tensor
    tokens, element = micro_batch_tokens(config), element_bytes(config)
    # Gradients of the residual stream and of SwiGLU's input and output, which is gone itself.
    mlp = tokens * (_residual_bytes(config) + 2 * model.ffn_hidden_size * element / tensor)
    recomputed, normed = config.training.recomputed, tokens * _residual_bytes(config)
    # A product writes its factor over the factor's gradient; where layers are split it does not.
    again = normed if "norm" in recomputed and tensor > 1 else 0.0
    mlp += again
    if "mlp_act" in recomputed:
        mlp += tokens * model.ffn_hidden_size * element / tensor
    # The mixer's turn comes when what the MLP and its norm kept is gone.
    gone = tokens * _mlp_bytes(config) + (0.0 if "norm" in recomputed else normed)
    needs = []
    for name in dict.fromkeys(layers_of_stage(config, stage)):
        mixer = config.mixers[name]
        working = mixer.working_bytes(model.hidden_size, tokens, tensor, element)
        if config.parallel.context > 1:
            working += mixer.context_bytes_needed(*_context_shape(config))
        if "conv" in recomputed:
            working += tokens * mixer.convolution_bytes_per_token(tensor, element)
        if "gate" in recomputed:
            working += tokens * mixer.gated_bytes_per_token(element)
        need = max(mlp, working + again - gone)
        if config.training.recompute == "full":
            need += tokens * _layer_bytes(config, name)
        needs.append(need)
    return max(needs)


def chunk_logit_bytes(config: RunConfig) -> float:
    """Logits that the loss holds at once."""
    entries = config.model.padded_vocab_size / config.parallel.tensor
    tokens = min(micro_batch_tokens(config), max(128, CHUNK_LOGITS // entries // 128 * 128))
    return tokens * entries * element_bytes(config)


def _loss(config: RunConfig, stage: int) -> float:
    """The loss on the last stage: a chunk's logits, the weight's gradient, and the hidden states
    beside theirs. Gone when the layers' backward begins."""
    if stage != config.parallel.pipeline - 1:
        return 0.0
    hidden = micro_batch_tokens(config) * config.model.hidden_size * element_bytes(config)
    return chunk_logit_bytes(config) + head_gradient_bytes(config) + hidden


def head_gradient_bytes(config: RunConfig) -> float:
    """The output layer's gradient, which its forward computes, in fp32."""
    model = config.model
    return 4 * model.padded_vocab_size * model.hidden_size / config.parallel.tensor


def _gathered_sequence(config: RunConfig) -> float:
    """Megatron's one buffer for gathering a projection's input under sequence parallelism."""
    if not config.parallel.sequence:
        return 0.0
    return micro_batch_tokens(config) * config.model.hidden_size * element_bytes(config)
