"""Options of Stochastic Attention, sliding-window attention and their gated sum."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_divisible,
    require_gpu_and_bf16,
)

Positive = Annotated[int, Field(gt=0)]
TRITON_DIMS = (64, 128)
TILE = 64
GROUP_SCORES = 1 << 24
"""Of kernels/windowed_attention, which this file cannot import: it needs torch."""


class Config(MixerConfig):
    type: Literal["stochastic"] = "stochastic"  # pyright: ignore[reportIncompatibleVariableOverride]
    heads: Positive
    kv_heads: Positive
    """Key/value heads; `heads` is a multiple of it."""
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    window: Positive
    """Slots of the permuted order that a token sees, and tokens in plain order, itself included."""
    paths: Literal["sa", "swa", "sa+swa"] = "sa+swa"
    """sa: a window of a random order; swa: of the plain one; sa+swa: both on the same q, k and v,
    each times a sigmoid gate."""
    window_side: Literal["two", "one"] = "two"
    """Of the random order: window // 2 slots before and (window - 1) // 2 after a token's own, or
    all before it. The plain order's window is always before."""
    gate: Literal["head", "channel"] = "head"
    """One gate a head and path, or one a channel."""
    resample: Literal["step", "fixed"] = "step"
    """A new permutation at every optimizer step, the same for its micro-batches, or one for all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the permutations. Part of the model: evaluation and decoding draw with it too."""
    decode_capacity: Positive = 4096
    """Tokens up to which a document can be decoded with a random order, drawn for that many."""
    rope_base: Annotated[float, Field(gt=1)] | None = 10000.0
    """null: no position encoding."""
    qk_norm: bool = False
    """RMSNorm over each query and key head, before RoPE."""

    kernel: Literal["tiled", "triton"] = "tiled"
    """The op's form in training: torch's on any device, or Triton's, for bf16 on a GPU. Decoding is
    torch's."""

    context_parallel: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.kernel == "triton" and self.head_dim not in TRITON_DIMS:
            raise ValueError(
                f"kernel=triton takes a head_dim of 64 or 128, not {self.head_dim}; or use "
                "kernel=tiled"
            )
        return self

    def path_names(self) -> list[str]:
        return ["sa", "swa"] if self.paths == "sa+swa" else [self.paths]

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        kv = self.kv_heads * self.head_dim
        rows = {"query": self.heads * self.head_dim, "key": kv, "value": kv}
        if len(self.path_names()) > 1:
            gates = self.heads * (1 if self.gate == "head" else self.head_dim)
            rows |= {f"{path}_gate": gates for path in self.path_names()}
        return rows

    def longest_sequence(self, trained_tokens: int) -> int | None:
        if self.paths == "swa":
            return None
        return min(self.decode_capacity, trained_tokens if self.rope_base else self.decode_capacity)

    def parameters(self, hidden_size: int) -> dict[str, int]:
        return {
            "projections": hidden_size
            * (sum(self.components().values()) + self.heads * self.head_dim),
            "norms": 2 * self.head_dim if self.qk_norm else 0,
        }

    def reach(self) -> tuple[int, int]:
        """Slots of the random order seen before and after a token's own."""
        if self.window_side == "two":
            return self.window // 2, (self.window - 1) // 2
        return self.window - 1, 0

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        n, attended = sequence_length, 0.0
        if "sa" in self.path_names():
            # A slot at offset o exists for (n - o) / n of the tokens, and holds an earlier one half
            # of the times.
            reaches = [min(reach, n - 1) for reach in self.reach()]
            attended += 1 + sum(r - r * (r + 1) / (2 * n) for r in reaches) / 2
        if "swa" in self.path_names():
            window = min(self.window, n)
            attended += window - window * (window - 1) / (2 * n)
        scores = 4 * self.heads * self.head_dim * attended
        return 2 * self.parameters(hidden_size)["projections"] + scores

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        kept, order = context_tokens, 2 * 8 * self.decode_capacity
        if self.paths == "swa":
            kept, order = self.window, 0
        return 2 * kept * self.kv_heads * self.head_dim * bytes_per_element + order

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        paths = len(self.path_names())
        # q, k, v and gates are views of one tensor, which v keeps whole.
        components = self.components()
        elements = sum(components.values())
        if self.rope_base is not None or self.qk_norm:
            elements += query + kv  # rotated or, without rotation, normalised
        elements += paths * query  # each path's output
        if paths > 1:
            elements += query  # their gated sum
            if self.kernel == "tiled":
                elements += 2 * components["sa_gate"]  # the sigmoids
        statistics = paths * self.heads  # log-sum-exp, fp32
        statistics += self.heads + self.kv_heads if self.qk_norm else 0
        kept = (elements * bytes_per_element + 4 * statistics) / tensor
        return kept + ("sa" in self.path_names()) * self._plan_bytes_per_token()

    def _plan_bytes_per_token(self) -> float:
        """Row, slot, token and document start of each slot; of each tile its extent and both
        sides' lists. int32."""
        listed = (7 + 2 * (self._tiles_met() + 2)) / TILE
        return 4 * (4 + listed)

    def _tiles_met(self) -> int:
        """Tiles around a tile that its window may touch, in segments of kernels/.../plan.py."""
        window = self.window
        segment = TILE * (1 if window < 256 else 2 if window < 512 else 4 if window < 2048 else 8)
        before, after = self.reach()
        return (1 + -(-before // segment) + -(-after // segment)) * segment // TILE

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # Gradients of the output, the paths' outputs and q, k and v of one path.
        gradients = (len(self.path_names()) + 2) * query + 2 * kv
        if self.kernel == "triton":
            # <do, o> of one path in fp32.
            return tokens / tensor * (gradients * bytes_per_element + 4 * self.heads)
        # A group of tiles in fp32: logits, weights, and the gradients of both.
        scores = tokens * self.heads / tensor * self._tiles_met() * TILE
        return tokens * gradients / tensor * bytes_per_element + 4 * 4 * min(scores, GROUP_SCORES)

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        query, kv = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        moved = 0.0
        if "sa" in self.path_names():
            # q and the output; k and v with the halo.
            moved += tokens * 2 * query + (tokens + self._halo(*self.reach(), tokens, context)) * kv
        if "swa" in self.path_names():
            moved += self._halo(self.window - 1, 0, tokens, context) * kv
        return moved / tensor * element * (context - 1) / context

    @staticmethod
    def _halo(before: int, after: int, tokens: int, context: int) -> float:
        """Rows around its own of the rank that moves the most: the mean of what it takes, in
        forward, and what it gives, whose gradients come back; less at the stream's ends."""

        def moved(rank: int) -> float:
            ahead, behind = (context - 1 - rank) * tokens, rank * tokens
            taken = min(before, behind) + min(after, ahead)
            return (taken + min(before, ahead) + min(after, behind)) / 2

        return max(map(moved, range(context)))

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        for field in ("heads", "kv_heads"):
            require_divisible(name, field, getattr(self, field), tensor)

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        if self.kernel == "triton":
            require_gpu_and_bf16(name, "tiled", device_type, precision)
