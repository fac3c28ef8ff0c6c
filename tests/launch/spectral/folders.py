"""Small random models of each Hugging Face family, written as their libraries would write them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

D, H, K, LAYERS = 24, 3, 8, 2


def write(family: str, folder: Path, dtype=torch.float32) -> Path:
    """A folder with config.json and safetensors; Llama's is split over two files."""
    folder.mkdir()
    config, tensors = FAMILIES[family](torch.Generator().manual_seed(5))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: x.to(dtype).contiguous() for name, x in tensors.items()}
    names = sorted(tensors)
    parts = [names[::2], names[1::2]] if family in ("llama", "qwen3") else [names]
    for i, part in enumerate(parts):
        save_file({name: tensors[name] for name in part}, folder / f"model-{i}.safetensors")
    return folder


def _gpt2(generator):
    tensors = {}
    for i in range(LAYERS):
        block = f"transformer.h.{i}."
        tensors |= _norm(f"{block}ln_1", generator)
        tensors[f"{block}attn.c_attn.weight"] = torch.randn(D, 3 * D, generator=generator)
        tensors[f"{block}attn.c_attn.bias"] = torch.randn(3 * D, generator=generator)
    return {"model_type": "gpt2", "n_head": H, "n_layer": LAYERS}, tensors


def _bert(generator):
    tensors = _norm("bert.embeddings.LayerNorm", generator)
    for i in range(LAYERS):
        block = f"bert.encoder.layer.{i}."
        tensors |= _norm(f"{block}output.LayerNorm", generator)
        for name in ("query", "key", "value"):
            own = f"{block}attention.self.{name}."
            tensors[f"{own}weight"] = torch.randn(D, D, generator=generator)
            tensors[f"{own}bias"] = torch.randn(D, generator=generator)
    return {"model_type": "bert", "num_attention_heads": H, "num_hidden_layers": LAYERS}, tensors


def _gpt_neox(generator):
    tensors = {}
    for i in range(LAYERS):
        block = f"gpt_neox.layers.{i}."
        tensors |= _norm(f"{block}input_layernorm", generator)
        own = f"{block}attention.query_key_value."
        tensors[f"{own}weight"] = torch.randn(3 * D, D, generator=generator)
        tensors[f"{own}bias"] = torch.randn(3 * D, generator=generator)
    config = {"model_type": "gpt_neox", "num_attention_heads": H, "num_hidden_layers": LAYERS}
    return config | {"rotary_pct": 0.25}, tensors


def _llama(generator, model_type="llama"):
    tensors = {}
    for i in range(LAYERS):
        block = f"model.layers.{i}."
        tensors[f"{block}input_layernorm.weight"] = torch.randn(D, generator=generator)
        own = f"{block}self_attn."
        tensors[f"{own}q_proj.weight"] = torch.randn(H * K, D, generator=generator)
        tensors[f"{own}k_proj.weight"] = torch.randn(K, D, generator=generator)
        if model_type == "qwen3":
            tensors[f"{own}q_norm.weight"] = torch.randn(K, generator=generator)
            tensors[f"{own}k_norm.weight"] = torch.randn(K, generator=generator)
    config = {"model_type": model_type, "num_attention_heads": H, "num_hidden_layers": LAYERS}
    return config | {"num_key_value_heads": 1}, tensors


def _norm(name, generator):
    return {
        f"{name}.weight": torch.randn(D, generator=generator),
        f"{name}.bias": torch.randn(D, generator=generator),
    }


FAMILIES = {
    "gpt2": _gpt2,
    "bert": _bert,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "qwen3": lambda generator: _llama(generator, "qwen3"),
}
