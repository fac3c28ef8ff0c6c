"""Softmax attention as a Megatron layer's mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.norms import rms_norm
from mixtron.kernels.softmax_attention import apply_rope, softmax_attention
from mixtron.kernels.split import Place, viewed
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import side_by_side
from mixtron.megatron_ext.context_parallel import heads_to_sequence, sequence_to_heads
from mixtron.megatron_ext.mixers.softmax_attention.config import Config
from mixtron.megatron_ext.parameters import constant, replicated
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.sharded_module import ShardedModule


class Mixer(ShardedModule):
    """q, k, v = W x; QK norm; RoPE; causal attention inside each document; output projection.

    TP: heads. SP: gathered by the input projection, scattered by the output one. CP: heads are
    exchanged for tokens around the attention itself, so `heads` and `kv_heads` over TP must be
    divisible by CP.
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.in_proj = FusedColumnParallel(
            *(config, config.hidden_size, mixer.components(), self.tp_group),
            bias=mixer.qkv_bias,
        )
        self.out_proj = OutputProjection(
            config, mixer.heads * mixer.head_dim, self.tp_group, bias=mixer.output_bias
        )
        if mixer.qk_norm:
            self.q_norm_weight = self.new_parameter((mixer.head_dim,), constant(1.0))
            self.k_norm_weight = self.new_parameter((mixer.head_dim,), constant(1.0))

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch, mixer = packed_seq_params, self.mixer
        assert batch is not None
        q_THK, k_TGK, v_TGK = self.attention_inputs(hidden_TBD, batch)
        if batch.context_size > 1:
            q_THK, k_TGK, v_TGK = (
                sequence_to_heads(x, self.cp_group) for x in (q_THK, k_TGK, v_TGK)
            )
        if batch.decoding:
            return self.out_proj(self._decode(q_THK, k_TGK, v_TGK, batch))
        if batch.cache is not None:
            batch.cache.layers[self.layer_number] = {
                "key": side_by_side(k_TGK, batch.lengths),
                "value": side_by_side(v_TGK, batch.lengths),
            }
        by_lengths = mixer.kernel == "cudnn" or not q_THK.is_cuda or q_THK.dtype == torch.float32
        o_THK = softmax_attention(
            q_THK,
            k_TGK,
            v_TGK,
            batch.lengths if by_lengths else None,
            batch.cu_seqlens,
            scale=mixer.head_dim**-0.5,
            max_seqlen=batch.max_seqlen,
            window=mixer.window,
            backend=mixer.kernel,
        )
        if batch.context_size > 1:
            o_THK = heads_to_sequence(o_THK, self.cp_group)
        return self.out_proj(o_THK.reshape(o_THK.shape[0], 1, -1))

    def attention_inputs(self, hidden_TBD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """q [T, H, K], k and v [T, G, K] of the local tokens and heads, as attention takes them."""
        mixer = self.mixer
        parts = (viewed(part, self._by_head) for part in self.in_proj(hidden_TBD))
        (q_THK, q_place), (k_TGK, k_place), (v_TGK, _) = parts
        if mixer.qk_norm:
            q_place = k_place = None
            q_weight, k_weight = replicated(self.tp_group, self.q_norm_weight, self.k_norm_weight)
            eps = self.config.layernorm_epsilon
            q_THK, k_TGK = rms_norm(q_THK, q_weight, eps), rms_norm(k_TGK, k_weight, eps)
        if mixer.rope_base is not None:
            q_THK = self._rotated(q_THK, batch, q_place)
            k_TGK = self._rotated(k_TGK, batch, k_place)
        return q_THK, k_TGK, v_TGK

    def _by_head(self, x_TBE: Tensor) -> Tensor:
        return x_TBE.reshape(x_TBE.shape[0], -1, self.mixer.head_dim)

    def _rotated(self, x_THK: Tensor, batch: Batch, place: Place | None) -> Tensor:
        mixer = self.mixer
        assert mixer.rope_base is not None
        rotary_dim = mixer.rotary_dim or mixer.head_dim
        angles = batch.rope(mixer.rope_base, rotary_dim)
        if rotary_dim == mixer.head_dim:
            return apply_rope(x_THK, *angles, place=place)
        rotated = apply_rope(x_THK[..., :rotary_dim], *angles)
        return torch.cat([rotated, x_THK[..., rotary_dim:]], dim=-1)

    def _decode(self, q_BHK: Tensor, k_BGK: Tensor, v_BGK: Tensor, batch: Batch) -> Tensor:
        """Each sequence's newest query against its own cached keys. [B, 1, H K]."""
        cache = batch.cache
        assert cache is not None
        k_BSGK = cache.append(self.layer_number, "key", k_BGK)
        v_BSGK = cache.append(self.layer_number, "value", v_BGK)
        slot_S = torch.arange(k_BSGK.shape[1], device=q_BHK.device)
        age_BS = cache.lengths[:, None] - slot_S
        attended_BS = (age_BS >= 0) & (age_BS < (self.mixer.window or age_BS.shape[1]))
        o_BH1K = F.scaled_dot_product_attention(
            q_BHK[:, :, None],
            k_BSGK.transpose(1, 2),
            v_BSGK.transpose(1, 2),
            attn_mask=attended_BS[:, None, None],
            scale=self.mixer.head_dim**-0.5,
            enable_gqa=True,
        )
        return o_BH1K.flatten(1)[:, None]
