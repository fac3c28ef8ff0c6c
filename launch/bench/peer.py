"""`mixtron bench peer`: the training step of another library's model of a config's size.

    kla                 flash-linear-attention's GatedDeltaNetForCausalLM
    path                its PaTHAttentionForCausalLM
    softmax_attention   transformers' LlamaForCausalLM with torch's SDPA

In bf16 with torch's fused AdamW, whose state is in bf16 as well, on random tokens. Of
flash-linear-attention with both of its losses: of all logits, and chunk by chunk of them in less
memory. All of them need the `bench` extra.
"""

import importlib.util
import time
from typing import Any

import torch
from torch import nn

from mixtron.kernels.measure import table, versions
from mixtron.launch.config import RunConfig
from mixtron.megatron_ext.errors import ConfigError

PEERS = {
    "kla": "fla GatedDeltaNet",
    "path": "fla PaTHAttention",
    "softmax_attention": "transformers Llama",
}


def bench_peer(config: RunConfig, steps: int, warm_up: int) -> None:
    """Prints a table.

    Raises:
        ConfigError: no GPU, no peer of the config's mixers, or its library is missing.
    """
    kind = kind_of(config)
    if kind is None:
        raise ConfigError(
            f"model.pattern={config.model.pattern}: no peer; models of one mixer have, of type "
            f"{', '.join(PEERS)}"
        )
    if absent := missing(kind):
        raise ConfigError(f"{PEERS[kind]}: {absent} is missing; install the `bench` extra")
    if not torch.cuda.is_available():
        raise ConfigError("mixtron bench peer needs a GPU, and there is none")
    losses = {"": {}}
    if PEERS[kind].startswith("fla"):
        chunked = {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}
        losses = {", all logits": {}, ", logits by chunks": chunked}
    rows = [row(kind, config, steps, warm_up, name, loss) for name, loss in losses.items()]
    heads = ("peer", "parameters", "tokens a step", "ms a step", "tokens/s")
    print(f"{versions()}\n\n{table((*heads, 'peak GiB', 'reserved GiB'), rows)}\n")


def kind_of(config: RunConfig) -> str | None:
    """The type of the config's one mixer, if it has a peer."""
    kind, *others = {config.mixers[name].type for name in config.model.layer_mixers}
    return None if others or kind not in PEERS else kind


def missing(kind: str) -> str | None:
    """A library that the peer needs and that is not installed."""
    needed = ["transformers", *(["fla"] if PEERS[kind].startswith("fla") else [])]
    return next((name for name in needed if importlib.util.find_spec(name) is None), None)


def row(kind: str, config: RunConfig, steps: int, warm_up: int, name: str, loss: dict) -> tuple:
    """Of the table; the model is gone afterwards."""
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = build(kind, config, loss).to(torch.bfloat16).train()
    sequences, length = config.training.micro_batch_sequences, config.data.sequence_length
    seconds = seconds_per_step(model, sequences, length, config.model.vocab_size, steps, warm_up)
    tokens = sequences * length
    return (
        PEERS[kind] + name,
        f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M",
        f"{tokens:,}",
        f"{1000 * seconds:,.1f}",
        f"{tokens / seconds:,.0f}",
        f"{torch.cuda.max_memory_allocated() / 2**30:,.1f}",
        f"{torch.cuda.max_memory_reserved() / 2**30:,.1f}",
    )


def build(kind: str, config: RunConfig, loss: dict) -> nn.Module:
    """The peer's model with these options of its loss, drawn as its library draws it."""
    model = config.model
    mixer: Any = config.mixers[model.layer_mixers[0]]
    shape = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": config.data.sequence_length,
    }
    if kind == "softmax_attention":
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = {"num_attention_heads": mixer.heads, "num_key_value_heads": mixer.kv_heads}
        return LlamaForCausalLM(LlamaConfig(**shape, **heads, attn_implementation="sdpa"))  # type: ignore[call-arg]
    import fla.models as library  # pyright: ignore[reportMissingImports]
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]

    if kind == "path":
        heads = {"num_heads": mixer.heads, "num_kv_heads": mixer.kv_heads}
        return library.PaTHAttentionForCausalLM(
            library.PaTHAttentionConfig(**shape, **loss, **heads)
        )
    # It refuses Hopper with Triton 3.4 to 3.7; that is lifted, and its gradients are not checked.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    heads = {"num_heads": mixer.heads, "num_v_heads": mixer.value_heads}
    dims = {"head_dim": mixer.key_dim, "expand_v": mixer.value_dim / mixer.key_dim}
    return library.GatedDeltaNetForCausalLM(
        library.GatedDeltaNetConfig(**shape, **loss, **heads, **dims)
    )


def seconds_per_step(
    model: nn.Module, sequences: int, length: int, vocabulary: int, steps: int, warm_up: int
) -> float:
    """Mean over the steps; the first of all tune the library's kernels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, vocabulary, (sequences, length), device="cuda")
    started = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps
