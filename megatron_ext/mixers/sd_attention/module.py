"""S-D attention as a Megatron layer's mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.sd_attention import sd_attention, sd_attention_step
from mixtron.kernels.softmax_attention import apply_rope
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.cache import side_by_side
from mixtron.megatron_ext.context_parallel import heads_to_sequence, sequence_to_heads
from mixtron.megatron_ext.mixers.sd_attention.config import Config
from mixtron.megatron_ext.parameters import constant
from mixtron.megatron_ext.projections import FusedColumnParallel, OutputProjection
from mixtron.megatron_ext.sharded_module import ShardedModule


class Mixer(ShardedModule):
    """Causal softmax of S - D: S_ij = K^-1/2 (q_i . k_j - k_i . q_j), D = diag(d). See
    kernels/sd_attention.

    q, k, v, a = W x; RoPE on q and k, which leaves S skew-symmetric; d = softplus(a + bias), or
    softplus(bias) for one d a head; output projection.

    TP: heads. SP: gathered by the input projection, scattered by the output one. CP: heads are
    exchanged for tokens around the attention. Decode: a cache of [k; q] and v, 3K numbers a token
    and head. Initialisation: matrices N(0, std), bias 0; the bias is fp32 whatever the model's
    dtype.
    """

    def __init__(self, config, layer_number: int, mixer: Config, pg_collection, **_):
        super().__init__(config, pg_collection.tp)
        self.mixer = mixer
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.in_proj = FusedColumnParallel(
            config, config.hidden_size, mixer.components(), self.tp_group
        )
        self.damping_bias = self.new_parameter(
            (mixer.heads // self.tp_group.size(),),
            constant(0.0),
            dtype=torch.float32,
            tensor_dim=0,
        )
        self.out_proj = OutputProjection(config, mixer.width, self.tp_group)

    def forward(
        self, hidden_TBD: Tensor, attention_mask=None, packed_seq_params: Batch | None = None, **_
    ):
        batch, mixer = packed_seq_params, self.mixer
        assert batch is not None
        q_THK, k_THK, v_THK, d_TH = self.attention_inputs(hidden_TBD, batch)
        if batch.decoding:
            return self.out_proj(self._decode(q_THK, k_THK, v_THK, d_TH, batch))
        if batch.context_size > 1:
            q_THK, k_THK, v_THK, d_TH1 = (
                sequence_to_heads(x, self.cp_group) for x in (q_THK, k_THK, v_THK, d_TH[..., None])
            )
            d_TH = d_TH1.squeeze(-1)
        if batch.cache is not None:
            k_THE = torch.cat([k_THK, q_THK], dim=-1)
            batch.cache.layers[self.layer_number] = {
                "key": side_by_side(k_THE, batch.lengths),
                "value": side_by_side(v_THK, batch.lengths),
            }
        if batch.scalars is not None:
            batch.scalars.add_mean(f"sd_damping/layer_{self.layer_number}", d_TH)
        o_THK = sd_attention(
            q_THK,
            k_THK,
            v_THK,
            d_TH,
            None if mixer.kernel == "triton" else batch.lengths,
            batch.cu_seqlens,
            scale=mixer.head_dim**-0.5,
            backend=mixer.kernel,
        )
        if batch.context_size > 1:
            o_THK = heads_to_sequence(o_THK, self.cp_group)
        return self.out_proj(o_THK.reshape(o_THK.shape[0], 1, -1))

    def attention_inputs(self, hidden_TBD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """q, k, v [T, H, K] and d [T, H] of the local tokens and heads."""
        mixer = self.mixer
        q, k, v, *damping = self.in_proj(hidden_TBD)
        q_THK, k_THK, v_THK = (x.reshape(x.shape[0], -1, mixer.head_dim) for x in (q, k, v))
        if mixer.rope_base is not None:
            cos, sin = batch.rope(mixer.rope_base, mixer.head_dim)
            q_THK, k_THK = apply_rope(q_THK, cos, sin), apply_rope(k_THK, cos, sin)
        return q_THK, k_THK, v_THK, self._damping(damping, q_THK.shape[0])

    def _damping(self, projected: list[Tensor], tokens: int) -> Tensor:
        """d [T, H] fp32 of the local tokens and heads."""
        if self.mixer.d == "head":
            return F.softplus(self.damping_bias).expand(tokens, -1)
        (a_TBH,) = projected
        return F.softplus(a_TBH[:, 0].float() + self.damping_bias)

    def _decode(
        self, q_BHK: Tensor, k_BHK: Tensor, v_BHK: Tensor, d_BH: Tensor, batch: Batch
    ) -> Tensor:
        """Each sequence's newest query against its own cached keys. [B, 1, H K]."""
        cache = batch.cache
        assert cache is not None
        k_BHE = torch.cat([k_BHK, q_BHK], dim=-1)
        k_BSHE = cache.append(self.layer_number, "key", k_BHE)
        v_BSHK = cache.append(self.layer_number, "value", v_BHK)
        age_BS = cache.lengths[:, None] - torch.arange(k_BSHE.shape[1], device=q_BHK.device)
        options = {"scale": self.mixer.head_dim**-0.5, "backend": self.mixer.kernel}
        o_BHK = sd_attention_step(q_BHK, k_BHK, d_BH, k_BSHE, v_BSHK, age_BS, **options)
        return o_BHK.flatten(1)[:, None]
