"""Linear attention as a Megatron layer's mixer."""

from torch import Tensor

from mixtron.kernels.linear_attention import (
    linear_attention,
    linear_attention_segment_map,
    linear_attention_step,
)
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import end_states
from mixtron.megatron_ext.context_parallel import state_before
from mixtron.megatron_ext.mixers.linear_attention.config import Config
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.sharded_module import ShardedModule


class Mixer(ShardedModule):
    """q, k, v = W x; causal attention with weights phi(q).phi(k); output projection.

    phi = elu + 1, see kernels/linear_attention. No positions but those that causality gives.

    TP: heads. SP: gathered by the input projection, scattered by the output one. CP: each rank sums
    its tokens up as a map of the state, and takes the state that the maps before it give. Decode:
    one state a head. Initialisation: matrices N(0, std).
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        self.out_proj = OutputProjection(config, mixer.heads * mixer.value_dim, self.tp_group)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch, mixer = packed_seq_params, self.mixer
        assert batch is not None
        q, k, v = self.in_proj(hidden_TBD)
        q_BTHK, k_BTHK = _heads(q, mixer.key_dim), _heads(k, mixer.key_dim)
        v_BTHV = _heads(v, mixer.value_dim)
        if batch.decoding:
            o_BTHV = self._decode(q_BTHK, k_BTHK, v_BTHV, batch)
        else:
            o_BTHV = self._mix(q_BTHK, k_BTHK, v_BTHV, batch)
        return self.out_proj(o_BTHV.flatten(2).transpose(0, 1))

    def _mix(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, batch: Batch) -> Tensor:
        """The whole stream, or this context rank's share of it. [B, T, H, V]."""
        state_BHKW, cu_seqlens = None, batch.local_cu_seqlens
        if batch.context_size > 1:
            state_BHKW = state_before(
                *linear_attention_segment_map(k_BTHK, v_BTHV, cu_seqlens=cu_seqlens),
                batch.position_ids[0] == 0,
                self.cp_group,
            )
        o_BTHV, state_BHKW = linear_attention(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            initial_state_BHKW=state_BHKW,
            cu_seqlens=cu_seqlens,
            rows=batch.rows,
            backend=self.mixer.kernel,
        )
        if batch.cache is not None:
            state_BHKW = end_states(
                linear_attention_segment_map, batch.lengths, (k_BTHK, v_BTHV), state_BHKW
            )
            batch.cache.layers[self.layer_number] = {"state": state_BHKW}
        return o_BTHV

    def _decode(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, batch: Batch) -> Tensor:
        """The next token of each cached sequence; they lie along T. [1, T, H, V]."""
        assert batch.cache is not None
        cached = batch.cache.layers[self.layer_number]
        o_THV, cached["state"] = linear_attention_step(
            cached["state"], q_BTHK[0], k_BTHK[0], v_BTHV[0]
        )
        return o_THV[None]


def _heads(x_TBE: Tensor, dim: int) -> Tensor:
    """[B, T, H, dim]."""
    return x_TBE.transpose(0, 1).unflatten(-1, (-1, dim))
