"""Options of KLA and the delta-rule mixers that the same op gives."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import MixerConfig, require_divisible

Positive = Annotated[int, Field(gt=0)]
CHUNK = 64


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

    context_parallel: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.value_heads % self.heads:
            raise ValueError(
                f"value_heads={self.value_heads} is not a multiple of heads={self.heads}"
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
        raise NotImplementedError

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "heads", self.heads, tensor)
