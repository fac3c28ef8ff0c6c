"""Options of S-D attention."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_context_divides,
    require_divisible,
    require_gpu_and_bf16,
)

Positive = Annotated[int, Field(gt=0)]
TRITON_DIMS = (64, 128)


class Config(MixerConfig):
    type: Literal["sd_attention"] = "sd_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    """Of queries, keys and values alike: a cached key holds its head's query too."""
    head_dim: Annotated[int, Field(gt=0, le=128)]
    """Scores are products of twice this width, and the kernels stop at 256."""
    d: Literal["token", "head"] = "token"
    """The damping: softplus of a projection of each token, or one number a head."""
    rope_base: Annotated[float, Field(gt=1)] | None = None
    """null: no position encoding but causality. With RoPE S stays skew-symmetric, but surgery that
    mixes a head's channels is not possible."""

    kernel: Literal["blockwise", "triton"] = "blockwise"
    """The op's form in training: torch's on any device (on a GPU in bf16 its FlashAttention), or
    Triton's, for bf16 on a GPU. Decoding is torch's."""

    context_parallel: ClassVar[bool] = True
    context_recordable: ClassVar[bool] = True

    @model_validator(mode="after")
    def _rotary_pairs(self):
        if self.rope_base is not None and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; use an even one or rope_base=null")
        return self

    @model_validator(mode="after")
    def _triton_widths(self):
        if self.kernel == "triton" and self.head_dim not in TRITON_DIMS:
            raise ValueError(
                f"kernel=triton takes a head_dim of 64 or 128, not {self.head_dim}; or use "
                "kernel=blockwise"
            )
        return self

    @property
    def width(self) -> int:
        """Of all heads' queries, keys or values."""
        return self.heads * self.head_dim

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        parts = {"query": self.width, "key": self.width, "value": self.width}
        return parts | ({"damping": self.heads} if self.d == "token" else {})

    def longest_sequence(self, trained_tokens: int) -> int | None:
        return trained_tokens if self.rope_base is not None else None

    def parameters(self, hidden_size: int) -> dict[str, int]:
        return {
            "projections": hidden_size * (sum(self.components().values()) + self.width),
            "damping": self.heads,
        }

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        # Scores of width 2 head_dim, and the values, over all earlier tokens.
        attended = (sequence_length - 1) / 2
        return 2 * self.parameters(hidden_size)["projections"] + 6 * self.width * attended

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        return 3 * context_tokens * self.width * bytes_per_element

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        # The projection's output, of which v is a view, and the op's output.
        elements = sum(self.components().values()) + self.width
        elements += 2 * self.width if self.rope_base is not None else 0  # q and k rotated
        # The damping and the log-sum-exp; softplus' argument where it is each token's own.
        fp32 = (3 if self.d == "token" else 2) * self.heads
        return (elements * bytes_per_element + 4 * fp32) / tensor

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        if self.kernel == "triton":
            # The output's gradient and those of q, k and v; of d, and <do, o>, in fp32.
            return tokens / tensor * (4 * self.width * bytes_per_element + 2 * 4 * self.heads)
        # Twice as wide as a head: q', k', v, the output and its gradient, the gradients of the
        # first three, and FlashAttention's fp32 sum for q's. Beside them the output's gradient as
        # it came, in the model's dtype and in fp32.
        elements = 2 * 8 + 1
        return tokens * self.width / tensor * (elements * bytes_per_element + 4 * 2 + 4)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        # q, k, v and the output; the damping in fp32.
        exchanged = 4 * self.width * element + 4 * self.heads
        return tokens * exchanged / tensor * (context - 1) / context

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)
        require_context_divides(name, "heads", self.heads // tensor, tensor, context)

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        if self.kernel == "triton":
            require_gpu_and_bf16(name, "blockwise", device_type, precision)
