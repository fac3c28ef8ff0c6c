"""Stochastic Attention (arXiv 2604.00754) as a Megatron layer's mixer."""

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.softmax_attention import apply_rope
from mixtron.kernels.split import viewed
from mixtron.kernels.windowed_attention import (
    WindowPlan,
    document_permutations,
    gated_sum,
    permutation_hash,
    plan_windows,
    windowed_attention,
)
from mixtron.megatron_ext.batch import EVALUATION_STEP, Batch
from mixtron.megatron_ext.mixers.stochastic.config import Config
from mixtron.megatron_ext.mixers.stochastic.decode import Decoding
from mixtron.megatron_ext.parameters import constant, replicated
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.sharded_module import ShardedModule
from mixtron.megatron_ext.token_exchange import exchange_tokens, slot_pieces, with_rows_before

PROBE_TOKENS = 64
ORDERS_AT_ONCE = 2**20
"""Tokens, over layers: sorting that many takes a GPU about as long as one layer's."""


class Mixer(ShardedModule):
    """q, k, v = W x; QK norm; RoPE by plain positions; causal attention over a window of a random
    order, of the plain one, or the sum of both, each times sigmoid(gate); output projection.

    The random order is a pure function of the mixer's seed, the step, the layer's number in the
    whole model and each document's length: every rank computes the same.

    TP: heads. SP: gathered by the input projection, scattered by the output one. CP: tokens travel
    to the ranks that own their slots in the random order, with a halo of the window, and back; the
    plain order takes a halo from the ranks before.
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.decoding = Decoding(mixer, layer_number)
        self.on_draw: Callable[[int, Tensor], None] | None = None
        """Called with the layer's number and two hashes of each draw, [2]: of the permutation of
        the batch's documents, and of one of PROBE_TOKENS tokens. See permutation_check.py."""
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        self.out_proj = OutputProjection(config, mixer.heads * mixer.head_dim, self.tp_group)
        if mixer.qk_norm:
            self.q_norm_weight = self.new_parameter((mixer.head_dim,), constant(1.0))
            self.k_norm_weight = self.new_parameter((mixer.head_dim,), constant(1.0))

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch, mixer = packed_seq_params, self.mixer
        assert batch is not None
        parts = dict(zip(mixer.components(), self.in_proj(hidden_TBD), strict=True))
        q_THK, k_TGK, v_TGK = self._heads(parts, batch)
        if batch.decoding:
            attended = self.decoding.step(q_THK, k_TGK, v_TGK, batch)
        else:
            if batch.cache is not None:
                self.decoding.fill(k_TGK, v_TGK, batch)
            attend = {"sa": self._attend_random, "swa": self._attend_plain}
            attended = {
                path: attend[path](q_THK, k_TGK, v_TGK, batch) for path in mixer.path_names()
            }
        return self.out_proj(self._gated_sum(attended, parts, batch).flatten(1)[:, None])

    def _heads(self, parts: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        mixer = self.mixer
        viewed_parts = (viewed(parts[n], self._by_head) for n in ("query", "key", "value"))
        (q_THK, q_place), (k_TGK, k_place), (v_TGK, _) = viewed_parts
        if mixer.qk_norm:
            q_place = k_place = None
            q_weight, k_weight = replicated(self.tp_group, self.q_norm_weight, self.k_norm_weight)
            eps = self.config.layernorm_epsilon
            q_THK = F.rms_norm(q_THK, q_weight.shape, q_weight, eps)
            k_TGK = F.rms_norm(k_TGK, k_weight.shape, k_weight, eps)
        if mixer.rope_base is not None:
            cos, sin = batch.rope(mixer.rope_base, mixer.head_dim)
            q_THK = apply_rope(q_THK, cos, sin, place=q_place)
            k_TGK = apply_rope(k_TGK, cos, sin, place=k_place)
        return q_THK, k_TGK, v_TGK

    def _by_head(self, x_TBE: Tensor) -> Tensor:
        return x_TBE.reshape(x_TBE.shape[0], -1, self.mixer.head_dim)

    def _gated_sum(
        self, attended: dict[str, Tensor], parts: dict[str, Tensor], batch: Batch
    ) -> Tensor:
        """[T, H, K]. A path alone has no gate."""
        if len(attended) == 1:
            (o_THK,) = attended.values()
            return o_THK
        sa_THK, swa_THK = attended["sa"], attended["swa"]
        gates = {path: parts[f"{path}_gate"].flatten(0, 1) for path in attended}
        if batch.scalars is not None:
            for path, gate_TH in gates.items():
                batch.scalars.add_mean(
                    f"{path}_gate/layer_{self.layer_number}", gate_TH.detach().sigmoid()
                )
        if self.mixer.kernel == "triton":
            return gated_sum(sa_THK, swa_THK, gates["sa"], gates["swa"])
        heads = sa_THK.shape[1]
        sa_THE, swa_THE = (x.unflatten(-1, (heads, -1)).sigmoid() for x in gates.values())
        return sa_THK * sa_THE + swa_THK * swa_THE

    def draw_order(self, batch: Batch) -> Tensor:
        """[T] int64: the token at each slot, over all context ranks."""
        tokens = batch.context_size * len(batch.position_ids)
        order_T = self._permutation(batch, batch.cu_seqlens, tokens)
        if self.on_draw is not None:
            one = torch.tensor([0, PROBE_TOKENS], device=order_T.device)
            own = range(self.layer_number, self.layer_number + 1)
            probe = document_permutations(one, PROBE_TOKENS, layers=own, **self._draw(batch, one))[
                0
            ]
            hashes_2 = torch.stack([permutation_hash(order_T), permutation_hash(probe)])
            self.on_draw(self.layer_number, hashes_2)
        return order_T

    def _permutation(self, batch: Batch, cu_seqlens: Tensor, tokens: int) -> Tensor:
        """[T] int64. Drawn with those of the layers beside it, which may be other mixers'."""
        count = max(1, ORDERS_AT_ONCE // tokens)
        first = (self.layer_number - 1) // count * count + 1
        layers = range(first, min(first + count, self.config.num_layers + 1))
        options = self._draw(batch, cu_seqlens)
        orders_LT = batch.once(
            ("orders", cu_seqlens.device, layers, *options.values()),
            lambda: document_permutations(cu_seqlens, tokens, layers=layers, **options),
        )
        return orders_LT[self.layer_number - first]

    def _draw(self, batch: Batch, cu_seqlens: Tensor) -> dict:
        """Options of a draw; the host, which may need it too, takes torch's form."""
        step = batch.step if self.mixer.resample == "step" else EVALUATION_STEP
        backend = self.mixer.kernel if cu_seqlens.is_cuda else "tiled"
        return {"seed": self.mixer.seed, "step": step, "backend": backend}

    def _attend_random(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, batch: Batch) -> Tensor:
        mixer = self.mixer
        if batch.cache is not None:
            return self.decoding.attend_random(q_THK, k_TGK, v_TGK, batch)
        order_T, size, rank = self.draw_order(batch), batch.context_size, batch.context_rank
        options = {
            "window": mixer.window,
            "window_side": mixer.window_side,
            "backend": mixer.kernel,
        }
        if size == 1:
            plan = plan_windows(order_T, batch.cu_seqlens, **options)
            return windowed_attention(q_THK, k_TGK, v_TGK, plan, backend=mixer.kernel)
        own = slot_pieces(len(order_T), size, 0, 0)
        seen = slot_pieces(len(order_T), size, *mixer.reach())
        order_on_host_T = self._permutation(batch, _offsets_on_host(batch), len(order_T))
        queries = exchange_tokens(order_T, order_on_host_T, own, self.cp_group)
        keys = exchange_tokens(order_T, order_on_host_T, seen, self.cp_group)
        plan = plan_windows(
            order_T,
            batch.cu_seqlens,
            **options,
            query_slots=own[rank],
            key_slots=seen[rank],
            query_row_S=queries.row_S,
            key_row_S=keys.row_S,
        )
        k_SGK, v_SGK = keys.to_slots(torch.cat([k_TGK, v_TGK], dim=-1)).chunk(2, dim=-1)
        q_SHK = queries.to_slots(q_THK)
        o_THK = windowed_attention(q_SHK, k_SGK, v_SGK, plan, backend=mixer.kernel)
        return queries.to_tokens(o_THK)

    def _attend_plain(self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, batch: Batch) -> Tensor:
        window = self.mixer.window
        plan = batch.once(
            ("plain window", window, self.mixer.kernel), lambda: plain_plan(batch, self.mixer)
        )
        if batch.context_size > 1:
            kv_TGE = torch.cat([k_TGK, v_TGK], dim=-1)
            k_TGK, v_TGK = with_rows_before(kv_TGE, window - 1, self.cp_group).chunk(2, dim=-1)
        return windowed_attention(q_THK, k_TGK, v_TGK, plan, backend=self.mixer.kernel)


def _offsets_on_host(batch: Batch) -> Tensor:
    """`cu_seqlens` without padding, from the lengths that the host knows."""
    return torch.tensor([0, *accumulate(batch.lengths)])


def plain_plan(batch: Batch, mixer: Config) -> WindowPlan:
    """Of sliding-window attention over this context rank's tokens; shared by all layers."""
    window, size, rank = mixer.window, batch.context_size, batch.context_rank
    tokens = size * len(batch.position_ids)
    return plan_windows(
        range(tokens),
        batch.cu_seqlens,
        window=window,
        window_side="one",
        query_slots=slot_pieces(tokens, size, 0, 0)[rank],
        key_slots=slot_pieces(tokens, size, window - 1, 0)[rank],
        backend=mixer.kernel,
    )
