"""How tensors of ours and of a Hugging Face folder correspond."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.megatron_ext.config import ModelConfig
from mixtron.megatron_ext.errors import ConfigError

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
IN, OUT = "self_attention.in_proj", "self_attention.out_proj"
PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Link:
    """One of ours for theirs, joined along dimension 0; or our three for one of theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    heads: int = 0
    """Of a tensor of theirs that holds q, k and v of one head after the other; 0: it does not."""


def to_ours(model: ModelConfig, link: Link, theirs: list[Tensor]) -> dict[str, Tensor]:
    """By our names; the vocabulary filled up with zeros."""
    if link.heads:
        fused = theirs[0].unflatten(0, (link.heads, len(link.ours), -1))
        return {name: fused[:, i].flatten(0, 1) for i, name in enumerate(link.ours)}
    tensor = torch.cat(theirs)
    if link.ours[0] in (EMBEDDING, OUTPUT):
        missing = model.padded_vocab_size - len(tensor)
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, missing))
    return {link.ours[0]: tensor}


def to_theirs(model: ModelConfig, link: Link, ours: list[Tensor]) -> dict[str, Tensor]:
    """By their names; the vocabulary without what fills it up."""
    if link.heads:
        heads = [tensor.unflatten(0, (link.heads, -1)) for tensor in ours]
        return {link.theirs[0]: torch.stack(heads, dim=1).flatten(0, 2).contiguous()}
    (tensor,) = ours
    if link.ours[0] in (EMBEDDING, OUTPUT):
        tensor = tensor[: model.vocab_size]
    parts = tensor.chunk(len(link.theirs))
    return {name: part.contiguous() for name, part in zip(link.theirs, parts, strict=True)}


def rope_base(source: str, theirs: dict) -> float:
    """Older folders have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`.

    Raises:
        ConfigError: a scaled RoPE.
    """
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{source}: rope_type={kind!r}; only 'default' is supported")
    older = theirs.get("rope_theta", theirs.get("rotary_emb_base", 10000.0))
    return float(rope.get("rope_theta", older))
