"""`mixtron validate`: what a config will be, need and send, without a GPU and without torch."""

import os
import shutil
from pathlib import Path

from rich.console import Console

from mixtron.data_prep.tokenizer import Tokenizer
from mixtron.launch.checks import check
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.data import AnyTraining, AnyValidation, TrainingData, open_data
from mixtron.launch.estimate import forward_flops_per_token, parameters
from mixtron.launch.memory import (
    element_bytes,
    host_memory,
    layers_of_stage,
    memory_per_rank,
    micro_batches,
)
from mixtron.launch.traffic import bytes_sent_per_step
from mixtron.megatron_ext.errors import ConfigError

Rows = list[tuple[str, str]]


def print_report(config_path: Path, overrides: list[str], ranks: int | None) -> None:
    """Refuses what cannot run and prints the rest, the model's part before the files are looked at.

    Args:
        ranks: of the run; None takes `slurm`'s nodes, or without that section one model copy.
    Raises:
        ConfigError: the config does not load, does not fit the ranks, or the disk is too small.
        DataError: tokenizer or shards are missing or do not belong together.
    """
    config = load_config(config_path, overrides)
    world_size = default_world_size(config) if ranks is None else ranks
    check(config, world_size)
    console = Console(highlight=False, soft_wrap=True)
    _show(console, "Layout", _layout(config, world_size))
    _show(console, "Parameters", _parameters(config))
    _show(console, "Forward, a token", _flops(config))
    _show(console, "Decode state of a sequence", _decode_state(config))
    memory = memory_per_rank(config, world_size)
    _show(console, "GPU memory a rank, at the peak of a step", _bytes_rows(memory))
    if host := host_memory(config, world_size):
        _show(console, "Host memory a rank, for what is offloaded", _bytes_rows(host))
    traffic = bytes_sent_per_step(config, world_size)
    _show(console, "Sent by a rank a step", _bytes_rows(traffic))
    _show(console, "Data", _data(config, *open_data(config)))
    _show(console, "Disk", check_disk(config))
    console.print(f"{config_path}: valid for {world_size} ranks", markup=False)


def default_world_size(config: RunConfig) -> int:
    if config.slurm is not None:
        return config.slurm.ranks
    return config.parallel.model_ranks


def checkpoint_bytes(config: RunConfig) -> int:
    """Weights, fp32 main weights and two moments."""
    return sum(parameters(config).values()) * (element_bytes(config) + 12)


def _layout(config: RunConfig, world_size: int) -> Rows:
    parallel, training = config.parallel, config.training
    tensor = f"{parallel.tensor}{' (sequence)' if parallel.sequence else ''}"
    rows = [
        (
            f"{world_size} ranks",
            f"data {world_size // parallel.model_ranks} x tensor {tensor} "
            f"x pipeline {parallel.pipeline} x context {parallel.context}",
        ),
        (
            "step",
            f"{training.global_batch_tokens:,} tokens = {config.global_batch_sequences:,} sequences"
            f" of {config.data.sequence_length:,}; {micro_batches(config, world_size)} "
            f"micro-batches of {training.micro_batch_sequences} a rank",
        ),
        (
            "run",
            f"{training.steps:,} steps, {training.steps * training.global_batch_tokens:,} tokens",
        ),
    ]
    if (zero := config.zero) is not None:
        rows.append(("engine", f"DeepSpeed, ZeRO stage {zero.zero_stage}, offload {zero.offload}"))
    for stage in range(parallel.pipeline):
        mixers = layers_of_stage(config, stage)
        counts = ", ".join(f"{mixers.count(name)} {name}" for name in dict.fromkeys(mixers))
        rows.append((f"stage {stage}", f"{len(mixers)} layers: {counts}"))
    return rows


def _parameters(config: RunConfig) -> Rows:
    model, parts = config.model, parameters(config)
    total = sum(parts.values())
    width = len(f"{total:,}")
    rows = [(p, f"{count:>{width},}  {100 * count / total:.2g} %") for p, count in parts.items()]
    vocabulary = f"{model.vocab_size:,} of {model.padded_vocab_size:,} rows are in use"
    return [*rows, ("total", f"{total:,}"), ("vocabulary", vocabulary)]


