"""Families of Hugging Face models that are softmax attention and SwiGLU: their configs and names.

Llama (SmolLM and SmolLM2 are of it), Mistral, Qwen2, Qwen3. What a config asks for and these models
do not have is refused by its key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixtron.megatron_ext.config import ModelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention

Names = dict[str, tuple[str, ...]]
MIXER = "attention"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
TOP = {
    EMBEDDING: ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    OUTPUT: ("lm_head.weight",),
}
LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.in_proj.weight.query": ("self_attn.q_proj.weight",),
    "self_attention.in_proj.weight.key": ("self_attn.k_proj.weight",),
    "self_attention.in_proj.weight.value": ("self_attn.v_proj.weight",),
    "self_attention.in_proj.bias.query": ("self_attn.q_proj.bias",),
    "self_attention.in_proj.bias.key": ("self_attn.k_proj.bias",),
    "self_attention.in_proj.bias.value": ("self_attn.v_proj.bias",),
    "self_attention.q_norm_weight": ("self_attn.q_norm.weight",),
    "self_attention.k_norm_weight": ("self_attn.k_norm.weight",),
    "self_attention.out_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""Ours within a layer, and theirs, joined along dimension 0."""


@dataclass(frozen=True)
class Family:
    qk_norm: bool = False
    qkv_bias: bool = False
    window: bool = False
    """Whether `sliding_window` is always in force."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}
REFUSED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
}
"""Keys whose other values these models do not have."""


def read_config(source: str, theirs: Mapping[str, Any]) -> tuple[ModelConfig, SoftmaxAttention]:
    """The model and its one mixer.

    Raises:
        ConfigError: another family, or an option that is not here; names the key.
    """
    kind = theirs.get("model_type", "")
    if kind not in FAMILIES:
        raise ConfigError(f"{source}: model_type {kind!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for key, allowed in REFUSED.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{source}: {key}={theirs[key]!r}; only {allowed[0]!r} is supported")
    try:
        heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
        mixer = SoftmaxAttention(
            heads=heads,
            kv_heads=theirs.get("num_key_value_heads") or heads,
            head_dim=theirs.get("head_dim") or width // heads,
            rope_base=_rope_base(source, theirs),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            window=theirs.get("sliding_window") if family.window else None,
        )
        model = ModelConfig(
            layers=theirs["num_hidden_layers"],
            hidden_size=width,
            ffn_hidden_size=theirs["intermediate_size"],
            vocab_size=theirs["vocab_size"],
            pattern=[MIXER],
            tied_embeddings=theirs.get("tie_word_embeddings", False),
            norm_eps=theirs["rms_norm_eps"],
            init_std=theirs.get("initializer_range", 0.02),
        )
    except KeyError as error:
        raise ConfigError(f"{source}: no {error.args[0]!r} in it") from None
    return model, mixer


def _rope_base(source: str, theirs: Mapping[str, Any]) -> float:
    """Older folders have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{source}: rope_type={kind!r}; only 'default' is supported")
    return float(rope.get("rope_theta", theirs.get("rope_theta", 10000.0)))


def family_of(model: ModelConfig, mixers: Mapping[str, MixerConfig]) -> str | None:
    """The family that can hold a model, or None."""
    used = [mixers[name] for name in model.layer_mixers]
    mixer = used[0]
    plain = model.norm == "rmsnorm" and all(other == mixer for other in used)
    if not plain or not isinstance(mixer, SoftmaxAttention) or mixer.rope_base is None:
        return None
    options = Family(mixer.qk_norm, mixer.qkv_bias, mixer.window is not None)
    return next((name for name, family in FAMILIES.items() if family == options), None)


def write_config(
    family: str, model: ModelConfig, mixer: SoftmaxAttention, *, positions: int, dtype: str
) -> dict[str, Any]:
    """What config.json holds."""
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    theirs = {
        "architectures": [f"{architecture[family]}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_eps,
        # Both forms: which one is read depends on transformers' version.
        "rope_theta": mixer.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope_base},
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return theirs | ({"sliding_window": mixer.window} if FAMILIES[family].window else {})


def names(model: ModelConfig, mixer: SoftmaxAttention) -> Names:
    """Every tensor of the model: ours, and theirs."""
    left_out = [
        *([] if mixer.qk_norm else ["norm_weight"]),
        *([] if mixer.qkv_bias else [".bias."]),
    ]
    found: Names = {ours: theirs for ours, theirs in TOP.items() if ours != OUTPUT}
    if not model.tied_embeddings:
        found[OUTPUT] = TOP[OUTPUT]
    for number in range(model.layers):
        for ours, theirs in LAYER.items():
            if not any(part in ours for part in left_out):
                key = f"decoder.layers.{number}.{ours}"
                found[key] = tuple(f"model.layers.{number}.{name}" for name in theirs)
    return found


def to_ours(model: ModelConfig, name: str, theirs: list[Tensor]) -> Tensor:
    """Joined; the vocabulary filled up with zeros."""
    tensor = torch.cat(theirs)
    if name in (EMBEDDING, OUTPUT):
        missing = model.padded_vocab_size - len(tensor)
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, missing))
    return tensor


def to_theirs(model: ModelConfig, name: str, ours: Tensor, parts: int) -> list[Tensor]:
    """Taken apart; the vocabulary without what fills it up."""
    if name in (EMBEDDING, OUTPUT):
        ours = ours[: model.vocab_size]
    return [part.contiguous() for part in ours.chunk(parts)]
