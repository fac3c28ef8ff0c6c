"""Llama (SmolLM and SmolLM2 are of it), Mistral, Qwen2, Qwen3: softmax attention and SwiGLU."""

from dataclasses import dataclass
from typing import Any

from mixtron.launch.exchange.links import (
    EMBEDDING,
    FC1,
    FC2,
    FINAL_NORM,
    IN,
    OUT,
    OUTPUT,
    PARTS,
    Link,
    rope_base,
)
from mixtron.megatron_ext.config import ModelConfig
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention


@dataclass(frozen=True)
class Family:
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    window: bool = False
    """Whether `sliding_window` is always in force."""


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window=True),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", qk_norm=True),
}
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "pretraining_tp": 1,
}
"""Keys whose other values these models do not have."""


def read_config(source: str, theirs: dict) -> tuple[ModelConfig, SoftmaxAttention]:
    """Raises KeyError for a key that is missing, ConfigError for a scaled RoPE."""
    family = FAMILIES[theirs["model_type"]]
    heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
    mixer = SoftmaxAttention(
        heads=heads,
        kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or width // heads,
        rope_base=rope_base(source, theirs),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        window=theirs.get("sliding_window") if family.window else None,
    )
    model = ModelConfig(
        layers=theirs["num_hidden_layers"],
        hidden_size=width,
        ffn_hidden_size=theirs["intermediate_size"],
        vocab_size=theirs["vocab_size"],
        pattern=["attention"],
        tied_embeddings=theirs.get("tie_word_embeddings", False),
        norm_eps=theirs["rms_norm_eps"],
        init_std=theirs.get("initializer_range", 0.02),
    )
    return model, mixer


def fitting(model: ModelConfig, mixer: SoftmaxAttention) -> str | None:
    """The family that has what this model has."""
    if model.norm != "rmsnorm" or model.mlp != "swiglu" or model.mlp_bias:
        return None
    if model.parallel_residual or mixer.output_bias or mixer.rotary_dim is not None:
        return None
    asked = (mixer.qk_norm, mixer.qkv_bias, mixer.window is not None)
    having = {name: (f.qk_norm, f.qkv_bias, f.window) for name, f in FAMILIES.items()}
    return next((name for name, options in having.items() if options == asked), None)


def write_config(family: str, model: ModelConfig, mixer: SoftmaxAttention) -> dict[str, Any]:
    theirs = {
        "architectures": [f"{FAMILIES[family].architecture}ForCausalLM"],
        "hidden_act": "silu",
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "rms_norm_eps": model.norm_eps,
        # Both forms: which one is read depends on transformers' version.
        "rope_theta": mixer.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": mixer.rope_base},
    }
    return theirs | ({"sliding_window": mixer.window} if FAMILIES[family].window else {})


def links(model: ModelConfig, mixer: SoftmaxAttention) -> list[Link]:
    found = [
        Link((EMBEDDING,), ("model.embed_tokens.weight",)),
        Link((f"{FINAL_NORM}.weight",), ("model.norm.weight",)),
    ]
    if not model.tied_embeddings:
        found.append(Link((OUTPUT,), ("lm_head.weight",)))
    within = [
        ("input_layernorm.weight", "input_layernorm.weight"),
        *((f"{IN}.weight.{part}", f"self_attn.{part[0]}_proj.weight") for part in PARTS),
        (f"{OUT}.weight", "self_attn.o_proj.weight"),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        (f"{FC1}.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        (f"{FC2}.weight", "mlp.down_proj.weight"),
    ]
    if mixer.qkv_bias:
        within += [(f"{IN}.bias.{part}", f"self_attn.{part[0]}_proj.bias") for part in PARTS]
    if mixer.qk_norm:
        within += [
            (f"self_attention.{x}_norm_weight", f"self_attn.{x}_norm.weight") for x in ("q", "k")
        ]
    for number in range(model.layers):
        for ours, *theirs in within:
            names = tuple(f"model.layers.{number}.{name}" for name in theirs)
            found.append(Link((f"decoder.layers.{number}.{ours}",), names))
    return found
