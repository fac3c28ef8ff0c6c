"""PaTH attention on a GPU: prepares pieces of the heads, launches the kernels, gives autograd what
they return."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

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
        o_BTHV, lse_BHS = q.new_empty(*q.shape[:3], v.shape[3]), _rows(q, layout)
        for rows, groups in pieces(inputs, layout):
            part, heads = inputs.part(rows, groups), inputs.heads_of(groups)
            carried = None if w is None else carry(*part.carried(), scale, layout)
            attend(part, carried, o_BTHV[rows, :, heads], lse_BHS[rows, heads], layout, scale)
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
        gradients = inputs.empty()
        for rows, groups in pieces(inputs, layout):
            heads = inputs.heads_of(groups)
            part, found = inputs.part(rows, groups), gradients.part(rows, groups)
            of_rows = do_BTHV[rows, :, heads], lse_BHS[rows, heads], delta_BHS[rows, heads]
            attend_backward(part, found, *of_rows, layout, scale)
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
        """Views."""
        heads = self.heads_of(groups)
        of_heads = (heads, groups, groups, groups, groups, heads)
        taken = zip(vars(self).values(), of_heads, strict=True)
        return Inputs(*(None if x is None else x[rows, :, h] for x, h in taken))

    def carried(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.w is not None
        assert self.beta is not None
        return self.q, self.k, self.w, self.beta

    def layout(self, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Layout:
        _, T, H, _ = self.q.shape
        tile = launch_plan(self.q.device).tile
        return layout_of(T, H, tile, self.w is not None, cu_seqlens, max_seqlen)


def _rows(q_BTHK: Tensor, layout: Layout) -> Tensor:
    B, _, H, _ = q_BTHK.shape
    return q_BTHK.new_empty(B, H, layout.S, dtype=torch.float32)


def pieces(inputs: Inputs, layout: Layout) -> list[tuple[slice, slice]]:
    """Rows of the batch and key/value heads that are taken at a time: of several rows all, of
    one some heads, so that a piece's log-sum-exps are in one piece."""
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
    inputs: Inputs,
    carried: Carried | None,
    o_BTHV: Tensor,
    lse_BHS: Tensor,
    layout: Layout,
    scale: float,
) -> None:
    """Writes the output and the log-sum-exps of a piece."""
    launch = launch_plan(inputs.q.device).forward
    arguments, options = _common(inputs, carried, layout, launch, scale)
    B, H = lse_BHS.shape[:2]
    forward_kernel[(layout.S // layout.tile, B * H)](
        *arguments[:9], layout.start_S, o_BTHV, lse_BHS, *arguments[9:], **options
    )


def attend_backward(
    inputs: Inputs,
    found: Inputs,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    layout: Layout,
    scale: float,
) -> None:
    """Writes the gradients of a piece's inputs."""
    carried = gradients = None
    if inputs.w is not None:
        carried = carry(*inputs.carried(), scale, layout)
        gradients = CarriedGradients.empty(carried)
    operands = inputs, found, carried, gradients, do, lse, delta, layout, scale
    columns_2BHS = _key_gradients(*operands)
    rows_BHS = _query_gradients(*operands)
    if found.log_forget is not None and columns_2BHS is not None:
        ds_BHS = rows_BHS - columns_2BHS.sum(0)
        found.log_forget.copy_(
            gate_gradient(ds_BHS, found.log_forget, layout.start_S, layout.end_S)
        )
    if carried is not None and gradients is not None:
        carry_gradients(*inputs.carried(), scale, layout, carried, gradients, *found.carried())


def _key_gradients(inputs, found, carried, gradients, do, lse, delta, layout, scale):
    """dv and what becomes dk; returns the sums of ds over columns, with maps in two parts."""
    launch = launch_plan(do.device).keys
    arguments, options = _common(inputs, carried, layout, launch, scale)
    dk, dk_far = found.k, None
    if carried is not None:
        dk, dk_far = gradients.k, gradients.k_far
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
        found.v,
        columns_2BHS,
        *arguments[9:],
        **options,
    )
    return columns_2BHS


def _query_gradients(inputs, found, carried, gradients, do, lse, delta, layout, scale):
    """What becomes dq; returns the sums of ds over rows."""
    launch = launch_plan(do.device).queries
    arguments, options = _common(inputs, carried, layout, launch, scale)
    dq = dq_near = dq_far = dlogits = None
    if carried is None:
        dq = found.q
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
    return rows_BHS


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
    sizes += [layout.heads, H]
    options = {
        "R": H // G,
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
