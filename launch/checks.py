"""Refusals that need no GPU and no process group: does this config fit this many ranks?"""

from mixtron.launch.config import RunConfig
from mixtron.launch.config_sections import DataConfig
from mixtron.megatron_ext.errors import ConfigError


def check(config: RunConfig, world_size: int, *, packed: bool | None = None) -> None:
    """Raises ConfigError, naming the key and the values that would work.

    Args:
        packed: whether the lengths of documents change from batch to batch; None: those of a corpus
            do, those of a synthetic task do not.
    """
    check_shape(config)
    if isinstance(config.data, DataConfig) if packed is None else packed:
        check_recorded_lengths(config)
    check_schedule(config)
    parallel = config.parallel
    if world_size < 1:
        raise ConfigError(f"{world_size} ranks: a run has at least 1")
    if world_size % parallel.model_ranks:
        raise ConfigError(
            f"{world_size} ranks cannot hold parallel.tensor={parallel.tensor} x "
            f"pipeline={parallel.pipeline} x context={parallel.context}; use a multiple of "
            f"{parallel.model_ranks} ranks"
        )
    data_ranks = world_size // parallel.model_ranks
    unit = data_ranks * config.training.micro_batch_sequences
    sequences = config.global_batch_sequences
    if sequences % unit:
        step = unit * config.data.sequence_length
        raise ConfigError(
            f"training.global_batch_tokens={config.training.global_batch_tokens} is {sequences} "
            f"sequences, not a multiple of {data_ranks} data-parallel ranks x "
            f"training.micro_batch_sequences={config.training.micro_batch_sequences}; "
            f"nearest that work: {_nearest_multiples(config.training.global_batch_tokens, step)}"
        )
    micro_batches = sequences // unit
    if parallel.virtual_pipeline > 1 and micro_batches % parallel.pipeline:
        raise ConfigError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs micro-batches a step "
            f"({micro_batches}) divisible by parallel.pipeline={parallel.pipeline}; "
            f"raise training.global_batch_tokens or lower training.micro_batch_sequences"
        )


def check_schedule(config: RunConfig) -> None:
    """Phases of the learning rate that would overlap or never come."""
    schedule, steps = config.schedule, config.training.steps
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if decay is None:
        return
    if schedule.type == "wsd":
        if warmup + decay > steps:
            raise ConfigError(
                f"schedule.warmup_steps={warmup} + decay_steps={decay} exceed "
                f"training.steps={steps}; lower one of them"
            )
    elif decay <= warmup:
        raise ConfigError(
            f"schedule.decay_steps={decay} is the step at which a {schedule.type} schedule ends; "
            f"it must lie after schedule.warmup_steps={warmup}"
        )


def check_shape(config: RunConfig) -> None:
    """The checks that do not depend on the number of ranks."""
    model, parallel, training = config.model, config.parallel, config.training
    length = config.data.sequence_length
    if training.global_batch_tokens % length:
        raise ConfigError(
            f"training.global_batch_tokens={training.global_batch_tokens} is not a multiple of "
            f"data.sequence_length={length}; nearest that work: "
            f"{_nearest_multiples(training.global_batch_tokens, length)}"
        )
    check_engine(config)
    check_recompute(config)
    check_layer_graphs(config)
    stages = parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs parallel.pipeline above 1"
        )
    if model.layers % stages:
        raise ConfigError(
            f"model.layers={model.layers} is not divisible by parallel.pipeline={parallel.pipeline}"
            f" x virtual_pipeline={parallel.virtual_pipeline}; products that work: "
            f"{_divisors(model.layers)}"
        )
    if model.padded_vocab_size % parallel.tensor:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} does not divide the padded vocabulary "
            f"{model.padded_vocab_size}; set model.vocab_multiple to a multiple of it"
        )
    if model.ffn_hidden_size % parallel.tensor:
        raise ConfigError(
            f"model.ffn_hidden_size={model.ffn_hidden_size} is not divisible by "
            f"parallel.tensor={parallel.tensor}; values of parallel.tensor that work: "
            f"{_divisors(model.ffn_hidden_size)}"
        )
    tokens = training.micro_batch_sequences * length
    split = parallel.context * (parallel.tensor if parallel.sequence else 1)
    if tokens % split:
        raise ConfigError(
            f"a micro-batch of {tokens} tokens is not divisible by parallel.context="
            f"{parallel.context} x the tensor ranks of sequence parallelism ({split} parts)"
        )
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("parallel.sequence=true needs parallel.tensor above 1")
    for name in dict.fromkeys(model.layer_mixers):
        config.mixers[name].check(name, model.hidden_size, parallel.tensor, parallel.context)
        if training.deterministic:
            config.mixers[name].check_deterministic(name)
    check_device(config, "cuda")


