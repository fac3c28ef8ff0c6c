"""Options of log-linear attention."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_divisible,
    require_triton_device,
    require_triton_dims,
)

Positive = Annotated[int, Field(gt=0)]
CHUNK = 64
SEGMENT_CHUNKS = 512
"""Of kernels/log_linear_attention/chunk.py, which this file cannot import: it needs torch."""


class Config(MixerConfig):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["log_linear"] = "log_linear"  # pyright: ignore[reportIncompatibleVariableOverride]
    base: Literal["gated_linear", "gated_delta"] = "gated_linear"
    """What a state is: Mamba-2's, or Gated DeltaNet's."""
    heads: Positive
    """Query/key heads."""
    value_heads: Positive
    """Value heads, a multiple of `heads`; each has its own tree, decay and lambda."""
    key_dim: Positive
    value_dim: Positive
    conv_width: Positive = 4
    """Taps of the causal convolutions on q, k and v."""
    level_weights: Annotated[
        Literal["fixed", "linear", "mlp_softplus", "mlp_softmax"], Field(alias="lambda")
    ] = "mlp_softplus"
    """How a level is weighed: by a number a head, by a scaled projection of the token, or by a
    small network of that projection which all heads share."""
    mlp_activation: Literal["none", "gelu"] = "none"
    """Between the network's two layers."""
    levels: Positive | None = None
    """Of the tree; null takes 1 + ceil(log2(data.sequence_length))."""
    kernel: Literal["chunk", "triton"] = "chunk"
    """The op's form in training: torch's on any device, or Triton's, for bf16 on a GPU. The
    maps that context ranks exchange, and decoding, are torch's."""

    context_parallel: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.value_heads % self.heads:
            raise ValueError(
                f"value_heads={self.value_heads} is not a multiple of heads={self.heads}"
            )
        if self.mlp_activation != "none" and not self.level_weights.startswith("mlp"):
            raise ValueError(
                f"mlp_activation={self.mlp_activation} needs lambda=mlp_softplus or mlp_softmax, "
                f"found lambda={self.level_weights}"
            )
        require_triton_dims(self.kernel, self.key_dim, self.value_dim)
        return self

    def for_sequence_length(self, name: str, sequence_length: int) -> Self:
        needed = 1 + (sequence_length - 1).bit_length()
        if self.levels is None:
            return self.model_copy(update={"levels": needed})
        if self.levels < needed:
            raise ValueError(
                f"mixers.{name}.levels={self.levels} hold {2 ** (self.levels - 1)} tokens, but "
                f"data.sequence_length={sequence_length} needs levels={needed}"
            )
        return self

    @property
    def L(self) -> int:
        """Levels, once they are known."""
        assert self.levels is not None, "for_sequence_length sets the levels"
        return self.levels

    def convolved(self) -> dict[str, int]:
        """Channels that pass the short convolution."""
        key = self.heads * self.key_dim
        return {"query": key, "key": key, "value": self.value_heads * self.value_dim}

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        value = self.value_heads * self.value_dim
        rows = {**self.convolved(), "gate": value}
        if self.base == "gated_delta":
            rows["step_size"] = self.value_heads
        rows["decay"] = self.value_heads
        if self.level_weights != "fixed":
            rows["levels"] = self.value_heads * self.L
        return rows

    def longest_sequence(self, trained_tokens: int) -> int | None:
        return 2 ** (self.L - 1)

    def parameters(self, hidden_size: int) -> dict[str, int]:
        J, L = self.value_heads, self.L
        value, linear = J * self.value_dim, self.base == "gated_linear"
        rows = self.components()
        levels = rows.pop("levels", 0)
        parts = {
            "projections": hidden_size * (sum(rows.values()) + value),
            "lambda_projection": hidden_size * levels,
            "convolution": sum(self.convolved().values()) * self.conv_width,
            "decay": 2 * J,
            "skip": J if linear else 0,
            "norms": value if linear else self.value_dim,
        }
        if self.level_weights.startswith("mlp"):
            return parts | {"lambda_mlp": 4 * L**2 + L}
        return parts | {"lambda_table": J * L}

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        K, V, L = self.key_dim, self.value_dim, self.L
        chunk = min(CHUNK, sequence_length)
        # Within a chunk: q k^T, scores times values, lambdas; over the earlier half of it.
        within = chunk * (2 * K + 2 * V + 2) / 2
        state = 2 * K * V
        if self.base == "gated_delta":
            # k k^T, the inverse, and its products with the scores and the keys; the erasure.
            within += chunk * (2 * K + 3 * 2 * chunk + 2 * K) / 2
            state += 2 * K * K + 2 * K * V
        # Half of the larger nodes are there for a token, which reads each.
        read = max(0, L - 1 - (CHUNK.bit_length() - 1)) / 2 * 2 * K * V
        convolution = 2 * sum(self.convolved().values()) * self.conv_width
        mlp = 2 * 4 * L**2 if self.level_weights.startswith("mlp") else 0
        projections = 2 * hidden_size * (sum(self.components().values()) + self.value_heads * V)
        return projections + convolution + self.value_heads * (within + state + read + mlp)

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        node = self.value_heads * self.key_dim * self.value_dim * 4
        tail = (self.conv_width - 1) * sum(self.convolved().values()) * bytes_per_element
        return context_tokens.bit_length() * node + tail

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        K, V, J, L = self.key_dim, self.value_dim, self.value_heads, self.L
        key, value = self.heads * K, J * V
        # The projection's output, of which gate, decay and levels are views; the convolution's
        # input and output, of which q, k and v are views.
        elements = sum(self.components().values()) + 2 * sum(self.convolved().values())
        if self.base == "gated_linear":
            # The input scaled by dt; the op's output with the skip, SiLU(gate), their product, the
            # norm's output, and that times its weight. Softplus and the log decay; statistics.
            elements += 6 * value
            fp32 = 3 * J + self.heads
        else:
            # The op's output and the norm's; q and k normalised; softplus' input and output, the
            # log decay, beta.
            elements += 2 * value + 2 * key
            fp32 = 4 * J
        # d and lambda; softplus' input; the network's hidden layer.
        of_levels = {"fixed": 0, "linear": 3, "mlp_softplus": 5, "mlp_softmax": 4}
        fp32 += of_levels[self.level_weights] * J * L
        if self.mlp_activation == "gelu":
            fp32 += 2 * J * L
        if self.kernel == "triton":
            elements += self._triton_elements(key)
            # The decay in a chunk.
            fp32 += J
        return (elements * bytes_per_element + 4 * fp32) / tensor

    def _triton_elements(self, key: int) -> float:
        """Kept a token by the Triton form beyond its inputs."""
        K, V, J = self.key_dim, self.value_dim, self.value_heads
        larger = max(0, self.L - CHUNK.bit_length())
        if self.base == "gated_linear":
            # q and k row by row; and a node a chunk.
            return 2 * key + J * K * V / CHUNK
        # v row by row; the chunks' maps; and the nodes that a chunk reads, of half the bits.
        return J * (V + 2 * CHUNK + 2 * K + K * K / CHUNK + larger / 2 * K * V / CHUNK)

    def _triton_working(self, bytes_per_element: int) -> float:
        """Bytes a token and value head that the Triton form's backward needs in passing."""
        K, V, state = self.key_dim, self.value_dim, self.key_dim * self.value_dim / CHUNK
        larger = max(0, self.L - CHUNK.bit_length())
        inputs = (2 * K + V) * bytes_per_element + 4 * (self.L + 2)
        if self.base == "gated_linear":
            # The nodes' gradients, in fp32, and what they are made of: parts of at most 16 chunks;
            # or, later, the gradients of the inputs.
            return 4 * state + max((1 + max(0, larger - 4) / 32) * 4 * state, inputs)
        # The gradients of the nodes that a chunk reads and of what it writes; or, later, of the
        # maps and the inputs.
        maps = (CHUNK + 2 * K) * bytes_per_element + inputs
        transition = (state + K * K / CHUNK) * bytes_per_element
        return transition + max(larger / 2 * state * bytes_per_element, maps)

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        K, V, J, L = self.key_dim, self.value_dim, self.value_heads, self.L
        key, value = self.heads * K, J * V
        # Backward recomputes a segment of chunks in fp32, and holds this much of each at its worst
        # moment (seen in kernels/log_linear_attention/chunk.py).
        chunks = tokens / CHUNK * J / tensor
        larger = max(0, L - CHUNK.bit_length())
        chunk = 5 * CHUNK * K + 4 * CHUNK * V + 6 * CHUNK**2 + 3 * K * V
        chunk += larger * (5 * K * V + CHUNK * K)
        if self.base == "gated_delta":
            chunk += 2 * CHUNK * K + 5 * CHUNK**2 + K**2 + larger * 2 * K**2
        segment = 4 * min(chunks, SEGMENT_CHUNKS) * chunk
        # The gradients of the later segments' inputs are there by then.
        later = 1 - min(1, SEGMENT_CHUNKS / chunks)
        inputs = (2 * key + value) * bytes_per_element + 4 * J * (L + 2)
        gradients = later * tokens / tensor * inputs
        if self.kernel == "triton":
            segment = tokens * J / tensor * self._triton_working(bytes_per_element)
            gradients = 0
        # What followed the op is gone, in its stead there are gradients of output and gate.
        gone = 2 * tokens / tensor * value * bytes_per_element
        # The convolution's: gradients of its output and input.
        convolved = tokens / tensor * sum(self.convolved().values()) * 2 * bytes_per_element
        return max(segment + gradients - gone, convolved)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        """For documents that begin where a rank does: the nodes of a rank's own tokens. Others
        have up to 2 + log2(tokens)."""
        K, V = self.key_dim, self.value_dim
        transition = K * K if self.base == "gated_delta" else 1
        nodes = 4 * self.value_heads * (tokens.bit_count() * K * V + transition)
        tail = (self.conv_width - 1) * sum(self.convolved().values()) * element
        return (context - 1) * (nodes + tail) / tensor

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        require_triton_device(name, self.kernel, device_type, precision)
