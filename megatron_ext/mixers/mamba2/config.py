"""Options of Mamba-2."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_divisible,
    require_triton_device,
    require_triton_dims,
)

Positive = Annotated[int, Field(gt=0)]
CHUNK = 64
SEGMENT_CHUNKS = 2048
"""Of kernels/gated_linear_attention/chunk.py, which this file cannot import: it needs torch."""


class Config(MixerConfig):
    type: Literal["mamba2"] = "mamba2"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    """Groups of B and C (keys and queries); the output's norm is over the value heads of each."""
    value_heads: Positive
    """Heads of x, a multiple of `heads`; each has its own state, decay and step size."""
    key_dim: Positive
    """Width of B and C: the paper's state size."""
    value_dim: Positive
    """Width of a head of x."""
    conv_width: Positive = 4
    """Taps of the causal convolutions on x, B and C."""
    kernel: Literal["chunk", "triton"] = "chunk"
    """The op's form in training: torch's on any device, or Triton's, for bf16 on a GPU. The maps
    that context ranks exchange, and decoding, are torch's."""

    context_parallel: ClassVar[bool] = True
    context_recordable: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.value_heads % self.heads:
            raise ValueError(
                f"value_heads={self.value_heads} is not a multiple of heads={self.heads}"
            )
        require_triton_dims(self.kernel, self.key_dim, self.value_dim)
        return self

    def convolved(self) -> dict[str, int]:
        """Channels that pass the short convolution: the paper's C, B and x."""
        key = self.heads * self.key_dim
        return {"query": key, "key": key, "value": self.value_heads * self.value_dim}

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        value = self.value_heads * self.value_dim
        return {**self.convolved(), "gate": value, "step_size": self.value_heads}

    def parameters(self, hidden_size: int) -> dict[str, int]:
        value = self.value_heads * self.value_dim
        return {
            "projections": hidden_size * (sum(self.components().values()) + value),
            "convolution": sum(self.convolved().values()) * self.conv_width,
            "decay": 2 * self.value_heads,
            "skip": self.value_heads,
            "norms": value,
        }

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        K, V, chunk = self.key_dim, self.value_dim, min(CHUNK, sequence_length)
        # The chunkwise form: q k^T and scores times values over the earlier half of the chunk;
        # then two products with the state.
        within = chunk * (2 * K + 2 * V) / 2
        state = 2 * 2 * K * V
        convolution = 2 * sum(self.convolved().values()) * self.conv_width
        projections = 2 * self.parameters(hidden_size)["projections"]
        return projections + convolution + self.value_heads * (within + state)

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        state = self.value_heads * self.key_dim * self.value_dim * 4
        tail = (self.conv_width - 1) * sum(self.convolved().values()) * bytes_per_element
        return state + tail

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        value = self.value_heads * self.value_dim
        # The projection's output, which the gate is a view of; the convolution's input and output,
        # of which q, k and v are views.
        elements = sum(self.components().values()) + 2 * sum(self.convolved().values())
        # The input scaled by dt; the op's output with the skip, SiLU(gate), their product, the
        # norm's output, and that times its weight.
        elements += 6 * value
        # Softplus' input and output and the log decay, and the norm's statistics.
        fp32 = 3 * self.value_heads + self.heads
        if self.kernel == "triton":
            # q and k row by row; the state before each chunk, and the decay across it.
            elements += 2 * self.heads * self.key_dim
            elements += self.value_heads * self.key_dim * self.value_dim / CHUNK
            fp32 += self.value_heads / CHUNK
        return (elements * bytes_per_element + 4 * fp32) / tensor

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        K, V = self.key_dim, self.value_dim
        key, value = self.heads * K, self.value_heads * V
        # Backward recomputes a segment of chunks in fp32, and holds this much of each at its worst
        # moment (seen in kernels/gated_linear_attention/chunk.py).
        chunks = tokens / CHUNK * self.value_heads / tensor
        chunk = 4 * CHUNK * K + CHUNK * V + 6 * K * V + 6 * CHUNK**2
        segment = 4 * min(chunks, SEGMENT_CHUNKS) * chunk
        # The gradients of the later segments' q, k and v are there by then.
        later = 1 - min(1, SEGMENT_CHUNKS / chunks)
        gradients = later * tokens / tensor * (2 * key + value) * bytes_per_element
        if self.kernel == "triton":
            # Of each chunk's state the gradient, and before it what adds up to that, in fp32; or
            # the gradients of q, k and v, of each value head.
            state = K * V / CHUNK
            numbers = bytes_per_element * state + max(4 * state, bytes_per_element * (2 * K + V))
            segment, gradients = tokens * self.value_heads / tensor * numbers, 0
        # What followed the op is gone, in its stead there are gradients of output, skip and gate.
        gone = 2 * tokens / tensor * value * bytes_per_element
        # The convolution's: gradients of its output and input.
        convolved = tokens / tensor * sum(self.convolved().values()) * 2 * bytes_per_element
        return max(segment + gradients - gone, convolved)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        # A diagonal map of the state, in fp32, and the convolution's last tokens to every rank.
        state_map = 4 * self.value_heads * self.key_dim * (1 + self.value_dim)
        tail = (self.conv_width - 1) * sum(self.convolved().values()) * element
        return (context - 1) * (state_map + tail) / tensor

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        require_triton_device(name, self.kernel, device_type, precision)
