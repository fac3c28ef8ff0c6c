"""A Hugging Face folder as a run: sharded checkpoint, config, tokenizer."""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.launch.checkpoint_files import FORMAT_VERSION, list_checkpoints
from mixtron.launch.checkpoint_identity import versions
from mixtron.launch.config import RunConfig, dump_config, parse_config
from mixtron.launch.exchange.families import links, read_config
from mixtron.launch.exchange.links import to_ours
from mixtron.launch.spectral.huggingface import Tensors
from mixtron.megatron_ext.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
CONSTANT = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
"""Ends of names, in older folders, of what is no weight."""
NO_CORPUS = "data/corpus"
"""Stands where a config must name a corpus."""


def import_folder(folder: Path, run_dir: Path) -> Path:
    """Writes `run_dir` with a checkpoint of step 0, from which `init_from` starts a run.

    Weights stay as they are: bf16 as bf16, everything else as fp32.

    Raises:
        ConfigError: no such folder, another family, an unsupported option, tensors that are missing
            or left over, or a run folder that holds checkpoints.
    """
    if list_checkpoints(run_dir / "checkpoints"):
        raise ConfigError(f"{run_dir}: already holds checkpoints; give another folder")
    source = folder / "config.json"
    if not source.is_file():
        raise ConfigError(f"{folder}: not a Hugging Face folder: there is no config.json")
    try:
        theirs = json.loads(source.read_text())
    except ValueError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from None
    model, mixer = read_config(str(source), theirs)
    weights = _weights(folder, theirs["model_type"], model, mixer)
    bf16 = all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    if not bf16:
        weights = {name: tensor.float() for name, tensor in weights.items()}
    run_dir.mkdir(parents=True, exist_ok=True)
    tokenizer, sha256 = _copy_tokenizer(folder, run_dir / "tokenizer")
    config = _config(folder, run_dir, model, mixer, tokenizer, theirs, bf16=bf16)
    dump_config(config, run_dir / "config.yaml")
    return _write(run_dir / "checkpoints", weights, config, sha256)


def _weights(folder: Path, kind: str, model, mixer) -> dict[str, Tensor]:
    stored, weights = Tensors(folder), {}
    wanted = links(kind, model, mixer)
    for link in wanted:
        weights |= to_ours(model, link, [stored[name] for name in link.theirs])
    known = {name for link in wanted for name in link.theirs}
    # A tied output layer may be stored a second time.
    known |= {"lm_head.weight", "embed_out.weight"} if model.tied_embeddings else set()
    unknown = [name for name in stored.file_of if name not in known and not name.endswith(CONSTANT)]
    if unknown:
        raise ConfigError(f"{folder}: tensors that the model has no place for: {unknown[:5]}")
    return weights


def _copy_tokenizer(folder: Path, copy: Path) -> tuple[str, str | None]:
    """Its path in the run folder, and its fingerprint; None where it names no end of document."""
    copy.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, copy / name)
    for name in ("tokenizer.json", "tokenizer.model"):
        if (copy / name).is_file():
            try:
                return str(copy / name), load_tokenizer(copy / name).sha256
            except DataError:
                return str(copy / name), None
    return str(copy / "tokenizer.json"), None


def _config(folder, run_dir, model, mixer, tokenizer: str, theirs, *, bf16: bool) -> RunConfig:
    length = theirs.get("max_position_embeddings", 2048)
    return parse_config(
        {
            "name": "".join(c if c.isalnum() or c in "._-" else "_" for c in folder.name),
            "run_dir": str(run_dir),
            "model": model.model_dump(mode="json"),
            "mixers": {"attention": mixer.model_dump(mode="json")},
            "data": {
                "sequence_length": length,
                "tokenizer": tokenizer,
                "train": [{"path": NO_CORPUS}],
            },
            "optimizer": {"lr": 1e-5},
            "training": {
                "steps": 1000,
                "global_batch_tokens": length,
                "precision": "bf16" if bf16 else "fp32",
            },
            "checkpoint": {"save_every_steps": 1000},
        }
    )


def _write(root: Path, weights: dict[str, Tensor], config: RunConfig, sha256: str | None) -> Path:
    from megatron.core.dist_checkpointing import ShardedTensor

    from mixtron.launch.checkpoint import write_checkpoint
    from mixtron.launch.checkpoint_shards import common_state_shard
    from mixtron.launch.loop import Progress
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    ranks = init_model_parallel(seed=0, device=init_distributed())
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": 0,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "optimizer_step": 0,
        "layout": {},
        "versions": versions(),
        "state": {
            "progress": Progress().__dict__,
            "data": {},
            "data_record": {},
            "tokenizer_sha256": sha256,
        },
        "config": config.model_dump(mode="json"),
    }
    shards = {
        "tensors": {
            name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in weights.items()
        },
        "common_state": common_state_shard(ranks),
    }
    root.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(root, shards, manifest, ranks)
