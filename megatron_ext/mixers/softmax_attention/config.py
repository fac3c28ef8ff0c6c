"""Options of softmax attention."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_context_divides,
    require_divisible,
)

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

    context_parallel: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.rotary_dim is not None and self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} is more than head_dim={self.head_dim}")
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
        grouped = self.heads != self.kv_heads
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
        query = self.heads * self.head_dim
        # Gradients of the output and of q, k, v over all query heads, and FlashAttention's fp32
        # sum for q's.
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
