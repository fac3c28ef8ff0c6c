"""Options of KLA and the delta-rule mixers that the same op gives."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_context_divides,
    require_divisible,
    require_gpu_and_bf16,
)

TRITON_DIMS = (64, 128)
Positive = Annotated[int, Field(gt=0)]
CHUNK = 64
SEGMENT_CHUNKS = 2048
"""Of kernels/delta_rule/chunk.py, which this file cannot import: it needs torch."""


class Config(MixerConfig):
    type: Literal["kla"] = "kla"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    """Query/key heads."""
    value_heads: Positive
    """Value heads, a multiple of `heads`; each has its own state, decay and step size."""
    key_dim: Positive
    value_dim: Positive
    conv_width: Positive = 4
    """Taps of the causal convolutions on q, k and v."""
    step_size: Literal["kaczmarz", "learned", "longhorn"] = "kaczmarz"
    """kaczmarz: eta/(|k|^2+eps); learned: eta (Gated DeltaNet, DeltaNet);
    longhorn: eta/(1+eta|k|^2)."""
    decay: Literal["gated", "none"] = "gated"
    """none: the state is never forgotten (DeltaNet, Longhorn)."""
    normalize_keys: bool = False
    """L2-normalise keys, as Gated DeltaNet and DeltaNet do; KLA does not."""
    output_gate: bool = True
    context_exchange: Literal["state", "relay", "heads"] = "state"
    """What context ranks exchange. state: a map of the state each, and none waits for another's.
    relay: the state itself, from each rank to the next, each behind the other; no map is computed,
    and fewer bytes are sent. heads: heads for tokens (then `heads` over TP must be divisible by
    parallel.context)."""
    kernel: Literal["chunk", "triton"] = "chunk"
    """The op's form, in training, in the maps that context ranks exchange and in decoding: torch's
    on any device, or Triton's, for bf16 on a GPU."""

    context_parallel: ClassVar[bool] = True
    context_recordable: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.value_heads % self.heads:
            raise ValueError(
                f"value_heads={self.value_heads} is not a multiple of heads={self.heads}"
            )
        dims = (self.key_dim, self.value_dim)
        if self.kernel == "triton" and not set(dims) <= set(TRITON_DIMS):
            raise ValueError(
                f"kernel=triton takes key_dim and value_dim of 64 or 128, not {dims[0]} and "
                f"{dims[1]}; or use kernel=chunk"
            )
        return self

    def convolved(self) -> dict[str, int]:
        """Channels that pass the short convolution."""
        key = self.heads * self.key_dim
        return {"query": key, "key": key, "value": self.value_heads * self.value_dim}

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        rows = self.convolved()
        if self.output_gate:
            rows["gate"] = rows["value"]
        rows["step_size"] = self.value_heads
        if self.decay == "gated":
            rows["decay"] = self.value_heads
        return rows

    def parameters(self, hidden_size: int) -> dict[str, int]:
        value = self.value_heads * self.value_dim
        return {
            "projections": hidden_size * (sum(self.components().values()) + value),
            "convolution": sum(self.convolved().values()) * self.conv_width,
            "decay": 2 * self.value_heads if self.decay == "gated" else 0,
            "norms": self.value_dim,
        }

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        key, value, chunk = self.key_dim, self.value_dim, min(CHUNK, sequence_length)
        # The chunkwise form: k k^T, q k^T, the triangular solve applied to k and v, and within a
        # chunk scores times values; then three products with the state.
        within = chunk * (2 * 2 * key + 2 * (key + value) + 2 * value) / 2
        state = 3 * 2 * key * value
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
        key, value = self.heads * self.key_dim, self.value_heads * self.value_dim
        # The projection's output, of which the convolution's inputs and the gate are views, and the
        # convolution's outputs.
        elements = sum(self.components().values()) + sum(self.convolved().values())
        elements += 2 * value  # the op's output and the norm's
        # Normalised keys, and queries where the op does not do it.
        elements += (self.normalize_keys + (self.kernel == "chunk")) * key
        fp32 = self.value_heads  # eta
        if self.decay == "gated":
            fp32 += self.value_heads  # the log decay
        kept = elements * bytes_per_element + 4 * fp32
        if self.kernel == "triton":
            # Two C x C matrices and an eighth of a state a chunk, and five numbers a token.
            state = self.key_dim * self.value_dim / (8 * CHUNK)
            kept += self.value_heads * (bytes_per_element * (2 * CHUNK + state) + 4 * 5)
        return kept / tensor

    def convolution_bytes_per_token(self, tensor: int, bytes_per_element: int) -> float:
        rows = self.convolved()
        # Triton's form does not keep v, but what it makes of it.
        kept = rows["query"] + rows["key"] + (rows["value"] if self.kernel == "chunk" else 0)
        return kept * bytes_per_element / tensor

    def gated_bytes_per_token(self, bytes_per_element: int) -> float:
        return self.components().get("gate", 0) * bytes_per_element

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        key, value, convolved = self.key_dim, self.value_dim, sum(self.convolved().values())
        # Backward recomputes a segment of chunks in fp32, and keeps this much of each (counted in
        # kernels/delta_rule/chunk.py).
        chunks = min(tokens / CHUNK * self.value_heads / tensor, SEGMENT_CHUNKS)
        chunk = 7 * CHUNK * key + 3 * CHUNK * value + 6 * CHUNK**2 + 2 * key**2 + 4 * key * value
        # What the norm and the projection kept is gone by then, in its stead there are gradients of
        # output and gate.
        segment = 4 * chunks * chunk
        if self.kernel == "triton":
            # The gradients of q, k and v; of a quarter of the chunks states, their gradients and
            # those of two C x C matrices.
            gradients = 2 * key + value + (2 * key * value / CHUNK + 2 * CHUNK) / 4
            segment = tokens * self.value_heads * gradients * bytes_per_element / tensor
        # The convolution's: gradients of its output and input, and of the whole projection's.
        rows = 2 * convolved + sum(self.components().values())
        return max(segment, tokens * rows * bytes_per_element / tensor)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        tail = (self.conv_width - 1) * sum(self.convolved().values()) * element
        if self.context_exchange == "heads":
            # q, k, v and the output in the model's dtype, log decay and eta in fp32.
            rows = sum(self.convolved().values()) + self.value_heads * self.value_dim
            moved = tokens * (rows * element + 2 * 4 * self.value_heads) / tensor
            return moved * (context - 1) / context + (context - 1) * tail / tensor
        state = 4 * self.value_heads * self.key_dim * self.value_dim
        if self.context_exchange == "relay":
            # Forward the last rank sends nothing, backward the first: the mean over the ranks.
            return (state + tail) * (context - 1) / context / tensor
        # An affine map of the state, in fp32, and the convolution's last tokens to every rank.
        transition = 4 * self.value_heads * self.key_dim**2
        return (context - 1) * (transition + state + tail) / tensor

    @property
    def exchanges_again(self) -> bool:
        return self.context_exchange != "relay"

    def context_bytes_kept(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        if self.kernel != "triton" or self.context_exchange != "state":
            return 0.0
        # The map's scan keeps what the op's keeps, for key_dim more columns of values.
        columns = self.key_dim + self.value_dim
        kept = columns + 2 * CHUNK + self.key_dim * columns / (8 * CHUNK)
        return tokens * self.value_heads * (element * kept + 4 * 5) / tensor

    def context_bytes_needed(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        if self.kernel != "triton" or self.context_exchange != "state":
            return 0.0
        # Of the map's further columns: states and their gradients of a quarter of the chunks, the
        # gradients of values and of the unused output.
        needed = self.key_dim**2 / (2 * CHUNK) + 2 * self.key_dim + self.value_dim
        return tokens * self.value_heads * element * needed / tensor

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)
        if self.context_exchange == "heads":
            require_context_divides(name, "heads", self.heads // tensor, tensor, context)

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        if self.kernel == "triton":
            require_gpu_and_bf16(name, "chunk", device_type, precision)
