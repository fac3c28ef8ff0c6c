"""Log-linear attention (arXiv 2506.04761, 2605.06946) as a Megatron layer's mixer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.log_linear_attention import (
    log_linear_attention,
    log_linear_segment_map,
    log_linear_step,
    required_levels,
)
from mixtron.kernels.norms import unit_norm
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import by_document
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.log_linear.config import Config
from mixtron.megatron_ext.mixers.log_linear.context import share_of, states_before
from mixtron.megatron_ext.mixers.log_linear.level_weights import LevelWeights
from mixtron.megatron_ext.norms import gated_norm
from mixtron.megatron_ext.parameters import (
    constant,
    draw_dt_bias,
    draw_log_decay_rate,
    replicated,
)
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.scalars import Scalars
from mixtron.megatron_ext.sharded_module import ShardedModule
from mixtron.megatron_ext.short_convolution import ShortConvolution


class Mixer(ShardedModule):
    """o_t = sum over levels l of lambda_t^(l) S_t^(l)^T q_t. See kernels/log_linear_attention.

    The states are Mamba-2's (`base: gated_linear`) or Gated DeltaNet's (`gated_delta`), and what
    surrounds the op is theirs: with every lambda 1 this is `mamba2`, or `kla` with
    `step_size: learned, normalize_keys: true`.

    TP: heads; the network of lambda is replicated. SP: gathered by the input projection, scattered
    by the output one. CP: Fenwick states, see context.py. Initialisation: matrices N(0, std), A ~
    U(1, 16), dt log-uniform in [1e-3, 1e-1], skip and norm 1, lambda as in level_weights.py. Decay
    and lambda parameters are fp32 whatever the model's dtype.
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
        if mixer.base == "gated_linear":
            self.skip = self.new_parameter((heads,), constant(1.0), **fp32)
            self.norm_weight = self.new_parameter(
                (heads * mixer.value_dim,), constant(1.0), tensor_dim=0
            )
        else:
            self.norm_weight = self.new_parameter((mixer.value_dim,), constant(1.0))
        self.level_weights = LevelWeights(config, mixer, self.tp_group)
        self.out_proj = OutputProjection(config, mixer.value_heads * mixer.value_dim, self.tp_group)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch, mixer = packed_seq_params, self.mixer
        assert batch is not None
        parts = dict(zip(mixer.components(), self.in_proj(hidden_TBD), strict=True))
        raw_TBE = torch.cat([parts[name] for name in mixer.convolved()], dim=-1)
        if batch.decoding:
            o_BTJV = self._decode(raw_TBE, parts, batch)
        else:
            o_BTJV = self._mix(raw_TBE, parts, batch)
        return self.out_proj(self._gated_norm(o_BTJV, parts["gate"]))

    def _mix(self, raw_TBE: Tensor, parts: dict[str, Tensor], batch: Batch) -> Tensor:
        """The whole stream, or this context rank's share of it. [B, T, J, V]."""
        self._require_levels(batch.max_seqlen)
        q_BTHK, writes, v_BTJV = self._inputs(self.convolution(raw_TBE, batch), parts)
        lambda_BTJL = self._lambda(parts)
        if batch.scalars is not None:
            self._report(lambda_BTJL, batch, batch.scalars)
        share = share_of(batch.lengths, batch.context_rank, batch.context_size)
        documents = {"lengths": share.lengths, "initial_position": share.position}
        states_BSJKV = None
        if batch.context_size > 1:
            segment_map = log_linear_segment_map(*writes, levels=self.mixer.L, **documents)
            states_BSJKV = states_before(segment_map, batch.lengths, self.cp_group)
        o_BTJV = log_linear_attention(
            q_BTHK,
            *writes,
            lambda_BTJL,
            scale=self._scale,
            initial_states_BSJKV=states_BSJKV,
            **documents,
            backend=self.mixer.kernel,
        )
        if batch.cache is not None:
            states = [
                log_linear_segment_map(*part, levels=self.mixer.L)[1]
                for part in by_document(batch.lengths, *writes)
            ]
            batch.cache.layers[self.layer_number] = {
                "states": torch.cat(states)[:, : batch.max_seqlen.bit_length()],
                "tail": self.convolution.tails(raw_TBE, batch.lengths),
            }
        return self._skipped(o_BTJV, v_BTJV)

    def _decode(self, raw_TBE: Tensor, parts: dict[str, Tensor], batch: Batch) -> Tensor:
        """The next token of each cached sequence; they lie along T. [1, T, J, V]."""
        assert batch.cache is not None
        cached = batch.cache.layers[self.layer_number]
        longest = int(batch.cache.lengths.max()) + 1
        self._require_levels(longest)
        missing = max(0, longest.bit_length() - cached["states"].shape[1])
        states_TSJKV = F.pad(cached["states"], (0, 0) * 3 + (0, missing))
        convolved_TE, cached["tail"] = self.convolution.step(raw_TBE[:, 0], cached["tail"])
        q_BTHK, writes, v_BTJV = self._inputs(convolved_TE[:, None], parts)
        token: Any = [x if x is None else x[0] for x in (q_BTHK, *writes, self._lambda(parts))]
        o_TJV, cached["states"] = log_linear_step(
            states_TSJKV, batch.cache.lengths, *token, scale=self._scale
        )
        return self._skipped(o_TJV[None], v_BTJV)

    def _require_levels(self, tokens: int) -> None:
        """Raises ConfigError: a document longer than the tree."""
        if required_levels(tokens) > self.mixer.L:
            raise ConfigError(
                f"layer {self.layer_number}: a document of {tokens} tokens needs log_linear "
                f"levels={required_levels(tokens)}, found {self.mixer.L}, which hold "
                f"{2 ** (self.mixer.L - 1)} tokens"
            )

    @property
    def _scale(self) -> float:
        return 1.0 if self.mixer.base == "gated_linear" else self.mixer.key_dim**-0.5

    def _inputs(
        self, convolved_TBE: Tensor, parts: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
        """q, what is written (k, v, log decay, beta or None), and v as the skip takes it."""
        mixer = self.mixer
        sizes = [size // self.tp_group.size() for size in mixer.convolved().values()]
        q, k, v = (x.transpose(0, 1) for x in convolved_TBE.split(sizes, dim=-1))
        q_BTHK, k_BTHK = (x.unflatten(-1, (-1, mixer.key_dim)) for x in (q, k))
        v_BTJV = v.unflatten(-1, (-1, mixer.value_dim))
        dt_BTJ = F.softplus(parts["decay"].transpose(0, 1).float() + self.dt_bias)
        log_decay_BTJ = -self.log_decay_rate.exp() * dt_BTJ
        if mixer.base == "gated_linear":
            scaled_BTJV = (dt_BTJ.unsqueeze(-1) * v_BTJV).to(v_BTJV.dtype)
            return q_BTHK, (k_BTHK, scaled_BTJV, log_decay_BTJ, None), v_BTJV
        q_BTHK, k_BTHK = unit_norm(q_BTHK), unit_norm(k_BTHK)
        beta_BTJ = parts["step_size"].transpose(0, 1).float().sigmoid()
        return q_BTHK, (k_BTHK, v_BTJV, log_decay_BTJ, beta_BTJ), v_BTJV

    def _lambda(self, parts: dict[str, Tensor]) -> Tensor:
        """fp32 [B, T, J, L]."""
        rows_BTE = parts["decay"].transpose(0, 1)
        d_BTE = parts["levels"].transpose(0, 1) if "levels" in parts else None
        return self.level_weights(d_BTE, rows_BTE.shape[:2])

    def _report(self, lambda_BTJL: Tensor, batch: Batch, scalars: Scalars) -> None:
        """The mean lambda of each level, over the tokens for which it holds anything."""
        J, L = lambda_BTJL.shape[2:]
        bit = torch.arange(L - 1, device=lambda_BTJL.device)
        held_TL = F.pad(batch.position_ids[:, None] >> bit & 1, (1, 0), value=1)
        everything = torch.ones_like(batch.position_ids)
        for kind, tokens_T in {"all": everything, **batch.token_kinds}.items():
            counted_TL = (held_TL * tokens_T[:, None]).float()
            names = (f"lambda_{kind}/layer_{self.layer_number}/level_{i}" for i in range(L))
            sums_L = torch.einsum("btjl,tl->l", lambda_BTJL.detach(), counted_TL)
            scalars.add(tuple(names), sums_L, J * counted_TL.sum(0))

    def _skipped(self, o_BTJV: Tensor, v_BTJV: Tensor) -> Tensor:
        """o + D v, in Mamba-2's form."""
        if self.mixer.base == "gated_delta":
            return o_BTJV
        return (o_BTJV + self.skip.unsqueeze(-1) * v_BTJV).to(o_BTJV.dtype)

    def _gated_norm(self, o_BTJV: Tensor, gate_TBE: Tensor) -> Tensor:
        """[T, B, J V]: RMSNorm(o) SiLU(z) of each head; or of o SiLU(z), over the value heads that
        share a key head."""
        eps = self.config.layernorm_epsilon
        if self.mixer.base == "gated_delta":
            (weight,) = replicated(self.tp_group, self.norm_weight)
            return gated_norm(o_BTJV, weight, eps, gate_TBE)
        o_TBE = o_BTJV.flatten(2).transpose(0, 1) * F.silu(gate_TBE)
        o_TBGE = o_TBE.unflatten(-1, (self.mixer.heads // self.tp_group.size(), -1))
        normed_TBGE = F.rms_norm(o_TBGE, o_TBGE.shape[-1:], eps=eps)
        return normed_TBGE.flatten(2) * self.norm_weight
