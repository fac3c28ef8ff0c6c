"""A checkpoint as a Hugging Face folder: as a known family, or with a model file."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from mixtron.launch.checkpoint_tensors import StoredTensors
from mixtron.launch.config import RunConfig
from mixtron.launch.exchange.families import family_of, links, write_config
from mixtron.launch.exchange.importing import TOKENIZER_FILES
from mixtron.launch.exchange.links import to_theirs
from mixtron.launch.spectral.runs import config_of, is_run, newest_checkpoint
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention

MODEL_FILE = "modeling_mixtron.py"
METADATA = {"format": "pt"}


def export_folder(source: Path, folder: Path, *, remote_code: bool) -> str:
    """Writes config.json, model.safetensors and the tokenizer; returns the family, or the file that
    the model is in.

    Args:
        remote_code: the model file even where a family fits.

    Raises:
        ConfigError: no run or checkpoint, or a folder that is there already.
    """
    if not is_run(source):
        raise ConfigError(f"{source}: neither a run folder nor a checkpoint")
    checkpoint = newest_checkpoint(source)
    config = config_of(checkpoint)
    family = None if remote_code else family_of(config.model, config.mixers)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; give another folder")
    if family is None:
        _write_with_code(folder, config, checkpoint)
    else:
        _write_family(folder, config, StoredTensors(checkpoint), *family)
    _copy_tokenizer(checkpoint, config, folder)
    return MODEL_FILE if family is None else family[0]


def _dtype(config: RunConfig) -> str:
    return "bfloat16" if config.training.precision == "bf16" else "float32"


def _write_family(
    folder: Path, config: RunConfig, stored: StoredTensors, kind: str, mixer: SoftmaxAttention
) -> None:
    model = config.model
    options = {"positions": config.data.sequence_length, "dtype": _dtype(config)}
    theirs = write_config(kind, model, mixer, **options)
    (folder / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")
    tensors = {}
    for link in links(kind, model, mixer):
        tensors |= to_theirs(model, link, [stored.tensor(name) for name in link.ours])
    save_file(tensors, folder / "model.safetensors", METADATA)


def _write_with_code(folder: Path, config: RunConfig, checkpoint: Path) -> None:
    """Tensors as one rank's model holds them."""
    from mixtron.launch.inference.model import load_on_one_rank

    theirs = {
        "architectures": ["MixtronForCausalLM"],
        "model_type": "mixtron",
        "auto_map": {
            "AutoConfig": "modeling_mixtron.MixtronConfig",
            "AutoModelForCausalLM": "modeling_mixtron.MixtronForCausalLM",
        },
        "model": config.model.model_dump(mode="json"),
        "mixers": {name: mixer.model_dump(mode="json") for name, mixer in config.mixers.items()},
        "vocab_size": config.model.vocab_size,
        "hidden_size": config.model.hidden_size,
        "num_hidden_layers": config.model.layers,
        "max_position_embeddings": config.data.sequence_length,
        "tie_word_embeddings": False,
        "dtype": _dtype(config),
    }
    (folder / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")
    shutil.copyfile(Path(__file__).with_name(MODEL_FILE), folder / MODEL_FILE)
    chunk = load_on_one_rank(checkpoint, config)
    tensors = {
        f"mixtron.{name}": tensor.detach().cpu() for name, tensor in chunk.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", METADATA)


def _copy_tokenizer(checkpoint: Path, config: RunConfig, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        copy = checkpoint.parents[1] / "tokenizer" / name
        if copy.is_file():
            shutil.copyfile(copy, folder / name)
