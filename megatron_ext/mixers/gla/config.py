"""Options of gated linear attention."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_divisible,
    require_triton_device,
    require_triton_dims,
)

Positive = Annotated[int, Field(gt=0)]
CHUNK = 16
TRITON_CHUNK = 64
SEGMENT_CHUNKS = 2048
"""Of kernels/gated_linear_attention/chunk.py, which this file cannot import: it needs torch."""


class Config(MixerConfig):
    type: Literal["gla"] = "gla"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    key_dim: Positive
    value_dim: Positive
    decay_rank: Positive = 16
    """Width between the two factors that give each key channel its decay."""
    decay_temperature: Annotated[float, Field(gt=0)] = 16.0
    """tau: the decay is sigmoid(.)^(1/tau), so that it starts near 1."""
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
        return {"query": key, "key": key, "value": value, "gate": value, "decay": self.decay_rank}

    def parameters(self, hidden_size: int) -> dict[str, int]:
        key, value = self.widths()
        return {
            "projections": hidden_size * (sum(self.components().values()) + value),
            "decay": key * self.decay_rank + key,
            "norms": self.value_dim,
        }

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        K, V, chunk = self.key_dim, self.value_dim, min(CHUNK, sequence_length)
        # The chunkwise form: q times decay times k, and scores times values, over the earlier half
        # of the chunk; then two products with the state.
        within = chunk * (3 * K + 2 * V) / 2
        state = 2 * 2 * K * V
        decay = 2 * self.heads * K * self.decay_rank
        projections = 2 * self.parameters(hidden_size)["projections"]
        return projections + decay + self.heads * (within + state)

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        return self.heads * self.key_dim * self.value_dim * 4

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        key, value = self.widths()
        # The projection's output, of which q, k, v and the gate are views; the op's output and the
        # norm's.
        elements = sum(self.components().values()) + 2 * value
        # Logsigmoid's input and the log decay.
        fp32 = 2 * key
        if self.kernel == "triton":
            # q, k and v row by row; each chunk's scores, and the state before it. The log decay is
            # kept as its running sum.
            state = self.key_dim * self.value_dim / TRITON_CHUNK
            elements += 2 * key + value + self.heads * (TRITON_CHUNK + state)
        # The decay's inner factor in fp32, which every rank holds whole.
        return (elements * bytes_per_element + 4 * fp32) / tensor + 4 * self.decay_rank

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        K, V, key, value = self.key_dim, self.value_dim, *self.widths()
        # Backward recomputes a segment of chunks in fp32, and holds this much of each at its worst
        # moment (seen in kernels/gated_linear_attention/chunk.py).
        chunks = tokens / CHUNK * self.heads / tensor
        chunk = 8 * CHUNK * K + 3 * CHUNK * V + 4 * K * V + 4 * CHUNK**2 * K
        segment = 4 * min(chunks, SEGMENT_CHUNKS) * chunk
        # The gradients of the later segments' q, k, v and log decay are there by then.
        later = 1 - min(1, SEGMENT_CHUNKS / chunks)
        gradients = later * tokens / tensor * ((2 * key + value) * bytes_per_element + 4 * key)
        if self.kernel == "triton":
            # The gradients of q, log decay and scores; of each chunk's state, and before it what
            # adds up to that, in fp32, or the gradients of k and v.
            state = K * V / TRITON_CHUNK
            numbers = (K + TRITON_CHUNK + state) * bytes_per_element + 4 * K
            numbers += max(4 * state, (K + V) * bytes_per_element)
            segment, gradients = tokens * self.heads / tensor * numbers, 0
        # What followed the op is gone, in its stead there are gradients of output and gate.
        gone = 2 * tokens / tensor * value * bytes_per_element
        return segment + gradients - gone

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        # A diagonal map of the state, in fp32.
        state_map = 4 * self.heads * self.key_dim * (1 + self.value_dim)
        return (context - 1) * state_map / tensor

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)
        require_divisible(name, "decay_rank", self.decay_rank, tensor)

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        require_triton_device(name, self.kernel, device_type, precision)
