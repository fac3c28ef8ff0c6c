"""What attention sees of a text in a Hugging Face model: queries and keys, by its own forward.

One layer is in memory at a time, in fp32. Written from the models' published definitions; held
against the `transformers` library by a test's numbers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from mixtron.launch.spectral.huggingface import Tensors, read_config
from mixtron.launch.spectral.weights import SpectralError, repeat_to

Inputs = tuple[Tensor, Tensor]
"""q [H, T, K] and k [H, T, K] of a layer, positions and norms included; k repeated over queries."""


def text_ids(folder: Path, text: Path, tokens: int) -> Tensor:
    """The first tokens of a text, with what the model's tokenizer puts around it.

    Raises:
        SpectralError: no tokenizer.json, or fewer than 2 tokens.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        raise SpectralError(f"{file}: not there; a text is measured with the model's tokenizer")
    ids = Tokenizer.from_file(str(file)).encode(text.read_text()).ids[:tokens]
    if len(ids) < 2:
        raise SpectralError(f"{text}: {len(ids)} tokens; at least 2 are needed")
    return torch.tensor(ids)


def attention_inputs(folder: Path, ids_T: Tensor) -> Iterator[Inputs]:
    """Of every layer in turn.

    Raises:
        SpectralError: a family, an activation or positions that are not known, or too long a text.
    """
    config = read_config(folder)
    weights = Weights(Tensors(folder))
    yield from FORWARDS[config["model_type"]](config, weights, ids_T)


class Weights:
    """Tensors in fp32 by name, and the layers that they make."""

    def __init__(self, tensors: Tensors, prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    def under(self, suffix: str) -> "Weights":
        """Below the prefix that stands before this name, with or without a head on the model."""
        return Weights(self.tensors, self.tensors.prefix(suffix))

    def at(self, part: str) -> "Weights":
        return Weights(self.tensors, f"{self.prefix}{part}.")

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}"].float()

    def _bias(self, name: str) -> Tensor | None:
        name = f"{name}.bias"
        return self[name] if name in self else None  # noqa: SIM401

    def linear(self, name: str, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD, self[f"{name}.weight"], self._bias(name))

    def conv1d(self, name: str, x_TD: Tensor) -> Tensor:
        """GPT-2's: its matrix is [in, out]."""
        return x_TD @ self[f"{name}.weight"] + self[f"{name}.bias"]

    def layer_norm(self, name: str, x_TD: Tensor, eps: float) -> Tensor:
        old = f"{name}.gamma" in self  # of early BERT files
        gain, bias = ("gamma", "beta") if old else ("weight", "bias")
        return F.layer_norm(
            x_TD, x_TD.shape[-1:], self[f"{name}.{gain}"], self[f"{name}.{bias}"], eps
        )

    def rms_norm(self, name: str, x_TD: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_TD, x_TD.shape[-1:], self[f"{name}.weight"], eps)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    known = {
        "gelu": F.gelu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
    }
    if name not in known:
        raise SpectralError(f"activation {name!r}: known are {', '.join(known)}")
    return known[name]


def _heads(x_TE: Tensor, heads: int) -> Tensor:
    """[H, T, K]."""
    return x_TE.unflatten(-1, (heads, -1)).transpose(0, 1)


def _attend(q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, *, causal: bool) -> Tensor:
    """[T, H K]."""
    o_HTK = F.scaled_dot_product_attention(q_HTK, k_HTK, v_HTK, is_causal=causal)
    return o_HTK.transpose(0, 1).flatten(1)


def _rotated(x_HTK: Tensor, base: float, width: int) -> Tensor:
    """RoPE on the first `width` channels of a head; channel i turns with i + width/2."""
    turned, kept = x_HTK[..., :width], x_HTK[..., width:]
    frequency = base ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(x_HTK.shape[1])[:, None] * torch.cat([frequency, frequency])
    left, right = turned.chunk(2, dim=-1)
    turned = turned * angle.cos() + torch.cat([-right, left], dim=-1) * angle.sin()
    return torch.cat([turned, kept], dim=-1)


