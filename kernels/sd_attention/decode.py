"""S-D attention of each sequence's newest token."""

import torch
from torch import Tensor

from mixtron.kernels.windowed_attention.triton_decode import attend_rows


def sd_attention_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    d_BH: Tensor,
    k_BSHE: Tensor,
    v_BSHV: Tensor,
    age_BS: Tensor,
    *,
    scale: float,
    backend: str = "blockwise",
) -> Tensor:
    """The newest token's output [B, H, V] in v's dtype; computed in fp32 (fp64 for fp64 inputs).

    Args:
        k_BSHE  [B, S, H, 2K]  cached [k; q] of every token, the newest included.
        v_BSHV  [B, S, H, V]
        age_BS  [B, S]         how many tokens ago a slot was written; 0 is the newest, negative
                               slots hold nothing.
        backend     "triton" takes bf16 on a GPU, "blockwise" is torch's form.
    """
    dtype = torch.promote_types(q_BHK.dtype, torch.float32)
    q_BHE = torch.cat([q_BHK, -k_BHK], dim=-1)
    if backend == "triton":
        row_BS = torch.arange(age_BS.shape[1], device=age_BS.device).expand_as(age_BS)
        own_BH = -d_BH.float().contiguous()
        return attend_rows(q_BHE, k_BSHE, v_BSHV, row_BS, age_BS >= 0, own_BH, scale=scale)
    logits_BHS = scale * torch.einsum("bhe,bshe->bhs", q_BHE.to(dtype), k_BSHE.to(dtype))
    age_B1S = age_BS[:, None]
    logits_BHS = torch.where(age_B1S == 0, -d_BH[..., None].to(dtype), logits_BHS)
    weights_BHS = logits_BHS.masked_fill(age_B1S < 0, float("-inf")).softmax(-1)
    return torch.einsum("bhs,bshv->bhv", weights_BHS, v_BSHV.to(dtype)).to(v_BSHV.dtype)
