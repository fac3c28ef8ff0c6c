"""Which Hugging Face models these are: softmax attention in every layer, in a known family."""

from collections.abc import Mapping
from typing import Any

from mixtron.launch.exchange import gpt_neox, llama
from mixtron.launch.exchange.links import Link
from mixtron.megatron_ext.config import ModelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention

FAMILIES = {**dict.fromkeys(llama.FAMILIES, llama), "gpt_neox": gpt_neox}


def read_config(source: str, theirs: dict) -> tuple[ModelConfig, SoftmaxAttention]:
    """The model and its one mixer.

    Raises:
        ConfigError: another family, or an option that is not here; names the key.
    """
    kind = theirs.get("model_type", "")
    if kind not in FAMILIES:
        raise ConfigError(f"{source}: model_type {kind!r}; known: {', '.join(FAMILIES)}")
    for key, only in FAMILIES[kind].ONLY.items():
        if theirs.get(key, only) != only:
            raise ConfigError(f"{source}: {key}={theirs[key]!r}; only {only!r} is supported")
    try:
        return FAMILIES[kind].read_config(source, theirs)
    except KeyError as error:
        raise ConfigError(f"{source}: no {error.args[0]!r} in it") from None


def links(kind: str, model: ModelConfig, mixer: SoftmaxAttention) -> list[Link]:
    """Every tensor of the model."""
    return FAMILIES[kind].links(model, mixer)


def family_of(
    model: ModelConfig, mixers: Mapping[str, MixerConfig]
) -> tuple[str, SoftmaxAttention] | None:
    """The family that can hold a model, and its one mixer; or None."""
    used = [mixers[name] for name in model.layer_mixers]
    mixer = used[0]
    alike = all(other == mixer for other in used)
    if not alike or not isinstance(mixer, SoftmaxAttention) or mixer.rope_base is None:
        return None
    kind = llama.fitting(model, mixer) or gpt_neox.fitting(model, mixer)
    return None if kind is None else (kind, mixer)


def write_config(
    kind: str, model: ModelConfig, mixer: SoftmaxAttention, *, positions: int, dtype: str
) -> dict[str, Any]:
    """What config.json holds."""
    return {
        "model_type": kind,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": mixer.heads,
        "max_position_embeddings": positions,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
        **FAMILIES[kind].write_config(kind, model, mixer),
    }