def _rope(config: dict, default: float) -> tuple[float, float]:
    """Base and share of a head's channels.

    Raises:
        SpectralError: frequencies that are scaled.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise SpectralError(f"rope_scaling {kind!r}: a text is measured with plain RoPE alone")
    base = found.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    share = found.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return base or 10000.0, share or config.get("rotary_pct") or default


def _fits(tokens: int, limit: int | None, key: str) -> None:
    if limit is not None and tokens > limit:
        raise SpectralError(f"{tokens} tokens: the model's {key} is {limit}; lower --tokens")


def _gpt2(config: dict, weights: Weights, ids_T: Tensor) -> Iterator[Inputs]:
    weights = weights.under("h.0.attn.c_attn.weight")
    heads = config.get("n_head") or config["num_attention_heads"]
    eps, act = config.get("layer_norm_epsilon", 1e-5), _activation(config["activation_function"])
    table = weights["wpe.weight"]
    _fits(len(ids_T), len(table), "table of positions")
    x_TD = weights["wte.weight"][ids_T] + table[: len(ids_T)]
    for layer in range(config.get("num_hidden_layers") or config["n_layer"]):
        block = weights.at(f"h.{layer}")
        qkv = block.conv1d("attn.c_attn", block.layer_norm("ln_1", x_TD, eps)).chunk(3, dim=-1)
        q, k, v = (_heads(part, heads) for part in qkv)
        yield q, k
        x_TD = x_TD + block.conv1d("attn.c_proj", _attend(q, k, v, causal=True))
        inner = act(block.conv1d("mlp.c_fc", block.layer_norm("ln_2", x_TD, eps)))
        x_TD = x_TD + block.conv1d("mlp.c_proj", inner)


def _bert(config: dict, weights: Weights, ids_T: Tensor) -> Iterator[Inputs]:
    weights = weights.under("encoder.layer.0.attention.self.query.weight")
    heads, act = config["num_attention_heads"], _activation(config["hidden_act"])
    eps, parts = config.get("layer_norm_eps", 1e-12), weights.at("embeddings")
    table = parts["position_embeddings.weight"]
    _fits(len(ids_T), len(table), "table of positions")
    x_TD = parts["word_embeddings.weight"][ids_T] + table[: len(ids_T)]
    x_TD = parts.layer_norm("LayerNorm", x_TD + parts["token_type_embeddings.weight"][0], eps)
    for layer in range(config["num_hidden_layers"]):
        block = weights.at(f"encoder.layer.{layer}")
        q, k, v = (
            _heads(block.linear(f"attention.self.{name}", x_TD), heads)
            for name in ("query", "key", "value")
        )
        yield q, k
        out_TD = block.linear("attention.output.dense", _attend(q, k, v, causal=False))
        x_TD = block.layer_norm("attention.output.LayerNorm", x_TD + out_TD, eps)
        out_TD = block.linear("output.dense", act(block.linear("intermediate.dense", x_TD)))
        x_TD = block.layer_norm("output.LayerNorm", x_TD + out_TD, eps)


def _gpt_neox(config: dict, weights: Weights, ids_T: Tensor) -> Iterator[Inputs]:
    weights = weights.under("layers.0.attention.query_key_value.weight")
    heads, act = config["num_attention_heads"], _activation(config["hidden_act"])
    eps, parallel = config.get("layer_norm_eps", 1e-5), config.get("use_parallel_residual", True)
    base, share = _rope(config, 0.25)
    x_TD = weights["embed_in.weight"][ids_T]

    def mlp(block: Weights, x_TD: Tensor) -> Tensor:
        inner = block.layer_norm("post_attention_layernorm", x_TD, eps)
        return block.linear("mlp.dense_4h_to_h", act(block.linear("mlp.dense_h_to_4h", inner)))

    for layer in range(config["num_hidden_layers"]):
        block = weights.at(f"layers.{layer}")
        normed = block.layer_norm("input_layernorm", x_TD, eps)
        fused_HTE = _heads(block.linear("attention.query_key_value", normed), heads)
        q, k, v = fused_HTE.chunk(3, dim=-1)
        width = int(q.shape[-1] * share)
        q, k = _rotated(q, base, width), _rotated(k, base, width)
        yield q, k
        attended = x_TD + block.linear("attention.dense", _attend(q, k, v, causal=True))
        x_TD = attended + mlp(block, x_TD if parallel else attended)


def _llama(config: dict, weights: Weights, ids_T: Tensor) -> Iterator[Inputs]:
    weights = weights.under("layers.0.self_attn.q_proj.weight")
    heads, act = config["num_attention_heads"], _activation(config["hidden_act"])
    kv_heads, eps = config.get("num_key_value_heads") or heads, config.get("rms_norm_eps", 1e-6)
    base, share = _rope(config, 1.0)
    windowed = config.get("use_sliding_window", True)
    _fits(len(ids_T), config.get("sliding_window") if windowed else None, "sliding_window")
    x_TD = weights["embed_tokens.weight"][ids_T]
    for layer in range(config["num_hidden_layers"]):
        block = weights.at(f"layers.{layer}")
        normed = block.rms_norm("input_layernorm", x_TD, eps)
        q, k, v = (
            _heads(block.linear(f"self_attn.{name}_proj", normed), count)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if "self_attn.q_norm.weight" in block:
            q = block.rms_norm("self_attn.q_norm", q, eps)
            k = block.rms_norm("self_attn.k_norm", k, eps)
        width = int(q.shape[-1] * share)
        q, k = _rotated(q, base, width), _rotated(k, base, width)
        k, v = repeat_to(k, heads), repeat_to(v, heads)
        yield q, k
        x_TD = x_TD + block.linear("self_attn.o_proj", _attend(q, k, v, causal=True))
        normed = block.rms_norm("post_attention_layernorm", x_TD, eps)
        inner = act(block.linear("mlp.gate_proj", normed)) * block.linear("mlp.up_proj", normed)
        x_TD = x_TD + block.linear("mlp.down_proj", inner)


FORWARDS = {
    "gpt2": _gpt2,
    "bert": _bert,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
}