def check_recompute(config: RunConfig) -> None:
    """Parts that cannot be computed again."""
    recomputed, model = config.training.recomputed, config.model
    if not recomputed:
        return
    said = f"training.recompute={recomputed}"
    if config.engine == "deepspeed":
        raise ConfigError(f"{said}: engine=deepspeed takes none or full")
    if model.norm != "rmsnorm" or model.dropout or model.parallel_residual:
        raise ConfigError(
            f"{said} is for layers with model.norm=rmsnorm, without dropout and parallel_residual; "
            "use none or full"
        )
    if "mlp_act" in recomputed and model.mlp != "swiglu":
        raise ConfigError(f"{said}: mlp_act is for model.mlp=swiglu, not {model.mlp}")
    mixers = {name: config.mixers[name] for name in model.layer_mixers}
    none = f"and none of {', '.join(mixers)} has it"
    if "conv" in recomputed:
        if (size := config.parallel.context) > 1:
            raise ConfigError(f"{said}: conv is for parallel.context=1, not {size}")
        if not any(mixer.convolution_bytes_per_token(1, 1) for mixer in mixers.values()):
            raise ConfigError(f"{said}: conv is for KLA's short convolution, {none}")
    if "gate" in recomputed:
        if (size := config.parallel.tensor) > 1:
            raise ConfigError(f"{said}: gate is for parallel.tensor=1, not {size}")
        if not any(mixer.gated_bytes_per_token(1) for mixer in mixers.values()):
            raise ConfigError(f"{said}: gate is for the gated norm of KLA's output, {none}")


def check_layer_graphs(config: RunConfig) -> None:
    """Layers that cannot be recorded."""
    if not config.training.layer_graphs:
        return
    said, model = "training.layer_graphs=true", config.model
    parallel = config.parallel
    if parallel.pipeline > 1:
        raise ConfigError(
            f"{said} with parallel.pipeline={parallel.pipeline}: a layer's tensors are recorded "
            "for one micro-batch under way; use parallel.pipeline=1, or training.layer_graphs=false"
        )
    if config.engine == "deepspeed":
        raise ConfigError(f"{said} is for engine=megatron")
    if config.training.debug:
        raise ConfigError(f"{said} leaves training.debug=true nothing to compare; switch one off")
    if model.norm != "rmsnorm" or model.dropout or model.parallel_residual:
        raise ConfigError(
            f"{said} is for layers with model.norm=rmsnorm, without dropout and parallel_residual"
        )
    if config.training.recompute == "full":
        raise ConfigError(f"{said} cannot go with training.recompute=full; recompute parts of it")
    for name in dict.fromkeys(model.layer_mixers):
        mixer = config.mixers[name]
        if not mixer.recordable:
            other = mixer.model_copy(update={"kernel": "triton"}).recordable
            hint = f"; mixers.{name}.kernel=triton does not" if other else ""
            raise ConfigError(
                f"{said}: mixer {name!r} (type {mixer.type!r}) decides on the host from each batch "
                f"what to launch{hint}"
            )
        if parallel.context > 1 and not mixer.context_recordable:
            raise ConfigError(
                f"{said} with parallel.context={parallel.context}: mixer {name!r} (type "
                f"{mixer.type!r}) decides on the host what context ranks send each other; use "
                "parallel.context=1, or training.layer_graphs=false"
            )


def check_recorded_lengths(config: RunConfig) -> None:
    """Layers that would have to be recorded anew for every batch."""
    precision = config.training.precision
    for name in dict.fromkeys(config.model.layer_mixers) if config.training.layer_graphs else ():
        mixer = config.mixers[name]
        if mixer.reads_lengths(precision):
            raise ConfigError(
                f"training.layer_graphs=true: mixer {name!r} (type {mixer.type!r}) reads the "
                "documents' lengths on the host, and they change from batch to batch; set "
                f"mixers.{name}.kernel=triton" + (", in bf16" if precision == "fp32" else "")
            )


def check_engine(config: RunConfig) -> None:
    """What DeepSpeed is not given here."""
    if config.engine != "deepspeed":
        return
    reasons = {
        "pipeline": "DeepSpeed's pipeline wants a model of its own kind and no tensor parallelism "
        "of Megatron's",
        "context": "ZeRO sums gradients over data ranks alone, so that each context rank would "
        "train on its own share of the tokens",
    }
    for key, reason in reasons.items():
        value = getattr(config.parallel, key)
        if value > 1:
            raise ConfigError(
                f"engine=deepspeed cannot run parallel.{key}={value}: {reason}; set it to 1, or "
                "engine=megatron"
            )
    if config.zero is not None and config.zero.zero_stage == 3 and config.checkpoint.init_allow:
        raise ConfigError(
            "checkpoint.init_allow needs whole parameters, which deepspeed.zero_stage=3 has not; "
            "start with stage 1 or 2, the first resume may change it"
        )


def check_device(config: RunConfig, device_type: str) -> None:
    """What cannot run on a device; "cuda" where it is not known yet."""
    if config.training.layer_graphs and device_type != "cuda":
        raise ConfigError(f"training.layer_graphs=true needs a GPU, and this is a {device_type}")
    for name in dict.fromkeys(config.model.layer_mixers):
        config.mixers[name].check_device(name, device_type, config.training.precision)


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return ", ".join(str(v) for v in (below, below + unit) if v > 0)


def _divisors(value: int) -> str:
    found = [d for d in range(1, value + 1) if value % d == 0]
    return ", ".join(map(str, found if len(found) <= 12 else [*found[:12], "..."]))
