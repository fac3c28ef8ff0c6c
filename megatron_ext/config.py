"""Sections of a run's configuration that the model and the optimizer are built from."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    layers: Positive
    hidden_size: Positive
    ffn_hidden_size: Positive
    """Width of the feed-forward part."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    mlp_bias: bool = False
    parallel_residual: bool = False
    """Mixer and MLP both read the layer's input, and their outputs are added, as in GPT-NeoX."""
    vocab_size: Positive
    """The tokenizer's true vocabulary, added tokens included."""
    vocab_multiple: Positive = 128
    """The embedding is padded to a multiple of this whatever the parallel layout is."""
    pattern: Annotated[list[str], Field(min_length=1)]
    """Names from `mixers:`, repeated to the depth."""
    tied_embeddings: bool = False
    norm: Literal["rmsnorm", "layernorm", "none"] = "rmsnorm"
    """Before each mixer and MLP and before the output layer."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On each residual branch."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Projections into the residual stream are drawn with init_std / sqrt(2 layers)."""

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.mlp == "swiglu" else 2

    @property
    def mlp_parameters(self) -> int:
        """Of one layer."""
        biases = (self.mlp_matrices - 1) * self.ffn_hidden_size + self.hidden_size
        matrices = self.mlp_matrices * self.hidden_size * self.ffn_hidden_size
        return matrices + (biases if self.mlp_bias else 0)

    @property
    def layer_mixers(self) -> list[str]:
        """The mixer name of every layer, in order."""
        return [self.pattern[i % len(self.pattern)] for i in range(self.layers)]


class ParallelConfig(Section):
    tensor: Positive = 1
    sequence: bool = False
    """Sequence parallelism: activations between the mixers and MLPs are split over tensor ranks."""
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks a pipeline rank holds (interleaved schedule when above 1)."""
    context: Positive = 1
    overlap: bool = True
    """Gradient reduction overlaps with backward, parameter gathering with forward."""

    @property
    def model_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context


class OptimizerConfig(Section):
    type: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)]
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Applied to matrices; norms, biases, decays and gates are never decayed."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """0 switches clipping off."""
