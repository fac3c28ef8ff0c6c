"""PaTH attention and PaTH-FoX (arXiv 2505.16381) as a Megatron layer's mixer."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor

from mixtron.kernels.dense import dense
from mixtron.kernels.norms import unit_norm
from mixtron.kernels.path_attention import (
    past_queries,
    path_attention,
    path_attention_step,
    path_attention_with_lse,
    path_segment,
)
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import by_document, side_by_side
from mixtron.megatron_ext.context_parallel import heads_to_sequence, sequence_to_heads
from mixtron.megatron_ext.mixers.path.config import PathFamilyConfig
from mixtron.megatron_ext.mixers.path.gathered import pasts_of_segments
from mixtron.megatron_ext.mixers.path.ring import attend_segments_before, ring_of
from mixtron.megatron_ext.mixers.path.segments import Segments, segments_of
from mixtron.megatron_ext.parameters import constant, normal, replicated
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.scalars import Scalars
from mixtron.megatron_ext.sharded_module import ShardedModule
from mixtron.megatron_ext.short_convolution import ShortConvolution

KEPT_PARTS = ("query", "key", "value", "householder")
"""Of the input projection: what backward reads again."""


class Mixer(ShardedModule):
    """logit_ij = K^-1/2 k_j^T H_{j+1} ... H_i q_i + sum of log f_{j+1 .. i}; see
    kernels/path_attention. H = I - beta w w^T, one a key/value head; f one a query head.

    q, k, v = W x; w = conv3(W_2 W_1 x), L2-normalised; beta = min(2 sigmoid(u x + b), beta_max);
    f = sigmoid(w_f x + b_f).

    TP: heads. W_1 is part of the input projection: each rank holds some of its rows, and their few
    outputs are gathered. SP: gathered by the input projection, scattered by the output one. CP:
    tokens travel to where the work on them makes all ranks' equal (`segments.py`); each segment's
    keys are carried to its end and its maps composed; these and the values are gathered, or travel
    a ring, and are carried on to the segments after; or heads are exchanged for tokens around the
    op (`context_exchange`). Initialisation: matrices N(0, std),
    convolution U(-1/sqrt 3, 1/sqrt 3), biases 0 (beta starts near 1, f near 1/2), norms 1. b and
    b_f are fp32 whatever the model's dtype.
    """

    def __init__(self, config, layer_number: int, mixer: PathFamilyConfig, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        tp = self.tp_group.size()
        query, kv = mixer.widths()
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        if mixer.rank:
            self.householder_weight = self.new_parameter(
                (kv // tp, mixer.rank), normal(config.init_method_std), tensor_dim=0
            )
            self.convolution = ShortConvolution(
                config, {"householder": kv}, mixer.taps, self.tp_group, self.cp_group, silu=False
            )
            self.beta_bias = self._bias(mixer.kv_heads // tp)
        if mixer.gated:
            self.forget_bias = self._bias(mixer.heads // tp)
        if mixer.qk_norm:
            self.q_norm_weight = self.new_parameter((mixer.head_dim,), constant(1.0))
            self.k_norm_weight = self.new_parameter((mixer.head_dim,), constant(1.0))
        self.out_proj = OutputProjection(config, query, self.tp_group)

    def _bias(self, size: int):
        return self.new_parameter((size,), constant(0.0), dtype=torch.float32, tensor_dim=0)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch = packed_seq_params
        assert batch is not None
        projected = self.in_proj(hidden_TBD)
        parts = dict(zip(self.mixer.components(), projected, strict=True))
        if self.mixer.kernel == "triton" and not self.mixer.qk_norm:
            # The kernels take parts of the projection in one piece. Copied here they are kept so
            # for backward, and the projection is not. (A norm of q and k keeps it.)
            parts |= {name: dense(parts[name]) for name in KEPT_PARTS if name in parts}
        raw_TBE = self._raw_householder(parts["householder"]) if self.mixer.rank else None
        if batch.decoding:
            o_BTHK = self._decode(raw_TBE, parts, batch)
        else:
            o_BTHK = self._mix(raw_TBE, parts, batch)
        return self.out_proj(o_BTHK.flatten(2).transpose(0, 1))

    def _mix(self, raw_TBE: Tensor | None, parts: dict[str, Tensor], batch: Batch) -> Tensor:
        """The whole stream, or this context rank's share of it. [1, T, H, K]."""
        convolved_TBE = None if raw_TBE is None else self.convolution(raw_TBE, batch)
        q, k, v, w, beta, log_forget = self._inputs(convolved_TBE, parts)
        if batch.scalars is not None:
            self._report(beta, log_forget, batch.scalars)
        if batch.context_size > 1 and self.mixer.context_exchange == "heads":
            return self._mix_exchanged((q, k, v, w, beta, log_forget), batch)
        if batch.context_size > 1:
            segments = segments_of(batch, self.cp_group)
            taken = [segments.take(x) for x in (q, k, v, w, beta, log_forget)]
            mix = {"keys": self._mix_gathered, "ring": self._mix_in_ring}
            inputs = list(zip(*taken, strict=True))
            mixed = mix[self.mixer.context_exchange](inputs, segments, batch.max_seqlen)
            return segments.give_back(mixed)
        o_BTHK = path_attention(
            q,
            k,
            v,
            w,
            beta,
            log_forget,
            gate_scale=self.mixer.gate_scale,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            backend=self.mixer.kernel,
        )
        if batch.cache is not None:
            batch.cache.layers[self.layer_number] = self._cached(k, v, w, beta, log_forget, batch)
            if raw_TBE is not None:
                tails = self.convolution.tails(raw_TBE, batch.lengths)
                batch.cache.layers[self.layer_number]["tail"] = tails
        return o_BTHK

    def _cached(self, k, v, w, beta, log_forget, batch: Batch) -> dict[str, Tensor]:
        """Of each document the keys, carried to its end, the values and the gates behind them."""
        parts = by_document(batch.lengths, k, w, beta, log_forget)
        segments = [path_segment(*part) for part in parts]
        # Keys that no map changes stay in the model's dtype.
        keys = [k] if w is None else [segment.k_BTGK for segment in segments]
        kept = {"key": keys, "value": [v]}
        if log_forget is not None:
            kept["gate"] = [segment.gate_after_BTH for segment in segments]
        return {
            name: side_by_side(torch.cat(streams, dim=1)[0], batch.lengths)
            for name, streams in kept.items()
        }

    def _mix_gathered(
        self, inputs: list[tuple], segments: Segments, max_seqlen: int
    ) -> list[Tensor]:
        """Of each own segment, with the keys of the segments before it as its past."""
        pasts, values = pasts_of_segments(inputs, segments)
        outputs = []
        for segment, (q, k, _, *others), past, v in zip(
            segments.own, inputs, pasts, values, strict=True
        ):
            first = min(segments.seen_by(segment), default=segment)
            outputs.append(
                path_attention(
                    q,
                    k,
                    v,
                    *others,
                    gate_scale=self.mixer.gate_scale,
                    past=past,
                    cu_seqlens=segments.documents_from(first, segment),
                    max_seqlen=max_seqlen,
                )
            )
        return outputs

    def _report(self, beta: Tensor | None, log_forget: Tensor | None, scalars: Scalars) -> None:
        if beta is not None:
            scalars.add_mean(f"path_beta/layer_{self.layer_number}", beta)
        if log_forget is not None:
            scalars.add_mean(f"forget_gate/layer_{self.layer_number}", log_forget.detach().exp())

    def _mix_in_ring(
        self, inputs: list[tuple], segments: Segments, max_seqlen: int
    ) -> list[Tensor]:
        """Attention to each own segment's keys merged with that to earlier ones', which pass by."""
        own, queries, made = [], [], []
        for segment, (q, k, v, w, beta, log_forget) in zip(segments.own, inputs, strict=True):
            if log_forget is not None:
                log_forget = self.mixer.gate_scale * log_forget
            documents = segments.documents_from(segment, segment)
            options = {"scale": self.mixer.head_dim**-0.5, "cu_seqlens": documents}
            gates = (w, beta, log_forget)
            own.append(
                path_attention_with_lse(
                    q, k, v, *gates, None, None, None, max_seqlen=max_seqlen, **options
                )
            )
            queries.append(past_queries(q, k, *gates, **options))
            made.append(path_segment(k, *gates, cu_seqlens=documents))
        until = [until_BGRT for _, until_BGRT in queries if until_BGRT is not None]
        v_NTGV = torch.cat([v_BTGV for _, _, v_BTGV, *_ in inputs])
        past_NGRTK, past_lse_NGRT = attend_segments_before(
            torch.cat([q_BGRTK for q_BGRTK, _ in queries]),
            torch.cat(until) if until else None,
            made,
            v_NTGV,
            ring_of(segments),
        )
        past_NTHK = past_NGRTK.flatten(1, 2).transpose(1, 2)
        past_lse_NTH = past_lse_NGRT.flatten(1, 2).transpose(1, 2)
        own_NTHK, own_lse_NTH = (torch.cat(parts) for parts in zip(*own, strict=True))
        lse_NTH = torch.logaddexp(own_lse_NTH, past_lse_NTH)
        own_share_NTH, past_share_NTH = (
            (x - lse_NTH).exp()[..., None] for x in (own_lse_NTH, past_lse_NTH)
        )
        mixed_NTHK = (own_share_NTH * own_NTHK + past_share_NTH * past_NTHK).to(v_NTGV.dtype)
        return list(mixed_NTHK.split(1))

    def _mix_exchanged(self, inputs: tuple[Tensor | None, ...], batch: Batch) -> Tensor:
        """The whole stream for this context rank's share of the heads, there and back."""

        def exchange(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x_THE = x[0] if x.dim() == 4 else x[0, ..., None]
            exchanged = sequence_to_heads(x_THE, self.cp_group)[None]
            return exchanged if x.dim() == 4 else exchanged.squeeze(-1)

        q, k, v, *others = map(exchange, inputs)
        assert q is not None
        assert k is not None
        assert v is not None
        o_BTHK = path_attention(
            q,
            k,
            v,
            *others,
            gate_scale=self.mixer.gate_scale,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            backend=self.mixer.kernel,
        )
        return heads_to_sequence(o_BTHK[0], self.cp_group)[None]

    def _decode(self, raw_TBE: Tensor | None, parts: dict[str, Tensor], batch: Batch) -> Tensor:
        """The next token of each cached sequence; they lie along T. [1, T, H, K]."""
        cache, number = batch.cache, self.layer_number
        assert cache is not None
        cached, convolved_TBE = cache.layers[number], None
        if raw_TBE is not None:
            convolved_TE, cached["tail"] = self.convolution.step(raw_TBE[:, 0], cached["tail"])
            convolved_TBE = convolved_TE[:, None]
        # The sequences are the tokens of one row: [1, T, ...] to [T, ...].
        q, k, v, w, beta, log_forget = (
            None if x is None else x[0] for x in self._inputs(convolved_TBE, parts)
        )
        assert q is not None
        assert k is not None
        assert v is not None
        gate_BSH = None
        if log_forget is not None:
            gate_BSH = cache.append(number, "gate", torch.zeros_like(log_forget))
        o_BHK = path_attention_step(
            cache.append(number, "key", k.to(cached["key"].dtype)),
            cache.append(number, "value", v),
            gate_BSH,
            cache.lengths,
            q,
            k,
            v,
            w,
            beta,
            log_forget,
            gate_scale=self.mixer.gate_scale,
            backend=self.mixer.kernel,
        )
        return o_BHK[None]

    def _raw_householder(self, inner_TBR: Tensor) -> Tensor:
        """W_2 W_1 x of the local key/value heads, before the convolution. [T, 1, G K]."""
        inner_TBR = all_gather_last_dim_from_tensor_parallel_region(inner_TBR, self.tp_group)
        return F.linear(inner_TBR, self.householder_weight)

    def _inputs(
        self, convolved_TBE: Tensor | None, parts: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The op's q, k, v, w, beta, log_forget, batch first; None is left out."""
        mixer = self.mixer
        q, k, v = (self._heads(parts[name]) for name in ("query", "key", "value"))
        if mixer.qk_norm:
            q_weight, k_weight = replicated(self.tp_group, self.q_norm_weight, self.k_norm_weight)
            eps = self.config.layernorm_epsilon
            q = F.rms_norm(q, q_weight.shape, q_weight, eps)
            k = F.rms_norm(k, k_weight.shape, k_weight, eps)
        w = beta = log_forget = None
        if convolved_TBE is not None:
            w = unit_norm(self._heads(convolved_TBE), dtype=torch.float32)
            beta = 2 * (parts["beta"].transpose(0, 1).float() + self.beta_bias).sigmoid()
            if mixer.largest_beta < 2:
                beta = beta.clamp(max=mixer.largest_beta)
        if mixer.gated:
            log_forget = F.logsigmoid(parts["forget"].transpose(0, 1).float() + self.forget_bias)
        return q, k, v, w, beta, log_forget

    def _heads(self, x_TBE: Tensor) -> Tensor:
        """[B, T, heads, K]."""
        return x_TBE.transpose(0, 1).unflatten(-1, (-1, self.mixer.head_dim))
