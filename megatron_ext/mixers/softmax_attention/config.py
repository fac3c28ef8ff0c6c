"""Options of softmax attention."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.base import (
    TRITON_DIMS,
    MixerConfig,
    require_context_divides,
    require_divisible,
)

CUDNN_LARGEST_DIM = 128
Positive = Annotated[int, Field(gt=0)]


class Config(MixerConfig):
    type: Literal["softmax_attention"] = "softmax_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    kv_heads: Positive
    """Key/value heads; `heads` is a multiple of it."""
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    rope_base: Annotated[float, Field(gt=1)] | None = 10000.0
    """null: no position encoding."""
    qk_norm: bool = False
    """RMSNorm over each query and key head, before RoPE."""
    qkv_bias: bool = False
    """A bias on queries, keys and values, as Qwen2 has; it starts at 0."""
    output_bias: bool = False
    """One on the output projection as well, as GPT-NeoX has."""
    rotary_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = None
    """Channels of a head, the first ones, that RoPE rotates; null: all."""
    window: Positive | None = None
    """Tokens a token attends, itself included; null is all before it."""
    kernel: Literal["torch", "cudnn", "triton"] = "torch"
    """The op's form in training: torch's FlashAttention-2 (on a CPU its attention); cuDNN's where
    all documents of a micro-batch have one length, and FlashAttention-2 where they have not; or
    Triton's. The last two run in bf16 on a GPU, without a window."""

    context_parallel: ClassVar[bool] = True
    context_recordable: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} is more than head_dim={self.head_dim}")
        if self.kernel != "torch" and self.window is not None:
            raise ValueError(
                f"kernel={self.kernel} takes no window, and window={self.window}; use kernel=torch"
            )
        if self.kernel == "triton" and self.head_dim not in TRITON_DIMS:
            raise ValueError(
                f"kernel=triton takes a head_dim of 64 or 128, not {self.head_dim}; or use "
                "kernel=torch"
            )
        if self.kernel == "cudnn" and (self.head_dim % 8 or self.head_dim > CUDNN_LARGEST_DIM):
            raise ValueError(
                f"kernel=cudnn takes a head_dim that is a multiple of 8 up to {CUDNN_LARGEST_DIM}, "
                f"not {self.head_dim}; or use kernel=torch"
            )
        return self

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        kv = self.kv_heads * self.head_dim
        return {"query": self.heads * self.head_dim, "key": kv, "value": kv}

    def longest_sequence(self, trained_tokens: int) -> int | None:
        # Inside a window rotary positions are relative to it, wherever it is.
        return trained_tokens if self.rope_base is not None and self.window is None else None

    def parameters(self, hidden_size: int) -> dict[str, int]:
        return {
            "projections": hidden_size
            * (sum(self.components().values()) + self.heads * self.head_dim),
            "norms": 2 * self.head_dim if self.qk_norm else 0,
            "biases": self.qkv_bias * sum(self.components().values())
            + self.output_bias * hidden_size,
        }

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        attended = (sequence_length + 1) / 2
        if self.window is not None and self.window < sequence_length:
            attended = self.window - self.window * (self.window - 1) / (2 * sequence_length)
        scores = 4 * self.heads * self.head_dim * attended
        return 2 * self.parameters(hidden_size)["projections"] + scores

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        kept = min(context_tokens, self.window or context_tokens)
        return 2 * kept * self.kv_heads * self.head_dim * bytes_per_element

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projected = query + 2 * kv
        grouped = self.heads != self.kv_heads and self.kernel != "triton"
        elements = query  # the output
        elements += 2 * query if grouped else 0  # k and v repeated over the group
        if self.rope_base is not None:
            elements += query if grouped else query + kv  # q (and k) rotated
        # q, k and v are views of one tensor, which stays whole while anything reads one of them.
        if self.qk_norm or self.rope_base is None or not grouped:
            elements += projected
        if self.qk_norm and self.rope_base is None:
            elements += query if grouped else query + kv  # q (and k) normalised
        return (elements * bytes_per_element + 4 * self.heads) / tensor  # log-sum-exp in fp32

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.kernel == "triton":
            # Gradients of the output and of q, k, v, a dense copy of v, a sum a head in fp32.
            elements = 2 * query + 3 * kv
            return tokens * (elements * bytes_per_element + 4 * self.heads) / tensor
        # Gradients of the output and of q, k, v over all query heads, and an fp32 sum for q's.
        return tokens * query / tensor * (4 * bytes_per_element + 4)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        exchanged = 2 * (self.heads + self.kv_heads) * self.head_dim  # q, k, v, and the output
        return tokens * exchanged / tensor * element * (context - 1) / context

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        for field in ("heads", "kv_heads"):
            value = getattr(self, field)
            require_divisible(name, field, value, tensor)
            require_context_divides(name, field, value // tensor, tensor, context)

    @property
    def recordable(self) -> bool:
        return True

    def reads_lengths(self, precision: str) -> bool:
        return self.kernel == "cudnn" or precision == "fp32"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        if self.kernel != "torch" and (device_type != "cuda" or precision != "bf16"):
            raise ConfigError(
                f"mixers.{name}.kernel={self.kernel} runs on a GPU in bf16, not on {device_type} "
                f"in {precision}; set mixers.{name}.kernel=torch"
            )

    def check_deterministic(self, name: str) -> None:
        if self.kernel == "cudnn":
            raise ConfigError(
                f"training.deterministic=true: mixers.{name}.kernel=cudnn adds gradients in no "
                "fixed order; use torch or triton"
            )