def _flops(config: RunConfig) -> Rows:
    parts = forward_flops_per_token(config)
    forward = sum(parts.values())
    rows = [(part, _flop(flops)) for part, flops in parts.items()]
    training = f"{_flop(3 * forward)} with backward, which costs twice as much"
    return [*rows, ("total", _flop(forward)), ("training", training)]


def _decode_state(config: RunConfig) -> Rows:
    length, mixers = config.data.sequence_length, config.model.layer_mixers
    rows = []
    for name in dict.fromkeys(mixers):
        state = config.mixers[name].state_bytes(length, element_bytes(config))
        total = mixers.count(name) * state
        rows.append(
            (name, f"{_size(state)} a layer after {length:,} tokens, {_size(total)} in all")
        )
    return rows


def _bytes_rows(parts: dict[str, float]) -> Rows:
    rows = [(part, _size(count)) for part, count in parts.items()]
    return [*rows, ("total", _size(sum(parts.values())))]


def _data(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    data: AnyTraining,
    validation: dict[str, AnyValidation],
) -> Rows:
    if isinstance(data, TrainingData):
        rows = _corpora(config, tokenizer, data)
    else:
        parameters = ", ".join(
            f"{k}={v}" for k, v in data.task.model_dump(exclude={"task"}).items()
        )
        rows = [("synthetic", f"{data.task.task}: {parameters}")]
    return rows + [(f"validation.{name}", f"{len(v):,} samples") for name, v in validation.items()]


def _corpora(config: RunConfig, tokenizer: Tokenizer | None, data: TrainingData) -> Rows:
    assert isinstance(config.data, DataConfig)
    assert tokenizer is not None
    rows = [("tokenizer", f"{config.data.tokenizer}: {tokenizer.type}, {tokenizer.vocab_size:,}")]
    samples = config.training.steps * config.global_batch_sequences
    weights = sum(source.weight for source in data.sources)
    for i, source in enumerate(data.sources):
        stream, share = source.stream, source.weight / weights
        split = f" (split {stream.split.name})" if stream.split else ""
        rows.append(
            (
                f"train.{i}",
                f"{stream.shard.prefix}{split}: {stream.documents:,} documents, "
                f"{stream.tokens:,} tokens, {len(stream):,} samples; {share:.1%} of the blend, "
                f"{share * samples / len(stream):.3g} epochs",
            )
        )
    return rows


def check_disk(config: RunConfig) -> Rows:
    """Free space against two checkpoints: the newest stays until the next is complete.

    Raises:
        ConfigError: too little free space, or no permission to write.
    """
    folder = Path(config.run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"run_dir={config.run_dir}: {folder} is not a folder one can write into")
    one, free = checkpoint_bytes(config), shutil.disk_usage(folder).free
    if 2 * one > free:
        raise ConfigError(
            f"run_dir={config.run_dir}: {_size(free)} are free in {folder}, but two checkpoints "
            f"need {_size(2 * one)}; make room or set run_dir to another file system"
        )
    kept = "all are kept" if config.checkpoint.keep is None else f"{config.checkpoint.keep} kept"
    return [("free", f"{_size(free)} in {folder}"), ("checkpoint", f"{_size(one)} each, {kept}")]


def _size(count: float) -> str:
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _flop(count: float) -> str:
    return _scaled(count, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    *smaller, largest = units
    for unit in smaller:
        if count < base:
            return f"{count:,.4g} {unit}"
        count /= base
    return f"{count:,.4g} {largest}"


def _show(console: Console, title: str, rows: Rows) -> None:
    console.print(title, style="bold", markup=False)
    width = max((len(label) for label, _ in rows), default=0)
    for label, value in rows or [("nothing", "")]:
        style = "bold" if label == "total" else None
        console.print(f"  {label:<{width}}  {value}".rstrip(), style=style, markup=False)
