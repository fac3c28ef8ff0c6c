"""KLA (arXiv 2605.08587) as a Megatron layer's mixer."""

from functools import partial

import torch
from torch import Tensor

from mixtron.kernels.delta_rule import (
    decay_and_step_size,
    delta_rule,
    delta_rule_decode,
    delta_rule_segment_map,
)
from mixtron.kernels.norms import rms_norm, unit_norm
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import end_states
from mixtron.megatron_ext.context_parallel import (
    StateExchange,
    heads_to_sequence,
    sequence_to_heads,
)
from mixtron.megatron_ext.mixers.kla.config import Config
from mixtron.megatron_ext.norms import gated_norm
from mixtron.megatron_ext.parameters import (
    constant,
    draw_dt_bias,
    draw_log_decay_rate,
    replicated,
)
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.recompute import computed_again
from mixtron.megatron_ext.scalars import Scalars
from mixtron.megatron_ext.sharded_module import ShardedModule
from mixtron.megatron_ext.short_convolution import ShortConvolution
from mixtron.megatron_ext.state_relay import StateRelay


class Mixer(ShardedModule):
    """S~ = alpha S; S = S~ + beta k (v - S~^T k)^T; o = K^-1/2 S^T q. See kernels/delta_rule.

    q, k, v pass a causal convolution and SiLU, q is L2-normalised; decay and step size come from
    the input, one a value head; the output is a gated RMSNorm over each value head, then projected.

    TP: heads. SP: gathered by the input projection, scattered by the output one. CP: each rank sums
    its tokens up as an affine map of the state, and takes the state that the maps before it give
    (q is normalised while they travel); by `context_exchange: relay` it runs from the state that
    the rank before leaves; by `heads` heads are exchanged for tokens around the op.
    Initialisation: matrices N(0, std), A ~ U(1, 16), dt log-uniform in [1e-3, 1e-1], norm 1. Decay
    parameters are fp32 whatever the model's dtype.
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        relayed = mixer.context_exchange == "relay"
        self.relay = StateRelay(self.cp_group) if relayed else None
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        self.convolution = ShortConvolution(
            config,
            mixer.convolved(),
            mixer.conv_width,
            self.tp_group,
            self.cp_group,
            relayed=relayed,
        )
        if mixer.decay == "gated":
            shape = (mixer.value_heads // self.tp_group.size(),)
            self.log_decay_rate = self.new_parameter(
                shape, draw_log_decay_rate, dtype=torch.float32, tensor_dim=0
            )
            self.dt_bias = self.new_parameter(
                shape, draw_dt_bias, dtype=torch.float32, tensor_dim=0
            )
        self.norm_weight = self.new_parameter((mixer.value_dim,), constant(1.0))
        self.out_proj = OutputProjection(config, mixer.value_heads * mixer.value_dim, self.tp_group)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch, mixer = packed_seq_params, self.mixer
        assert batch is not None
        convolved = len(mixer.convolved())
        raw_TBE, *rest = self.in_proj(hidden_TBD, joined=convolved)
        parts = dict(zip(list(mixer.components())[convolved:], rest, strict=True))
        o_BTJV = (self._decode if batch.decoding else self._mix)(raw_TBE, parts, batch)
        (weight,) = replicated(self.tp_group, self.norm_weight)
        eps = self.config.layernorm_epsilon
        if mixer.output_gate:
            again = "gate" in self.config.recomputed  # type: ignore[attr-defined]
            return self.out_proj(gated_norm(o_BTJV, weight, eps, parts["gate"], factor=again))
        return self.out_proj(rms_norm(o_BTJV, weight, eps).flatten(2).transpose(0, 1))

    def _mix(self, raw_TBE: Tensor, parts: dict[str, Tensor], batch: Batch) -> Tensor:
        """The whole stream, or this context rank's share of it. [B, T, J, V]."""
        convolved = self.convolution.components(raw_TBE, batch)
        if "conv" not in self.config.recomputed:  # type: ignore[attr-defined]
            return self._mix_convolved(convolved, raw_TBE, parts, batch)
        # Of Triton's op values are not kept.
        kept = convolved[:2] if self.mixer.kernel == "triton" else convolved
        again = partial(self.convolution.components, raw_TBE, batch, len(kept))
        with computed_again(again, kept):
            return self._mix_convolved(convolved, raw_TBE, parts, batch)

    def _mix_convolved(
        self,
        convolved: tuple[Tensor, ...],
        raw_TBE: Tensor,
        parts: dict[str, Tensor],
        batch: Batch,
    ) -> Tensor:
        q_BTHK, *writes = self._inputs(convolved, parts)
        if batch.scalars is not None:
            self._report(writes[2], writes[3], batch.scalars)
        if batch.context_size > 1 and self.mixer.context_exchange == "heads":
            return self._mix_exchanged(q_BTHK, writes, batch)
        options = {"step_size": self.mixer.step_size, "cu_seqlens": batch.local_cu_seqlens}
        state_BJKV = None
        if batch.context_size > 1 and self.relay is None:
            maps = delta_rule_segment_map(*writes, **options, backend=self.mixer.kernel)
            exchange = StateExchange(*maps, batch.position_ids[0] == 0, self.cp_group)
            state_BJKV = exchange.state()
        elif self.relay is not None:
            starts = batch.position_ids[0] == 0
            state_BJKV = self.relay.receive(q_BTHK, writes[1], starts, batch.received)
        o_BTJV, state_BJKV = delta_rule(
            q_BTHK,
            *writes,
            **options,
            initial_state_BJKV=state_BJKV,
            rows=batch.rows,
            unit_queries=True,
            backend=self.mixer.kernel,
        )
        if self.relay is not None:
            o_BTJV = self.relay.send(o_BTJV, state_BJKV)
        if batch.cache is not None:
            segment_map = partial(
                delta_rule_segment_map, step_size=self.mixer.step_size, backend=self.mixer.kernel
            )
            state_BJKV = end_states(segment_map, batch.lengths, writes, state_BJKV)
            batch.cache.layers[self.layer_number] = {
                "state": state_BJKV,
                "tail": self.convolution.tails(raw_TBE, batch.lengths),
            }
        return o_BTJV

    def _report(self, log_decay_BTJ: Tensor | None, eta_BTJ: Tensor, scalars: Scalars) -> None:
        scalars.add_mean(f"kla_step_size/layer_{self.layer_number}", eta_BTJ)
        if log_decay_BTJ is not None:
            decay_BTJ = log_decay_BTJ.detach().exp()  # a node of autograd would keep the layer
            scalars.add_mean(f"kla_decay/layer_{self.layer_number}", decay_BTJ)

    def _mix_exchanged(self, q_BTHK: Tensor, writes: list, batch: Batch) -> Tensor:
        """The whole stream for this context rank's share of the heads, there and back."""

        def exchange(x_BTHE):
            return sequence_to_heads(x_BTHE[0], self.cp_group)[None]

        k_BTHK, v_BTJV, log_decay_BTJ, eta_BTJ = writes
        if log_decay_BTJ is not None:
            log_decay_BTJ = exchange(log_decay_BTJ.unsqueeze(-1)).squeeze(-1)
        o_BTJV, _ = delta_rule(
            exchange(q_BTHK),
            exchange(k_BTHK),
            exchange(v_BTJV),
            log_decay_BTJ,
            exchange(eta_BTJ.unsqueeze(-1)).squeeze(-1),
            step_size=self.mixer.step_size,
            cu_seqlens=batch.cu_seqlens,
            unit_queries=True,
            backend=self.mixer.kernel,
        )
        return heads_to_sequence(o_BTJV[0], self.cp_group)[None]

    def _decode(self, raw_TBE: Tensor, parts: dict[str, Tensor], batch: Batch) -> Tensor:
        """The next token of each cached sequence; they lie along T. [1, T, J, V]."""
        assert batch.cache is not None
        cached = batch.cache.layers[self.layer_number]
        convolved_TE, cached["tail"] = self.convolution.step(raw_TBE[:, 0], cached["tail"])
        convolved = convolved_TE[:, None].split(self.convolution.widths, dim=-1)
        q_BTHK, k_BTHK, v_BTJV = self._heads(convolved)
        gated = self.mixer.decay == "gated"
        o_TJV = delta_rule_decode(
            cached["state"],
            q_BTHK[0],
            k_BTHK[0],
            v_BTJV[0],
            parts["decay"][:, 0] if gated else None,
            self.log_decay_rate if gated else None,
            self.dt_bias if gated else None,
            parts["step_size"][:, 0],
            step_size=self.mixer.step_size,
            normalize_keys=self.mixer.normalize_keys,
            backend="triton" if self.mixer.kernel == "triton" else "torch",
        )
        return o_TJV[None]

    def _inputs(self, convolved: tuple[Tensor, ...], parts: dict[str, Tensor]) -> tuple:
        """q (not yet normalised), k, v, log decay (None without) and eta, batch first."""
        q_BTHK, k_BTHK, v_BTJV = self._heads(convolved)
        if self.mixer.normalize_keys:
            k_BTHK = unit_norm(k_BTHK)
        if self.mixer.decay == "gated":
            gates = decay_and_step_size(
                parts["decay"], parts["step_size"], self.log_decay_rate, self.dt_bias
            )
            return q_BTHK, k_BTHK, v_BTJV, *gates
        eta_BTJ = parts["step_size"].transpose(0, 1).float().sigmoid()
        return q_BTHK, k_BTHK, v_BTJV, None, eta_BTJ

    def _heads(self, convolved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """q, k and v by head, batch first."""
        dims = (self.mixer.key_dim, self.mixer.key_dim, self.mixer.value_dim)
        return tuple(
            x_TBE.transpose(0, 1).unflatten(-1, (-1, dim))
            for x_TBE, dim in zip(convolved, dims, strict=True)
        )
