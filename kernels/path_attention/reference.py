"""PaTH attention from its definition, a Householder map after the other. Memory T^2 K."""

import torch
import torch.nn.functional as F
from torch import Tensor


def path_attention_reference(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    w_BTGK: Tensor | None = None,
    beta_BTG: Tensor | None = None,
    log_forget_BTH: Tensor | None = None,
    past_k_BPGK: Tensor | None = None,
    past_v_BPGV: Tensor | None = None,
    past_gate_BPH: Tensor | None = None,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Arguments and result of `path_attention`, the gate scaled already. Gradients by autograd.

    At every token t all earlier keys are multiplied by H_t, and log_forget_t is added to all their
    gates: k_j has then become H_t ... H_{j+1} k_j. Arithmetic in fp64 for fp64 inputs, else fp32.
    """
    T, H = q_BTHK.shape[1:3]
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    groups = H // k_BTGK.shape[2]

    def per_head(x_BTGE: Tensor) -> Tensor:
        return x_BTGE.to(dtype).repeat_interleave(groups, dim=2)

    v_BSHV, before = per_head(v_BTGV), 0
    k_BSHK, gate_BSH = per_head(k_BTGK)[:, :0], torch.zeros_like(per_head(k_BTGK)[:, :0, :, 0])
    if past_k_BPGK is not None and past_v_BPGV is not None:
        k_BSHK, before = per_head(past_k_BPGK), past_k_BPGK.shape[1]
        v_BSHV = torch.cat([per_head(past_v_BPGV), v_BSHV], dim=1)
        gate_BSH = torch.zeros_like(k_BSHK[..., 0])
        if past_gate_BPH is not None:
            gate_BSH = past_gate_BPH.to(dtype)
    q_BTHK, k_BTHK = scale * q_BTHK.to(dtype), per_head(k_BTGK)
    rows = []
    for t in range(T):
        if before + t and w_BTGK is not None and beta_BTG is not None:
            w_B1HK = per_head(w_BTGK[:, t : t + 1])
            beta_B1H1 = per_head(beta_BTG[:, t : t + 1, :, None])
            along_BSH1 = (k_BSHK * w_B1HK).sum(-1, keepdim=True)
            k_BSHK = k_BSHK - beta_B1H1 * along_BSH1 * w_B1HK
        k_BSHK = torch.cat([k_BSHK, k_BTHK[:, t : t + 1]], dim=1)
        if log_forget_BTH is not None:
            gate_BSH = gate_BSH + log_forget_BTH[:, t : t + 1].to(dtype)
        gate_BSH = F.pad(gate_BSH, (0, 0, 0, 1))
        logits_BSH = (k_BSHK * q_BTHK[:, t : t + 1]).sum(-1) + gate_BSH
        rows.append(F.pad(logits_BSH, (0, 0, 0, T - 1 - t), value=float("-inf")))
    logits_BTSH = torch.stack(rows, dim=1)
    offsets = torch.tensor([0, before + T]) if cu_seqlens is None else cu_seqlens.cpu()
    document_S = torch.searchsorted(offsets.long(), torch.arange(before + T), right=True)
    other_TS1 = (document_S[before:, None] != document_S)[..., None].to(q_BTHK.device)
    weights_BTSH = logits_BTSH.masked_fill(other_TS1, float("-inf")).softmax(2)
    return torch.einsum("btsh,bshv->bthv", weights_BTSH, v_BSHV).to(v_BTGV.dtype)
