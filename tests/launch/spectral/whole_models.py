"""Whole small random models of each Hugging Face family with a tokenizer, as forwards need them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

D, H, K, F, LAYERS, VOCABULARY = 24, 3, 8, 40, 3, 11
TEXT = "a b c d e f g h i j b d a c"
"""14 tokens: a word each."""


class Drawn(dict):
    """Tensors by name, drawn one after the other."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(9)

    def matrix(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self[f"{name}.weight"] = 0.4 * torch.randn(rows, columns, generator=self.generator)
        if bias:
            self[f"{name}.bias"] = 0.4 * torch.randn(rows, generator=self.generator)

    def norm(self, name: str, size: int = D, *, bias: bool = True) -> None:
        self[f"{name}.weight"] = 1 + 0.4 * torch.randn(size, generator=self.generator)
        if bias:
            self[f"{name}.bias"] = 0.4 * torch.randn(size, generator=self.generator)


def write_whole(family: str, folder: Path) -> Path:
    """A folder with config.json, model.safetensors and tokenizer.json."""
    folder.mkdir(parents=True)
    config, tensors = WHOLE[family]()
    config |= {"model_type": family, "vocab_size": VOCABULARY, "architectures": []}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    words = {word: i for i, word in enumerate("abcdefghij")} | {"?": VOCABULARY - 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _gpt2():
    t = Drawn()
    t.matrix("wte", VOCABULARY, D)
    t.matrix("wpe", 16, D)
    for i in range(LAYERS):
        block = f"h.{i}."
        t.norm(f"{block}ln_1")
        t.norm(f"{block}ln_2")
        for name, rows, columns in (
            ("attn.c_attn", 3 * D, D),
            ("attn.c_proj", D, D),
            ("mlp.c_fc", F, D),
            ("mlp.c_proj", D, F),
        ):
            t.matrix(f"{block}{name}", rows, columns, bias=True)
            t[f"{block}{name}.weight"] = t[f"{block}{name}.weight"].t().contiguous()
    t.norm("ln_f")
    config = {"n_embd": D, "n_head": H, "n_layer": LAYERS, "n_inner": F, "n_positions": 16}
    return config | {"activation_function": "gelu_new"}, t


def _bert():
    t = Drawn()
    for name, rows in (("word", VOCABULARY), ("position", 16), ("token_type", 2)):
        t.matrix(f"embeddings.{name}_embeddings", rows, D)
    t.norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        block = f"encoder.layer.{i}."
        for name in ("query", "key", "value"):
            t.matrix(f"{block}attention.self.{name}", D, D, bias=True)
        t.matrix(f"{block}attention.output.dense", D, D, bias=True)
        t.matrix(f"{block}intermediate.dense", F, D, bias=True)
        t.matrix(f"{block}output.dense", D, F, bias=True)
        t.norm(f"{block}attention.output.LayerNorm")
        t.norm(f"{block}output.LayerNorm")
    config = {"hidden_size": D, "num_attention_heads": H, "num_hidden_layers": LAYERS}
    config |= {"max_position_embeddings": 16, "type_vocab_size": 2}
    return config | {"intermediate_size": F, "hidden_act": "gelu"}, t


def _gpt_neox():
    t = Drawn()
    t.matrix("embed_in", VOCABULARY, D)
    for i in range(LAYERS):
        block = f"layers.{i}."
        t.norm(f"{block}input_layernorm")
        t.norm(f"{block}post_attention_layernorm")
        t.matrix(f"{block}attention.query_key_value", 3 * D, D, bias=True)
        t.matrix(f"{block}attention.dense", D, D, bias=True)
        t.matrix(f"{block}mlp.dense_h_to_4h", F, D, bias=True)
        t.matrix(f"{block}mlp.dense_4h_to_h", D, F, bias=True)
    t.norm("final_layer_norm")
    config = {"hidden_size": D, "num_attention_heads": H, "num_hidden_layers": LAYERS}
    config |= {"rotary_pct": 0.5, "rotary_emb_base": 100, "use_parallel_residual": True}
    return config | {"intermediate_size": F, "hidden_act": "gelu"}, t


def _llama(*, bias: bool = False, norms: bool = False):
    t = Drawn()
    t.matrix("embed_tokens", VOCABULARY, D)
    for i in range(LAYERS):
        block = f"layers.{i}."
        t.norm(f"{block}input_layernorm", bias=False)
        t.norm(f"{block}post_attention_layernorm", bias=False)
        t.matrix(f"{block}self_attn.q_proj", H * K, D, bias=bias)
        t.matrix(f"{block}self_attn.k_proj", K, D, bias=bias)
        t.matrix(f"{block}self_attn.v_proj", K, D, bias=bias)
        t.matrix(f"{block}self_attn.o_proj", D, H * K)
        t.matrix(f"{block}mlp.gate_proj", F, D)
        t.matrix(f"{block}mlp.up_proj", F, D)
        t.matrix(f"{block}mlp.down_proj", D, F)
        if norms:
            t.norm(f"{block}self_attn.q_norm", K, bias=False)
            t.norm(f"{block}self_attn.k_norm", K, bias=False)
    t.norm("norm", bias=False)
    config = {"hidden_size": D, "num_attention_heads": H, "num_hidden_layers": LAYERS}
    config |= {"num_key_value_heads": 1, "head_dim": K, "rope_theta": 100.0, "hidden_act": "silu"}
    return config | {"intermediate_size": F, "rms_norm_eps": 1e-6}, t


WHOLE = {
    "gpt2": _gpt2,
    "bert": _bert,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda: _llama(bias=True),
    "qwen3": lambda: _llama(norms=True),
}
