"""GPT-NeoX (Pythia): parallel branches, LayerNorm, GELU, biases, RoPE on a part of each head."""

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

ONLY: dict[str, Any] = {"hidden_act": "gelu"}


def read_config(source: str, theirs: dict) -> tuple[ModelConfig, SoftmaxAttention]:
    """Raises KeyError for a key that is missing, ConfigError for a scaled RoPE."""
    heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
    rope = theirs.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", theirs.get("rotary_pct", 0.25))
    bias = theirs.get("attention_bias", True)
    mixer = SoftmaxAttention(
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        rope_base=rope_base(source, theirs),
        rotary_dim=int(share * (width // heads)),
        qkv_bias=bias,
        output_bias=bias,
    )
    model = ModelConfig(
        layers=theirs["num_hidden_layers"],
        hidden_size=width,
        ffn_hidden_size=theirs["intermediate_size"],
        mlp="gelu",
        mlp_bias=True,
        parallel_residual=theirs.get("use_parallel_residual", True),
        vocab_size=theirs["vocab_size"],
        pattern=["attention"],
        tied_embeddings=theirs.get("tie_word_embeddings", False),
        norm="layernorm",
        norm_eps=theirs["layer_norm_eps"],
        init_std=theirs.get("initializer_range", 0.02),
    )
    return model, mixer


def fitting(model: ModelConfig, mixer: SoftmaxAttention) -> str | None:
    of_model = model.norm == "layernorm" and model.mlp == "gelu" and model.mlp_bias
    of_mixer = mixer.heads == mixer.kv_heads and mixer.qkv_bias == mixer.output_bias
    other = mixer.qk_norm or mixer.window or mixer.heads * mixer.head_dim != model.hidden_size
    return "gpt_neox" if of_model and of_mixer and not other else None


def write_config(family: str, model: ModelConfig, mixer: SoftmaxAttention) -> dict[str, Any]:
    share = (mixer.rotary_dim or mixer.head_dim) / mixer.head_dim
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": mixer.qkv_bias,
        # Both forms: which one is read depends on transformers' version.
        "rotary_pct": share,
        "rotary_emb_base": mixer.rope_base,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": mixer.rope_base,
            "partial_rotary_factor": share,
        },
    }


def links(model: ModelConfig, mixer: SoftmaxAttention) -> list[Link]:
    found = [Link((EMBEDDING,), ("gpt_neox.embed_in.weight",))]
    if not model.tied_embeddings:
        found.append(Link((OUTPUT,), ("embed_out.weight",)))
    for kind in ("weight", "bias"):
        final = f"gpt_neox.final_layer_norm.{kind}"
        found.append(Link((f"{FINAL_NORM}.{kind}",), (final,)))
        within = [
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            (FC1, "mlp.dense_h_to_4h"),
            (FC2, "mlp.dense_4h_to_h"),
        ]
        attention = kind == "weight" or mixer.qkv_bias
        if attention:
            within.append((OUT, "attention.dense"))
        for number in range(model.layers):
            block, theirs = f"decoder.layers.{number}.", f"gpt_neox.layers.{number}."
            found += [Link((f"{block}{a}.{kind}",), (f"{theirs}{b}.{kind}",)) for a, b in within]
            if attention:
                ours = tuple(f"{block}{IN}.{kind}.{part}" for part in PARTS)
                fused = f"{theirs}attention.query_key_value.{kind}"
                found.append(Link(ours, (fused,), mixer.heads))
    return found
