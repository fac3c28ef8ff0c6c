"""GLA (arXiv 2312.06635) as a Megatron layer's mixer."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor

from mixtron.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_segment_map,
    gated_linear_step,
)
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import end_states
from mixtron.megatron_ext.context_parallel import state_before
from mixtron.megatron_ext.mixers.gla.config import Config
from mixtron.megatron_ext.norms import gated_norm
from mixtron.megatron_ext.parameters import constant, normal, replicated
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.sharded_module import ShardedModule


class Mixer(ShardedModule):
    """S = diag(alpha) S + k v^T; o = K^-1/2 S^T q. See kernels/gated_linear_attention.

    alpha = sigmoid(W_2 W_1 x + b)^(1/tau), one a key channel; the output is an RMSNorm over each
    head times SiLU of a gate, then projected.

    TP: heads. W_1 is part of the input projection: each rank holds some of its rows, and their few
    outputs are gathered. SP: gathered by the input projection, scattered by the output one. CP:
    each rank sums its tokens up as a diagonal map of the state, and takes the state that the maps
    before it give. Initialisation: matrices N(0, std), b 0, norm 1. W_2 and b are fp32 whatever the
    model's dtype.
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        channels = mixer.heads * mixer.key_dim // self.tp_group.size()
        self.decay_weight = self.new_parameter(
            (channels, mixer.decay_rank),
            normal(config.init_method_std),
            dtype=torch.float32,
            tensor_dim=0,
        )
        self.decay_bias = self.new_parameter(
            (channels,), constant(0.0), dtype=torch.float32, tensor_dim=0
        )
        self.norm_weight = self.new_parameter((mixer.value_dim,), constant(1.0))
        self.out_proj = OutputProjection(config, mixer.heads * mixer.value_dim, self.tp_group)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch = packed_seq_params
        assert batch is not None
        q, k, v, gate_TBE, decay_TBR = self.in_proj(hidden_TBD)
        inputs = (
            self._heads(q, self.mixer.key_dim),
            self._heads(k, self.mixer.key_dim),
            self._heads(v, self.mixer.value_dim),
            self._heads(self._log_decay(decay_TBR), self.mixer.key_dim),
        )
        o_BTHV = self._decode(inputs, batch) if batch.decoding else self._mix(inputs, batch)
        (weight,) = replicated(self.tp_group, self.norm_weight)
        return self.out_proj(gated_norm(o_BTHV, weight, self.config.layernorm_epsilon, gate_TBE))

    def _mix(self, inputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """The whole stream, or this context rank's share of it. [B, T, H, V]."""
        q_BTHK, *writes = inputs
        state_BHKV, cu_seqlens = None, batch.local_cu_seqlens
        if batch.context_size > 1:
            state_BHKV = state_before(
                *gated_linear_segment_map(*writes, cu_seqlens=cu_seqlens),
                batch.position_ids[0] == 0,
                self.cp_group,
            )
        o_BTHV, state_BHKV = gated_linear_attention(
            q_BTHK,
            *writes,
            initial_state_BJKV=state_BHKV,
            cu_seqlens=cu_seqlens,
            rows=batch.rows,
            backend=self.mixer.kernel,
        )
        if batch.cache is not None:
            state_BHKV = end_states(gated_linear_segment_map, batch.lengths, writes, state_BHKV)
            batch.cache.layers[self.layer_number] = {"state": state_BHKV}
        return o_BTHV

    def _decode(self, inputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """The next token of each cached sequence; they lie along T. [1, T, H, V]."""
        assert batch.cache is not None
        cached = batch.cache.layers[self.layer_number]
        o_THV, cached["state"] = gated_linear_step(cached["state"], *(x[0] for x in inputs))
        return o_THV[None]

    def _log_decay(self, decay_TBR: Tensor) -> Tensor:
        """log sigmoid(W_2 W_1 x + b) / tau of the local channels, fp32 [T, B, H K]."""
        inner_TBR = all_gather_last_dim_from_tensor_parallel_region(decay_TBR, self.tp_group)
        logits_TBE = F.linear(inner_TBR.float(), self.decay_weight, self.decay_bias)
        return F.logsigmoid(logits_TBE) / self.mixer.decay_temperature

    @staticmethod
    def _heads(x_TBE: Tensor, dim: int) -> Tensor:
        """[B, T, H, dim]."""
        return x_TBE.transpose(0, 1).unflatten(-1, (-1, dim))
