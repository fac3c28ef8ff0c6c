"""Options of linear attention."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_divisible,
    require_triton_device,
    require_triton_dims,
)

Positive = Annotated[int, Field(gt=0)]
ONES_DIM = 16
"""Of kernels/linear_attention/triton_op.py, as those below."""
CHUNK = 64
SEGMENT_CHUNKS = 2048
"""Of kernels/gated_linear_attention/chunk.py, which this file cannot import: it needs torch."""


class Config(MixerConfig):
    type: Literal["linear_attention"] = "linear_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    key_dim: Positive
    value_dim: Positive
    kernel: Literal["chunk", "triton"] = "chunk"
    """The op's form in training: torch's on any device, or Triton's, for bf16 on a GPU. The maps
    that context ranks exchange, and decoding, are torch's."""

    context_parallel: ClassVar[bool] = True
    context_recordable: ClassVar[bool] = True

    @model_validator(mode="after")
    def _triton(self) -> Self:
        require_triton_dims(self.kernel, self.key_dim, self.value_dim)
        return self

    def widths(self) -> tuple[int, int]:
        """Of all heads' keys and of all heads' values."""
        return self.heads * self.key_dim, self.heads * self.value_dim

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        key, value = self.widths()
        return {"query": key, "key": key, "value": value}

    def parameters(self, hidden_size: int) -> dict[str, int]:
        _, value = self.widths()
        return {"projections": hidden_size * (sum(self.components().values()) + value)}

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        K, W = self.key_dim, self.value_dim + 1
        # Scores and values over the earlier half of the chunk, then two products with the state.
        within = min(CHUNK, sequence_length) * (K + W)
        projections = 2 * self.parameters(hidden_size)["projections"]
        return projections + self.heads * (within + 2 * 2 * K * W)

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        return self.heads * self.key_dim * (self.value_dim + 1) * 4

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        key, value = self.widths()
        if self.kernel == "triton":
            # The features, values, output, the normaliser's ones, and the states before each chunk;
            # in fp32 the sums that the output is divided from, the divisor, the log decays.
            ones = self.heads * ONES_DIM
            states = (self.value_dim + ONES_DIM) * key / CHUNK
            elements, fp32 = 2 * key + 2 * value + ones + states, value + 4 * self.heads
            return (elements * bytes_per_element + 4 * fp32) / tensor
        # In fp32: the features, values and output with the normaliser's column, the normaliser as
        # divided by, the log decay.
        fp32 = 2 * key + 2 * (value + self.heads) + 2 * self.heads
        return (value * bytes_per_element + 4 * fp32) / tensor

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        K, W, key, value = self.key_dim, self.value_dim + 1, *self.widths()
        if self.kernel == "triton":
            # The gradients of the sums, in fp32, twice; of each chunk's state, and before it what
            # adds up to that, in fp32; or those of the features and values.
            state = K * self.value_dim / CHUNK
            inputs = bytes_per_element * (2 * K + self.value_dim)
            head = 2 * 4 * W + bytes_per_element * state + max(4 * state, inputs)
            return tokens * self.heads / tensor * head
        # Backward recomputes a segment of chunks in fp32: its inputs, scores, states and the
        # gradients of each.
        chunks = tokens / CHUNK * self.heads / tensor
        chunk = 8 * CHUNK * K + 4 * CHUNK * W + 4 * K * W + 4 * CHUNK**2
        segment = 4 * min(chunks, SEGMENT_CHUNKS) * chunk
        # The gradients of the later segments' features and values are there by then.
        later = 1 - min(1, SEGMENT_CHUNKS / chunks)
        return segment + later * tokens / tensor * 4 * (2 * key + value + 2 * self.heads)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        # A diagonal map of the state, in fp32.
        state_map = 4 * self.heads * self.key_dim * (1 + self.value_dim + 1)
        return (context - 1) * state_map / tensor

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        require_triton_device(name, self.kernel, device_type, precision)
