"""PaTH attention on a GPU: prepares pieces of the heads, launches the kernels, gives autograd what
they return."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixtron.kernels.path_attention.triton_backward import delta_kernel, key_kernel, query_kernel
from mixtron.kernels.path_attention.triton_carry import (
    Carried,
    CarriedGradients,
    carry,
    carry_gradients,
    workspace_bytes,
)
from mixtron.kernels.path_attention.triton_forward import forward_kernel
from mixtron.kernels.path_attention.triton_gates import gate_gradient, gate_sums
from mixtron.kernels.path_attention.triton_plan import (
    SHARED_MEMORY_BYTES,
    Launch,
    Layout,
    large,
    launch_plan,
    layout_of,
)
from mixtron.kernels.triton_tools import INTERPRETED, check_takes, product_dtype

WORKSPACE_BYTES = 2**30
"""Of what is in memory at once beyond inputs and results; heads are taken in pieces that fit."""
LOG2_E = 1.4426950408889634


def path_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    past_gate: Tensor | None,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Arguments of `path_attention` in its order, the gate scaled already, for bf16 on a GPU with K
    and V of 64 or 128 and without a past.

    Raises:
        ValueError: what it cannot take.
    """
    del past_v, past_gate
    if past_k is not None:
        raise ValueError("past is given: the triton form takes none")
    check_takes(q, v, "q_BTHK")
    if w is not None and not INTERPRETED and not large(q.device):
        raise ValueError(
            f"w_BTGK is given: the triton form takes maps on a GPU with {SHARED_MEMORY_BYTES} "
            f"bytes of shared memory a block (H100, H200), not on a "
            f"{torch.cuda.get_device_name(q.device)}"
        )
    w, beta, log_forget = (None if x is None else x.float() for x in (w, beta, log_forget))
    options = scale, cu_seqlens, max_seqlen
    return _Attention.apply(q, k, v, w, beta, log_forget, *options)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Keeps the inputs, the output and the log-sum-exp; backward computes the rest anew."""

    @staticmethod
    def forward(ctx, q, k, v, w, beta, log_forget, scale, cu_seqlens, max_seqlen):  # type: ignore[override]
        # Not the contiguous copies are kept, but what they are copies of: the layer keeps it too.
        inputs = Inputs(q, k, v, w, beta, log_forget).contiguous()
        layout = inputs.layout(cu_seqlens, max_seqlen)
        parts = pieces(inputs, layout)
        if len(parts) > 1:
            o_BTHV, lse_BHS = q.new_empty(*q.shape[:3], v.shape[3]), _rows(q, layout)
        for rows, groups in parts:
            part = inputs.part(rows, groups)
            carried = None
            if w is not None:
                carried = carry(*part.carried(), scale, layout)
            found = attend(part, carried, layout, scale)
            if len(parts) == 1:
                o_BTHV, lse_BHS = found
            else:
                heads = inputs.heads_of(groups)
                o_BTHV[rows, :, heads], lse_BHS[rows, heads] = found
        ctx.save_for_backward(q, k, v, w, beta, log_forget, o_BTHV, lse_BHS, cu_seqlens)
        ctx.options = scale, max_seqlen
        return o_BTHV

    @staticmethod
    def backward(ctx, do_BTHV):  # type: ignore[override]
        *saved, o_BTHV, lse_BHS, cu_seqlens = ctx.saved_tensors
        scale, max_seqlen = ctx.options
        inputs, do_BTHV = Inputs(*saved).contiguous(), do_BTHV.contiguous()
        layout = inputs.layout(cu_seqlens, max_seqlen)
        delta_BHS = _rows(inputs.q, layout)
        (B, T, H, _), V = inputs.q.shape, do_BTHV.shape[3]
        delta_kernel[(layout.S // layout.tile, B * H)](
            o_BTHV, do_BTHV, delta_BHS, T, layout.S, H=H, V=V, C=layout.tile
        )
        parts, gradients = pieces(inputs, layout), None
        for rows, groups in parts:
            heads = inputs.heads_of(groups)
            do, lse, delta = (
                x.contiguous()
                for x in (do_BTHV[rows, :, heads], lse_BHS[rows, heads], delta_BHS[rows, heads])
            )
            part = inputs.part(rows, groups)
            found = attend_backward(part, do, lse, delta, layout, scale)
            if len(parts) == 1:
                gradients = found
                break
            gradients = gradients or inputs.empty()
            for name, x in vars(gradients).items():
                if x is not None:
                    own = heads if name in ("q", "log_forget") else groups
                    x[rows, :, own] = getattr(found, name)
        assert gradients is not None
        return *vars(gradients).values(), None, None, None


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    log_forget: Tensor | None

    def contiguous(self) -> "Inputs":
        return Inputs(*(None if x is None else x.contiguous() for x in vars(self).values()))

    def empty(self) -> "Inputs":
        return Inputs(*(None if x is None else torch.empty_like(x) for x in vars(self).values()))

    def heads_of(self, groups: slice) -> slice:
        shared = self.q.shape[2] // self.k.shape[2]
        return slice(groups.start * shared, groups.stop * shared)

    def part(self, rows: slice, groups: slice) -> "Inputs":
        heads = self.heads_of(groups)
        of_heads = (heads, groups, groups, groups, groups, heads)
        taken = zip(vars(self).values(), of_heads, strict=True)
        return Inputs(*(None if x is None else x[rows, :, h].contiguous() for x, h in taken))

    def carried(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.w is not None
        assert self.beta is not None
        return self.q, self.k, self.w, self.beta

    def layout(self, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Layout:
        tile = launch_plan(self.q.device).tile
        return layout_of(self.q.shape[1], tile, self.w is not None, cu_seqlens, max_seqlen)


def _rows(q_BTHK: Tensor, layout: Layout) -> Tensor:
    B, _, H, _ = q_BTHK.shape
    return q_BTHK.new_empty(B, H, layout.S, dtype=torch.float32)


def pieces(inputs: Inputs, layout: Layout) -> list[tuple[slice, slice]]:
    """Rows of the batch and key/value heads that are taken at a time: rows first, of which no copy
    is needed."""
    B, _, G, _ = inputs.k.shape
    if inputs.w is None:
        return [(slice(0, B), slice(0, G))]
    shared = inputs.q.shape[2] // G
    fits = max(1, WORKSPACE_BYTES // workspace_bytes(layout, inputs.q.shape[3], shared))
    rows, groups = _even(B, max(1, fits // G)), _even(G, fits)
    return [
        (slice(b, min(b + rows, B)), slice(g, min(g + groups, G)))
        for b in range(0, B, rows)
        for g in range(0, G, groups)
    ]


def _even(count: int, fits: int) -> int:
    """At most `fits`, so that the parts of `count` are as equal as can be."""
    return -(-count // -(-count // fits))


def attend(
    inputs: Inputs, carried: Carried | None, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and log-sum-exp [B, H, S]."""
    o_BTHV = inputs.q.new_empty(*inputs.q.shape[:3], inputs.v.shape[3])
    lse_BHS = _rows(inputs.q, layout)
    launch = launch_plan(inputs.q.device).forward
    arguments, options = _common(inputs, carried, layout, launch, scale)
    B, H = lse_BHS.shape[:2]
    forward_kernel[(layout.S // layout.tile, B * H)](
        *arguments[:9],
        layout.start_S,
        o_BTHV,
        lse_BHS,
        *arguments[9:],
        **options,
    )
    return o_BTHV, lse_BHS


def attend_backward(
    inputs: Inputs,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    layout: Layout,
    scale: float,
) -> Inputs:
    """The gradients of a piece's inputs."""
    carried = gradients = None
    if inputs.w is not None:
        carried = carry(*inputs.carried(), scale, layout)
        gradients = CarriedGradients.empty(carried)
    operands = inputs, carried, gradients, do, lse, delta, layout, scale
    dk, dv, columns_2BHS = _key_gradients(*operands)
    dq, rows_BHS = _query_gradients(*operands)
    found = replace(inputs, q=dq, k=dk, v=dv)
    if inputs.log_forget is not None and columns_2BHS is not None:
        ds_BHS = rows_BHS - columns_2BHS.sum(0)
        found.log_forget = gate_gradient(ds_BHS, inputs.log_forget, layout.start_S, layout.end_S)
    if carried is not None and gradients is not None:
        found.q, found.k, found.w, found.beta = carry_gradients(
            *inputs.carried(), scale, layout, carried, gradients
        )
    return found


def _key_gradients(inputs, carried, gradients, do, lse, delta, layout, scale):
    launch = launch_plan(do.device).keys
    arguments, options = _common(inputs, carried, layout, launch, scale)
    dk, dk_far = torch.empty_like(inputs.k) if carried is None else gradients.k, None
    if carried is not None:
        dk_far = gradients.k_far
    dv = torch.empty_like(inputs.v)
    columns_2BHS = None
    if inputs.log_forget is not None:
        columns_2BHS = lse.new_empty(1 if carried is None else 2, *lse.shape)
    B, _, G, _ = inputs.k.shape
    key_kernel[(layout.S // layout.tile, B * G)](
        *arguments[:9],
        layout.start_S,
        layout.end_S,
        do,
        lse,
        delta,
        dk,
        dk_far,
        dv,
        columns_2BHS,
        *arguments[9:],
        **options,
    )
    return dk, dv, columns_2BHS


def _query_gradients(inputs, carried, gradients, do, lse, delta, layout, scale):
    launch = launch_plan(do.device).queries
    arguments, options = _common(inputs, carried, layout, launch, scale)
    dq = dq_near = dq_far = dlogits = None
    if carried is None:
        dq = torch.empty_like(inputs.q)
    else:
        dq_near, dq_far, dlogits = gradients.q_near, gradients.q_far, gradients.logits
    rows_BHS = None if inputs.log_forget is None else torch.empty_like(lse)
    B, H = lse.shape[:2]
    query_kernel[(layout.S // layout.tile, B * H)](
        *arguments[:9],
        layout.start_S,
        do,
        lse,
        delta,
        dq,
        dq_near,
        dq_far,
        dlogits,
        rows_BHS,
        *arguments[9:],
        **options,
    )
    return dq, rows_BHS


def _common(
    inputs: Inputs, carried: Carried | None, layout: Layout, launch: Launch, scale: float
) -> tuple[list, dict]:
    """What all three kernels are given: operands first, sizes after; and what they are compiled
    for."""
    (B, T, H, K), (G, V) = inputs.q.shape, inputs.v.shape[2:]
    gates = totals = None
    if inputs.log_forget is not None:
        gates, totals = gate_sums(inputs.log_forget, layout.S, layout.tile, launch.block)
    if carried is None:
        operands = [inputs.q, None, None, inputs.k, None, inputs.v, None]
    else:
        queries, keys = (carried.q_near, carried.q_far), (carried.k, carried.k_far)
        operands = [None, *queries, *keys, inputs.v, carried.logits]
    sizes = [scale * LOG2_E, T, layout.S, layout.span, layout.lags, B * H * layout.S]
    options = {
        "H": H,
        "G": G,
        "K": K,
        "V": V,
        "C": layout.tile,
        "BLOCK": launch.block,
        "MAPS": carried is not None,
        "GATE": gates is not None,
        "DOCUMENTS": layout.start_S is not None,
        "PRODUCT": product_dtype(inputs.q.dtype),
        "STAGES": launch.stages,
        "num_warps": launch.warps,
    }
    return [*operands, gates, totals, *sizes], options
