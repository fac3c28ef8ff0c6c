"""Mamba-2 (arXiv 2405.21060) as a Megatron layer's mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_segment_map,
    gated_linear_step,
)
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import end_states
from mixtron.megatron_ext.context_parallel import state_before
from mixtron.megatron_ext.mixers.mamba2.config import Config
from mixtron.megatron_ext.parameters import constant, draw_dt_bias, draw_log_decay_rate
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.sharded_module import ShardedModule
from mixtron.megatron_ext.short_convolution import ShortConvolution


class Mixer(ShardedModule):
    """S = exp(-A dt) S + B (dt x)^T; y = S^T C + D x. See kernels/gated_linear_attention.

    x (value), B (key) and C (query) pass a causal convolution and SiLU; A, dt and D are one a value
    head; the output times SiLU of a gate passes an RMSNorm over the value heads that share B and C,
    then the output projection.

    TP: heads, with whole groups on a rank. SP: gathered by the input projection, scattered by the
    output one. CP: each rank sums its tokens up as a diagonal map of the state, and takes the state
    that the maps before it give. Initialisation: matrices N(0, std), A ~ U(1, 16), dt log-uniform
    in [1e-3, 1e-1], D and norm 1. A, dt's bias and D are fp32 whatever the model's dtype.
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        self.convolution = ShortConvolution(
            config, mixer.convolved(), mixer.conv_width, self.tp_group, self.cp_group
        )
        heads = mixer.value_heads // self.tp_group.size()
        fp32 = {"dtype": torch.float32, "tensor_dim": 0}
        self.log_decay_rate = self.new_parameter((heads,), draw_log_decay_rate, **fp32)
        self.dt_bias = self.new_parameter((heads,), draw_dt_bias, **fp32)
        self.skip = self.new_parameter((heads,), constant(1.0), **fp32)
        self.norm_weight = self.new_parameter(
            (heads * mixer.value_dim,), constant(1.0), tensor_dim=0
        )
        self.out_proj = OutputProjection(config, mixer.value_heads * mixer.value_dim, self.tp_group)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch = packed_seq_params
        assert batch is not None
        *raw, gate_TBE, step_TBJ = self.in_proj(hidden_TBD)
        raw_TBE = torch.cat(raw, dim=-1)
        mix = self._decode if batch.decoding else self._mix
        y_BTJV = mix(raw_TBE, step_TBJ, batch)
        y_TBE = y_BTJV.flatten(2).transpose(0, 1) * F.silu(gate_TBE)
        return self.out_proj(self._group_norm(y_TBE))

    def _mix(self, raw_TBE: Tensor, step_TBJ: Tensor, batch: Batch) -> Tensor:
        """The whole stream, or this context rank's share of it. [B, T, J, V]."""
        q_BTHK, k_BTHK, x_BTJV = self._heads(self.convolution(raw_TBE, batch))
        writes = (k_BTHK, *self._discretised(x_BTJV, step_TBJ))
        state_BJKV, cu_seqlens = None, batch.local_cu_seqlens
        if batch.context_size > 1:
            state_BJKV = state_before(
                *gated_linear_segment_map(*writes, cu_seqlens=cu_seqlens),
                batch.position_ids[0] == 0,
                self.cp_group,
            )
        y_BTJV, state_BJKV = gated_linear_attention(
            q_BTHK,
            *writes,
            scale=1.0,
            initial_state_BJKV=state_BJKV,
            cu_seqlens=cu_seqlens,
            rows=batch.rows,
            backend=self.mixer.kernel,
        )
        if batch.cache is not None:
            state_BJKV = end_states(gated_linear_segment_map, batch.lengths, writes, state_BJKV)
            batch.cache.layers[self.layer_number] = {
                "state": state_BJKV,
                "tail": self.convolution.tails(raw_TBE, batch.lengths),
            }
        return self._skipped(y_BTJV, x_BTJV)

    def _decode(self, raw_TBE: Tensor, step_TBJ: Tensor, batch: Batch) -> Tensor:
        """The next token of each cached sequence; they lie along T. [1, T, J, V]."""
        assert batch.cache is not None
        cached = batch.cache.layers[self.layer_number]
        convolved_TE, cached["tail"] = self.convolution.step(raw_TBE[:, 0], cached["tail"])
        q_BTHK, k_BTHK, x_BTJV = self._heads(convolved_TE[:, None])
        inputs = (q_BTHK, k_BTHK, *self._discretised(x_BTJV, step_TBJ))
        y_TJV, cached["state"] = gated_linear_step(
            cached["state"], *(x[0] for x in inputs), scale=1.0
        )
        return self._skipped(y_TJV[None], x_BTJV)

    def _heads(self, convolved_TBE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C, B and x, batch first."""
        tp, mixer = self.tp_group.size(), self.mixer
        sizes = [size // tp for size in mixer.convolved().values()]
        q, k, x = (part.transpose(0, 1) for part in convolved_TBE.split(sizes, dim=-1))
        return (
            q.unflatten(-1, (-1, mixer.key_dim)),
            k.unflatten(-1, (-1, mixer.key_dim)),
            x.unflatten(-1, (-1, mixer.value_dim)),
        )

    def _discretised(self, x_BTJV: Tensor, step_TBJ: Tensor) -> tuple[Tensor, Tensor]:
        """dt x in x's dtype, and the log decay -A dt, fp32 [B, T, J]."""
        dt_BTJ = F.softplus(step_TBJ.transpose(0, 1).float() + self.dt_bias)
        scaled_BTJV = (dt_BTJ.unsqueeze(-1) * x_BTJV).to(x_BTJV.dtype)
        return scaled_BTJV, -self.log_decay_rate.exp() * dt_BTJ

    def _skipped(self, y_BTJV: Tensor, x_BTJV: Tensor) -> Tensor:
        """y + D x."""
        return (y_BTJV + self.skip.unsqueeze(-1) * x_BTJV).to(y_BTJV.dtype)

    def _group_norm(self, y_TBE: Tensor) -> Tensor:
        groups = self.mixer.heads // self.tp_group.size()
        y_TBGE = y_TBE.unflatten(-1, (groups, -1))
        normed_TBGE = F.rms_norm(y_TBGE, y_TBGE.shape[-1:], eps=self.config.layernorm_epsilon)
        return normed_TBGE.flatten(2) * self.norm_weight
