"""Options of PaTH attention, and what FoX shares with it."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.base import (
    MixerConfig,
    require_context_divides,
    require_divisible,
)

Positive = Annotated[int, Field(gt=0)]
SHORTEST_BLOCK, LONGEST_BLOCK, PLAIN_BLOCK = 16, 128, 64
"""Of kernels/path_attention/blocks.py, which this file cannot import: it needs torch."""
TRITON_DIMS, TRITON_TILE, TRITON_WORKSPACE_BYTES = (64, 128), 128, 3 * 2**28
"""Of kernels/path_attention/triton_op.py and triton_plan.py, likewise."""


def segments_back(longest: int, tokens: int) -> int:
    """How many segments of so many tokens a document goes back at most: segment s's first token and
    the last of segment s - n are (n - 1) tokens + 1 apart."""
    return (longest - 2) // tokens + 1 if longest > 1 else 0


def own_segments(tokens: int, context: int, longest: int) -> list[list[int]]:
    """Of each context rank, ascending. Two are r and 2 cp - 1 - r: an early half shard, of few
    keys, and a late one of many, for equal work. Where no document goes further back than one
    shard all ranks but the first have equal work as they are, and a rank has its shard; so too
    where a shard has no two equal halves.
    """
    if segments_back(longest, tokens) > 1 and tokens % 2 == 0:
        return [[rank, 2 * context - 1 - rank] for rank in range(context)]
    return [[rank] for rank in range(context)]


def _segments_before(tokens: int, context: int, longest: int) -> list[list[int]]:
    """How many that hold keys of its documents each of the ranks' segments has before it."""
    ranks = own_segments(tokens, context, longest)
    reach = segments_back(longest, tokens // len(ranks[0]))
    return [[min(segment, reach) for segment in own] for own in ranks]


class PathFamilyConfig(MixerConfig):
    """Softmax attention whose positions come from Householder maps, a forget gate, or both."""

    heads: Positive
    kv_heads: Positive
    """Key/value heads; `heads` is a multiple of it."""
    head_dim: Positive
    qk_norm: bool = False
    """RMSNorm over each query and key head."""
    gate_scale: Annotated[float, Field(gt=0)] = 1.0
    """Weighs the forget gate's sum in the scaled logit; 1 is FoX's meaning."""
    context_exchange: Literal["keys", "ring", "heads"] = "keys"
    """What context ranks exchange. keys: every rank's keys, values and composed maps, gathered;
    ring: the same, passed on from rank to rank, of which nothing is kept for backward; heads: heads
    for tokens (`kv_heads` over TP divisible by parallel.context). All have equal work."""

    kernel: Literal["block", "triton"] = "block"
    """The op's form in training and decoding: torch's on any device, or Triton's, for bf16 on a
    GPU. What context ranks exchange is torch's."""

    context_parallel: ClassVar[bool] = True

    @model_validator(mode="after")
    def _groups(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.kernel == "triton" and self.head_dim not in TRITON_DIMS:
            raise ValueError(
                f"kernel=triton takes head_dim of 64 or 128, not {self.head_dim}; or use "
                "kernel=block"
            )
        return self

    @property
    def rank(self) -> int:
        """Of the projection that gives the Householder vectors; 0 without maps."""
        raise NotImplementedError

    @property
    def gated(self) -> bool:
        """Whether there is a forget gate."""
        raise NotImplementedError

    @property
    def taps(self) -> int:
        """Of the convolution on the Householder vectors."""
        return 0

    @property
    def largest_beta(self) -> float:
        """At which beta is cut off."""
        return 2.0

    def widths(self) -> tuple[int, int]:
        """Of all query heads, and of all key (or value) heads."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim

    def components(self) -> dict[str, int]:
        """Rows of the fused input projection."""
        query, kv = self.widths()
        rows = {"query": query, "key": kv, "value": kv}
        if self.rank:
            rows |= {"householder": self.rank, "beta": self.kv_heads}
        if self.gated:
            rows["forget"] = self.heads
        return rows

    def parameters(self, hidden_size: int) -> dict[str, int]:
        query, kv = self.widths()
        return {
            "projections": hidden_size * (sum(self.components().values()) + query),
            "maps": kv * (self.rank + self.taps) + self.kv_heads if self.rank else 0,
            "gates": self.heads if self.gated else 0,
            "norms": 2 * self.head_dim if self.qk_norm else 0,
        }

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        attended, K, G, (_, kv) = (
            (sequence_length + 1) / 2,
            self.head_dim,
            self.kv_heads,
            self.widths(),
        )
        scores = 4 * self.heads * K * attended
        maps = 0.0
        if self.rank:
            C = min(max(SHORTEST_BLOCK, min(K, LONGEST_BLOCK)), sequence_length)
            low_rank = 2 * kv * (self.rank + self.taps)
            # w w^T, w k^T, the solve, keys and map; of each query head q w^T and two products.
            within = G * (2 * C * 3 * K + C * (C + K) + 2 * K * K) + self.heads * 2 * C * (
                2 * K + C
            )
            # Every block carries all keys before it on.
            maps = low_rank + within + 2 * G * K * K * attended / C
        return 2 * self.parameters(hidden_size)["projections"] + scores + maps

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        _, kv = self.widths()
        key_bytes = 4 if self.rank else bytes_per_element
        gate = 4 * self.heads if self.gated else 0
        tail = max(self.taps - 1, 0) * kv * bytes_per_element
        return context_tokens * (kv * (key_bytes + bytes_per_element) + gate) + tail

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        query, kv = self.widths()
        # The projection's output, of which v is a view (q and k are too, unless normalised), and
        # the output.
        elements = sum(self.components().values()) + query
        fp32 = self.heads  # log-sum-exp
        if self.qk_norm:
            elements += query + kv
            fp32 += self.heads + self.kv_heads
        whole = 0.0
        if self.rank:
            elements += 2 * kv  # the convolution's input and output
            # w; sigmoid, beta, and what is cut off to be it.
            fp32 += kv + (2 + (self.largest_beta < 2)) * self.kv_heads
            if self.kernel == "triton":
                # In place of w what its kernels make of it: w in fp16, beta, an inverse a tile.
                fp32 += self.kv_heads - kv
                elements += kv + self.kv_heads * TRITON_TILE
            # The low-rank projection's output, which every rank holds whole.
            whole = self.rank * bytes_per_element
        if self.gated:
            fp32 += 2 * self.heads  # logsigmoid's input and output
        return (elements * bytes_per_element + 4 * fp32) / tensor + whole

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        if self.kernel == "triton":
            return self._triton_working_bytes(tokens, tensor, bytes_per_element)
        query, kv = self.widths()
        C = max(SHORTEST_BLOCK, min(self.head_dim, LONGEST_BLOCK)) if self.rank else PLAIN_BLOCK
        # In fp32, over all blocks: q scaled and carried, the output's gradient, q's; k, v and their
        # gradients; logits inside blocks and their gradient.
        fp32 = 4 * query + 4 * kv + 2 * self.heads * C
        if self.rank:
            # w, carried keys, maps, what carries, and the solve's two sides; q w^T.
            fp32 += 6 * kv + 4 * kv * self.head_dim / C + 4 * self.kv_heads * C + self.heads * C
        if self.gated:
            fp32 += self.heads * C
        # A block's rows of logits over all keys: weights, their gradients, one in passing.
        rows = 3 * self.heads * C
        return 4 * tokens * (fp32 + rows) / tensor

    def _triton_working_bytes(self, tokens: int, tensor: int, element: int) -> float:
        query, kv = self.widths()
        # Gradients of the inputs and the output, v in one piece; lse, delta and the gate's.
        elements = 2 * query + (2 + self.qk_norm) * kv
        fp32 = self.heads * (20 if self.gated else 3)
        if not self.rank:
            return tokens * (elements * element + 4 * fp32) / tensor
        fp32 += kv  # w's gradient
        # What one key/value head needs (kernels/path_attention/triton_carry.py), as if all tokens
        # were one document: half of them have a version a level of the tree, which has twice as
        # many nodes as tiles.
        K, C, shared = self.head_dim, TRITON_TILE, self.heads // self.kv_heads
        levels = math.ceil(math.log2(max(1, tokens / C)))
        keys = levels * K + 4 * K * K / C + C + 2 * K
        one = 2 * tokens * (keys + shared * (levels * K + 2 * C + K))
        piece = max(one, min(TRITON_WORKSPACE_BYTES, one * self.kv_heads / tensor))
        return tokens * (elements * element + 4 * fp32) / tensor + piece

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        query, kv = self.widths()
        gate, G, K = 4 * self.heads * self.gated, self.kv_heads, self.head_dim
        tail = max(self.taps - 1, 0) * kv * element * (context - 1)
        # q, k, v and the output, w, beta and the gate: there and back.
        exchanged = 2 * (query + kv) * element + gate + (4 * (kv + G) if self.rank else 0)
        exchanged *= tokens * (context - 1) / context
        if self.context_exchange == "heads":
            return (exchanged + tail) / tensor
        segments = len(own_segments(tokens, context, longest)[0])
        own = tokens * (kv * (4 + element) + gate)
        composed = segments * (gate + (4 * G * K * K if self.rank else 0))
        if self.context_exchange == "ring":
            # Half of what forward and backward send: the keys and values travel twice, in backward
            # with their fp32 gradients, which take one hop more home.
            gradients = tokens * (2 * 4 * kv + gate) * context / (context - 1)
            own = own + gradients / 2
        moved = exchanged if segments > 1 else 0
        return (moved + (context - 1) * (own + composed) + tail) / tensor

    def context_bytes_kept(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        query, kv = self.widths()
        G, K = self.kv_heads, self.head_dim
        before = _segments_before(tokens, context, longest)
        segments, exchanged = len(before[0]), 0
        if self.context_exchange == "heads" or segments > 1:
            # Copies of q, k and v; of those that a norm made only the copies are kept, and without
            # maps and norm nothing holds on to the projection.
            copied = kv if self.qk_norm else (query + 2 * kv) * bool(self.rank)
            exchanged = tokens * copied * element
        if self.context_exchange == "heads":
            return exchanged / tensor
        gates = 4 * self.heads * self.gated
        # The maps between each own segment and all others.
        maps = 4 * G * K * K * segments * segments * context if self.rank else 0
        if self.context_exchange == "ring":
            # In fp32 queries at their segment's left edge, keys at its right edge, and the outputs
            # of both halves; log-sum-exps and shares of both; v once more.
            each = 4 * (3 * query + kv) + 4 * 4 * self.heads + 2 * gates + kv * element
            return (exchanged + maps + tokens * each) / tensor
        # The segments before each own one, carried to it; and all keys as they were gathered.
        behind = max(map(sum, before)) * tokens / segments
        gathered = tokens * context * (4 * kv + gates) if self.rank and segments > 1 else 0
        if segments == 1:
            exchanged = tokens * kv * element  # v, tied to the exchange
        carried = behind * (kv * (4 + element) + gates)
        return (exchanged + maps + gathered + carried) / tensor

    def context_bytes_needed(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        if self.context_exchange == "heads":
            return 0.0
        _, kv = self.widths()
        if self.context_exchange == "ring":
            # Keys and values and their gradients in fp32, as they leave and as they arrive.
            return tokens * 2 * (kv * (2 * 4 + 4 + element)) / tensor
        # The keys and values before a segment, and their gradients; a block's rows of logits.
        C = max(SHORTEST_BLOCK, min(self.head_dim, LONGEST_BLOCK)) if self.rank else PLAIN_BLOCK
        before = _segments_before(tokens, context, longest)
        behind = max(map(max, before)) * tokens / len(before[0])
        return 4 * behind * (4 * kv + 3 * self.heads * C) / tensor

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        for field in ("heads", "kv_heads"):
            require_divisible(name, field, getattr(self, field), tensor)
        if self.context_exchange == "heads":
            require_context_divides(name, "kv_heads", self.kv_heads // tensor, tensor, context)
        elif self.kernel == "triton" and context > 1:
            raise ConfigError(
                f"mixers.{name}.kernel=triton takes no keys of other context ranks "
                f"(parallel.context={context}); set mixers.{name}.context_exchange=heads or "
                f"mixers.{name}.kernel=block"
            )

    @property
    def recordable(self) -> bool:
        return self.kernel == "triton"

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        if self.kernel == "triton" and (device_type != "cuda" or precision != "bf16"):
            raise ConfigError(
                f"mixers.{name}.kernel=triton runs on a GPU in bf16, not on {device_type} in "
                f"{precision}; set mixers.{name}.kernel=block"
            )


class Config(PathFamilyConfig):
    type: Literal["path"] = "path"  # pyright: ignore[reportIncompatibleVariableOverride]
    w_rank: Positive = 32
    """Rank of the projection that gives the Householder vectors w."""
    conv_width: Positive = 3
    """Taps of the causal convolution on w."""
    beta_max: Annotated[float, Field(gt=0, le=2)] = 2.0
    """beta = min(2 sigmoid(.), beta_max)."""
    forget_gate: bool = False
    """PaTH-FoX: a data-dependent forget gate in the logits, one a query head."""

    @property
    def rank(self) -> int:
        return self.w_rank

    @property
    def gated(self) -> bool:
        return self.forget_gate

    @property
    def taps(self) -> int:
        return self.conv_width

    @property
    def largest_beta(self) -> float:
        return self.beta_max

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        super().check(name, hidden_size, tensor, context)
        require_divisible(name, "w_rank", self.w_rank, tensor)
