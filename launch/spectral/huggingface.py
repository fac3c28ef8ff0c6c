"""Queries and keys of Hugging Face folders: config.json and safetensors, nothing else is needed."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mixtron.launch.spectral.weights import (
    LayerWeights,
    Model,
    SpectralError,
    repeat_to,
    to_heads,
)


class Tensors:
    """Named tensors of one folder, read when asked for.

    Raises:
        SpectralError: no safetensors, an index that names a missing file, a missing tensor.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise SpectralError(f"{folder}: no *.safetensors file; save the model as safetensors")
        self.file_of: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                self.file_of |= dict.fromkeys(opened.keys(), file)

    def prefix(self, suffix: str) -> str:
        """What stands before a name: models with and without a head differ in it."""
        for name in self.file_of:
            if name.endswith(suffix) and (name == suffix or name[: -len(suffix)].endswith(".")):
                return name[: -len(suffix)]
        raise SpectralError(f"{self.folder}: no tensor {suffix} in its safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.file_of:
            raise SpectralError(f"{self.folder}: no tensor {name} in its safetensors")
        with safe_open(self.file_of[name], framework="pt") as opened:
            return opened.get_tensor(name)


def read_config(folder: Path) -> dict:
    """A folder's config.json.

    Raises:
        SpectralError: not JSON, or of a family that is not known.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise SpectralError(f"{file}: not JSON: {error}") from None
    family = config.get("model_type", "")
    if family not in READERS:
        raise SpectralError(f"{file}: model_type {family!r}; known: {', '.join(READERS)}")
    return config


def open_huggingface(folder: Path) -> Model:
    """GPT-2, BERT, GPT-NeoX (Pythia), and Llama-style models (Llama, Mistral, Qwen).

    Raises:
        SpectralError: another family, or tensors that are not there.
    """
    config = read_config(folder)
    family, tensors = config["model_type"], Tensors(folder)
    try:
        layers = int(config.get("num_hidden_layers") or config["n_layer"])
        reader = READERS[family](tensors, config)
    except KeyError as error:
        raise SpectralError(f"{folder / 'config.json'}: no {error.args[0]!r} in it") from None
    return Model(folder.name, family, layers, read=reader)


class _Gpt2:
    """Pre-norm; q, k and v side by side in the columns of one matrix [D, 3D]."""

    def __init__(self, tensors: Tensors, config: dict):
        self.tensors = tensors
        self.heads = config.get("n_head") or config["num_attention_heads"]
        self.prefix = tensors.prefix("h.0.attn.c_attn.weight")

    def __call__(self, layer: int) -> LayerWeights:
        block = f"{self.prefix}h.{layer}."
        gain_D = self.tensors[f"{block}ln_1.weight"]
        q_DE, k_DE, _ = self.tensors[f"{block}attn.c_attn.weight"].chunk(3, dim=1)
        notes = (*_bias(self.tensors, f"{block}attn.c_attn.bias"), "learned absolute positions")
        q_HKD, k_HKD = (to_heads(x.t(), self.heads, gain_D) for x in (q_DE, k_DE))
        return LayerWeights(layer, q_HKD, k_HKD, notes=notes)


class _Bert:
    """Post-norm: a layer's input is what the norm before it gave; and no causal mask."""

    def __init__(self, tensors: Tensors, config: dict):
        self.tensors, self.heads = tensors, config["num_attention_heads"]
        self.prefix = tensors.prefix("encoder.layer.0.attention.self.query.weight")

    def __call__(self, layer: int) -> LayerWeights:
        block = f"{self.prefix}encoder.layer.{layer}."
        before = f"encoder.layer.{layer - 1}.output" if layer else "embeddings"
        norm = f"{self.prefix}{before}.LayerNorm"
        gain_D = self.tensors[f"{norm}.{'gamma' if f'{norm}.gamma' in self.tensors else 'weight'}"]
        attention = f"{block}attention.self."
        q_HKD, k_HKD = (
            to_heads(self.tensors[f"{attention}{x}.weight"], self.heads, gain_D)
            for x in ("query", "key")
        )
        notes = (*_bias(self.tensors, f"{attention}query.bias"), "learned absolute positions")
        return LayerWeights(layer, q_HKD, k_HKD, notes=notes)


class _GptNeox:
    """Pre-norm; rows head by head, in each head q, k, v; rotary on a part of each head."""

    def __init__(self, tensors: Tensors, config: dict):
        self.tensors, self.heads = tensors, config["num_attention_heads"]
        self.rotary = config.get("rotary_pct", config.get("partial_rotary_factor", 0.25))
        self.prefix = tensors.prefix("layers.0.attention.query_key_value.weight")

    def __call__(self, layer: int) -> LayerWeights:
        block = f"{self.prefix}layers.{layer}."
        gain_D = self.tensors[f"{block}input_layernorm.weight"]
        fused = to_heads(
            self.tensors[f"{block}attention.query_key_value.weight"], self.heads, gain_D
        )
        q_HKD, k_HKD, _ = fused.chunk(3, dim=1)
        notes = (
            *_bias(self.tensors, f"{block}attention.query_key_value.bias"),
            f"rotary positions on {self.rotary:.0%} of each head: measured at distance 0",
        )
        return LayerWeights(layer, q_HKD, k_HKD, notes=notes)


class _Llama:
    """Pre-norm; separate q and k, fewer key heads; rotary positions; norms of q and k in some."""

    def __init__(self, tensors: Tensors, config: dict):
        self.tensors, self.heads = tensors, config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.rotary = config.get("partial_rotary_factor", 1.0)
        self.prefix = tensors.prefix("layers.0.self_attn.q_proj.weight")

    def __call__(self, layer: int) -> LayerWeights:
        block = f"{self.prefix}layers.{layer}."
        gain_D = self.tensors[f"{block}input_layernorm.weight"]
        attention = f"{block}self_attn."
        q_HKD = to_heads(self.tensors[f"{attention}q_proj.weight"], self.heads, gain_D)
        k_GKD = to_heads(self.tensors[f"{attention}k_proj.weight"], self.kv_heads, gain_D)
        notes = (
            *_bias(self.tensors, f"{attention}q_proj.bias"),
            f"rotary positions on {self.rotary:.0%} of each head: measured at distance 0",
        )
        if f"{attention}q_norm.weight" in self.tensors:
            q_HKD = self._with_gain(q_HKD, f"{attention}q_norm.weight")
            k_GKD = self._with_gain(k_GKD, f"{attention}k_norm.weight")
            notes += ("q and k are normalised for each token: the norms' gains are folded in",)
        return LayerWeights(layer, q_HKD, repeat_to(k_GKD, self.heads), notes=notes)

    def _with_gain(self, x_HKD: Tensor, name: str) -> Tensor:
        """The norm over a head has a gain [K]; one over all heads [H K]."""
        gain = self.tensors[name].to(torch.float64)
        return x_HKD * gain.view(-1, x_HKD.shape[1])[..., None]


def _bias(tensors: Tensors, name: str) -> tuple[str, ...]:
    return ("biases of q and k left out",) if name in tensors else ()


READERS = {
    "gpt2": _Gpt2,
    "bert": _Bert,
    "gpt_neox": _GptNeox,
    "llama": _Llama,
    "mistral": _Llama,
    "qwen2": _Llama,
    "qwen3": _Llama,
}
