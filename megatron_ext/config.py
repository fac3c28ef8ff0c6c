"""Sections of a run's configuration that the model and the optimizer are built from."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    bucket_parameters: Positive = 40_000_000
    """Parameters, or a few more, whose gradients are reduced and whose weights are gathered at a
    time; under DeepSpeed deepspeed.zero_optimization says it. Megatron's default grows by a million
    a data rank, until the whole model is one bucket and nothing overlaps."""

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


DEEPSPEED_OWNED = {
    "train_batch_size": "training.global_batch_tokens",
    "train_micro_batch_size_per_gpu": "training.micro_batch_sequences",
    "gradient_accumulation_steps": "training.global_batch_tokens",
    "gradient_clipping": "optimizer.clip_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "data_types": "training.precision",
    "communication_data_type": "training.precision",
    "activation_checkpointing": "training.recompute",
    "tensor_parallel": "parallel.tensor",
    "checkpoint": "checkpoint",
    "tensorboard": "logging.tensorboard",
    "zero_optimization.stage": "deepspeed.zero_stage",
    "zero_optimization.offload_optimizer": "deepspeed.offload",
    "zero_optimization.offload_param": "deepspeed.offload",
    "zero_optimization.overlap_comm": "parallel.overlap",
}
"""Keys of DeepSpeed's own config file that another key here decides."""


class ZeroOptimizationConfig(Section):
    """DeepSpeed's `zero_optimization`, as far as it changes speed and memory alone.

    null leaves DeepSpeed's default.
    """

    reduce_bucket_size: Positive = 100_000_000
    """Elements of gradients that are reduced at a time, in fp32 buffers of this size: one, two with
    parallel.overlap. DeepSpeed's own default is five times as much."""
    allgather_bucket_size: Positive | None = None
    """Elements of weights that are gathered at a time after a step (stages 1 and 2)."""
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    round_robin_gradients: bool | None = None
    sub_group_size: Positive | None = None
    """Elements that the optimizer works on at a time (stage 3)."""
    stage3_prefetch_bucket_size: Count | None = None
    stage3_param_persistence_threshold: Count | None = None
    """Parameters with fewer elements stay whole on every rank."""
    stage3_model_persistence_threshold: Count | None = None
    stage3_max_live_parameters: Count | None = None
    stage3_max_reuse_distance: Count | None = None


class DeepSpeedConfig(Section):
    """What `engine: deepspeed` takes beside the keys that both engines share."""

    zero_stage: Literal[1, 2, 3] = 1
    """Spread over data ranks: 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "optimizer+weights"] = "none"
    """What lives in host memory: fp32 weights and moments, which are then updated by the CPU; with
    stage 3 also the weights while they are not in use."""
    pin_memory: bool = True
    """Of what is offloaded: faster copies, and memory that the system cannot use otherwise."""
    zero_optimization: ZeroOptimizationConfig = ZeroOptimizationConfig()

    @model_validator(mode="before")
    @classmethod
    def _owned_elsewhere(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        inner = data.get("zero_optimization")
        names = [f"zero_optimization.{n}" for n in inner] if isinstance(inner, dict) else []
        for name in [*data, *names]:
            if name in DEEPSPEED_OWNED:
                raise ValueError(f"{name}: set {DEEPSPEED_OWNED[name]} instead, for both engines")
        return data

    @model_validator(mode="after")
    def _offload_of_weights(self):
        if self.offload == "optimizer+weights" and self.zero_stage < 3:
            raise ValueError(
                f"offload=optimizer+weights needs zero_stage=3, which is {self.zero_stage}: "
                "with less every rank keeps all weights; use offload=optimizer"
            )
        return self
