"""PaTH attention on a GPU: prepares pieces of the heads, launches the kernels, gives autograd what
they return."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.hopper_launching import aligned
from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention import hopper_op
from mixtron.kernels.path_attention.triton_backward import delta_kernel, key_kernel
from mixtron.kernels.path_attention.triton_carry import (
    Carried,
    CarriedGradients,
    Factors,
    carry,
    carry_gradients,
    factors_of,
    workspace_bytes,
)
from mixtron.kernels.path_attention.triton_forward import forward_kernel
from mixtron.kernels.path_attention.triton_gates import (
    GateSums,
    edge_sums,
    gate_gradient,
    gate_sums,
)
from mixtron.kernels.path_attention.triton_plan import (
    SHARED_MEMORY_BYTES,
    Launch,
    Layout,
    Plan,
    large,
    launch_plan,
    layout_of,
    warp_specialized,
)
from mixtron.kernels.path_attention.triton_query_backward import query_kernel
from mixtron.kernels.triton_tools import INTERPRETED, check_takes, product_dtype

WORKSPACE_BYTES = 3 * 2**28
"""Of what is in memory at once beyond inputs and results; heads are taken in pieces that fit."""
LOG2_E = 1.4426950408889634
DELTA_WARPS = 4
launch_forward, launch_delta = Launched(forward_kernel), Launched(delta_kernel)
launch_keys, launch_queries = Launched(key_kernel), Launched(query_kernel)


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
    """Keeps q, k, v and gates, the maps' factors, the output and the log-sum-exp; backward
    computes the rest anew."""

    @staticmethod
    def forward(ctx, q, k, v, w, beta, log_forget, scale, cu_seqlens, max_seqlen):  # type: ignore[override]
        # Not the contiguous copies are kept, but what they are copies of: the layer keeps it too.
        inputs = Inputs(q, k, v, log_forget).aligned()
        layout = inputs.layout(cu_seqlens, max_seqlen)
        gates, factors = inputs.gates(layout, w is not None), None
        if w is not None:
            factors = factors_of(w.contiguous(), beta.contiguous(), layout)
        o_BTHV, lse_BHS = q.new_empty(*q.shape[:3], v.shape[3]), _rows(q, layout)
        for rows, groups in pieces(inputs, layout, factors):
            heads = inputs.heads_of(groups)
            piece = Piece.of(inputs, factors, gates, rows, groups, layout, scale)
            attend(piece, o_BTHV[rows, :, heads], lse_BHS[rows, heads])
        kept = (None,) * 3 if factors is None else vars(factors).values()
        ctx.save_for_backward(q, k, v, log_forget, *kept, o_BTHV, lse_BHS, cu_seqlens)
        ctx.options = scale, max_seqlen
        return o_BTHV

    @staticmethod
    def backward(ctx, do_BTHV):  # type: ignore[override]
        *saved, o_BTHV, lse_BHS, cu_seqlens = ctx.saved_tensors
        scale, max_seqlen = ctx.options
        inputs, do_BTHV = Inputs(*saved[:4]).aligned(), aligned(do_BTHV)
        factors = None if saved[4] is None else Factors(*saved[4:])
        layout = inputs.layout(cu_seqlens, max_seqlen)
        delta_BHS, less_BHS = _rows(inputs.q, layout), _rows(inputs.q, layout)
        gates = inputs.gates(layout, factors is not None, lse_BHS)
        gradients, ds = Gradients.empty(inputs, factors), None
        until_BHS = None if gates is None else gates.tokens_4BHS[2]
        (B, T, H, _), V = inputs.q.shape, do_BTHV.shape[3]
        launch_delta(
            (layout.S // layout.tile, B * H),
            o_BTHV, do_BTHV, lse_BHS, until_BHS, delta_BHS, less_BHS, T, layout.S, H,
            V=V, C=layout.tile, GATE=gates is not None, num_warps=DELTA_WARPS,
        )  # fmt: skip
        if gates is not None:
            parts = 1
            if factors is not None and not (inputs.warp_specialized and inputs.k.shape[2] == H):
                parts = layout.levels + 1
            ds = torch.empty_like(lse_BHS), lse_BHS.new_empty(parts, *lse_BHS.shape)
        for rows, groups in pieces(inputs, layout, factors):
            heads = inputs.heads_of(groups)
            of_rows = (x[rows, heads] for x in (lse_BHS, delta_BHS, less_BHS))
            own = None if ds is None else (ds[0][rows, heads], ds[1][:, rows, heads])
            piece = Piece.of(inputs, factors, gates, rows, groups, layout, scale)
            of_rows = do_BTHV[rows, :, heads], *of_rows
            attend_backward(piece, *of_rows, gradients.part(inputs, rows, groups), own)
        if inputs.log_forget is not None and ds is not None:
            bounds = layout.start_S, layout.end_S
            gradients.log_forget = gate_gradient(*ds, T, *bounds)
        return *vars(gradients).values(), None, None, None


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    log_forget: Tensor | None

    def aligned(self) -> "Inputs":
        return Inputs(*(None if x is None else aligned(x) for x in vars(self).values()))

    def heads_of(self, groups: slice) -> slice:
        shared = self.q.shape[2] // self.k.shape[2]
        return slice(groups.start * shared, groups.stop * shared)

    def part(self, rows: slice, groups: slice) -> "Inputs":
        """Views."""
        heads = self.heads_of(groups)
        taken = zip(vars(self).values(), (heads, groups, groups, heads), strict=True)
        return Inputs(*(None if x is None else x[rows, :, h] for x, h in taken))

    def plan(self) -> Plan:
        return launch_plan(self.q.device, max(self.q.shape[3], self.v.shape[3]))

    @property
    def warp_specialized(self) -> bool:
        """Whether they are, with maps."""
        return warp_specialized(self.q.device, self.q.shape[3], self.v.shape[3])

    def gates(self, layout: Layout, maps: bool, lse_BHS: Tensor | None = None) -> GateSums | None:
        """In backward with the log-sum-exps."""
        if self.log_forget is None:
            return None
        sums = gate_sums(self.log_forget, layout.S, layout.tile, self.plan().block)
        if maps and self.warp_specialized:
            sums.edges = edge_sums(sums, lse_BHS, layout.tile, layout.levels)
        return sums

    def layout(self, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Layout:
        _, T, H, _ = self.q.shape
        return layout_of(T, H, self.plan().tile, cu_seqlens, max_seqlen)


@dataclass
class Gradients:
    """Of the op's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    log_forget: Tensor | None = None

    @staticmethod
    def empty(inputs: Inputs, factors: Factors | None) -> "Gradients":
        q, k, v, _ = vars(inputs).values()
        w = beta = None
        if factors is not None:
            w = torch.empty_like(k, dtype=factors.beta.dtype)
            beta = w.new_empty(w.shape[:3])
        return Gradients(*(torch.empty_like(x) for x in (q, k, v)), w, beta)

    def part(self, inputs: Inputs, rows: slice, groups: slice) -> "Gradients":
        """Views."""
        of_keys = (None if x is None else x[rows, :, groups] for x in (self.k, self.v, self.w))
        beta = None if self.beta is None else self.beta[rows, :, groups]
        return Gradients(self.q[rows, :, inputs.heads_of(groups)], *of_keys, beta)


def _rows(q_BTHK: Tensor, layout: Layout) -> Tensor:
    B, _, H, _ = q_BTHK.shape
    return q_BTHK.new_empty(B, H, layout.S, dtype=torch.float32)


def pieces(inputs: Inputs, layout: Layout, factors: Factors | None) -> list[tuple[slice, slice]]:
    """Rows of the batch and key/value heads that are taken at a time: of several rows all, of
    one some heads, so that a piece's log-sum-exps are in one piece."""
    B, _, G, _ = inputs.k.shape
    if factors is None:
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


@dataclass
class Piece:
    """What is computed at a time."""

    inputs: Inputs
    factors: Factors | None
    gates: GateSums | None
    carried: Carried | None
    layout: Layout
    scale: float

    @staticmethod
    def of(
        inputs: Inputs,
        factors: Factors | None,
        gates: GateSums | None,
        rows: slice,
        groups: slice,
        layout: Layout,
        scale: float,
    ) -> "Piece":
        heads = inputs.heads_of(groups)
        if gates is not None:
            gates = gates.part(rows, heads)
        inputs, carried = inputs.part(rows, groups), None
        if factors is not None:
            factors = factors.part(rows, groups)
            carried = carry(inputs.q, inputs.k, factors, scale, layout)
        return Piece(inputs, factors, gates, carried, layout, scale)

    @property
    def warp_specialized(self) -> bool:
        return self.carried is not None and self.inputs.warp_specialized

    def grid(self, heads: int) -> tuple[int, int]:
        return self.layout.S // self.layout.tile, self.inputs.q.shape[0] * heads

    def arguments(self, launch: Launch) -> tuple[list, list, dict]:
        """What all three kernels are given: operands and sizes; and what they are compiled for."""
        x, layout, carried = self.inputs, self.layout, self.carried
        H, (G, V) = x.q.shape[2], x.v.shape[2:]
        if carried is None:
            operands = [x.q, x.k, x.v, None]
        else:
            operands = [carried.q, carried.k, x.v, carried.logits]
        sums = totals = None
        if self.gates is not None:
            sums, totals = self.gates.tokens_4BHS, self.gates.blocks_BHN
        sizes = [self.scale * LOG2_E, x.q.shape[1], layout.S]
        sizes += [layout.tiles, layout.levels, layout.reach, layout.versions, layout.nodes]
        sizes += [0 if sums is None else sums.stride(0), layout.heads, H]
        options = {
            "R": H // G,
            "K": x.q.shape[3],
            "V": V,
            "C": layout.tile,
            "BLOCK": x.plan().block,
            "MAPS": carried is not None,
            "GATE": sums is not None,
            "DOCUMENTS": layout.start_S is not None,
            "PRODUCT": product_dtype(x.q.dtype),
            "STAGES": launch.stages,
            "num_warps": launch.warps,
        }
        return [*operands, sums, totals, layout.start_S], sizes, options


def attend(piece: Piece, o_BTHV: Tensor, lse_BHS: Tensor) -> None:
    """Writes the output and the log-sum-exps of a piece."""
    if piece.warp_specialized:
        hopper_op.attend(piece, o_BTHV, lse_BHS)
        return
    operands, sizes, options = piece.arguments(piece.inputs.plan().forward)
    grid = piece.grid(o_BTHV.shape[2])
    launch_forward(grid, *operands, o_BTHV, lse_BHS, *sizes, **options)


def attend_keys(
    piece: Piece,
    do_BTHV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    less_BHS: Tensor,
    found: Gradients,
    gradients: CarriedGradients | None,
    columns_PBHS: Tensor | None,
) -> None:
    """Writes the gradients of values, and of keys at their tiles' right edges and in versions."""
    if gradients is not None and piece.warp_specialized and piece.layout.levels:
        of_rows = do_BTHV, delta_BHS, less_BHS
        hopper_op.attend_keys(piece, *of_rows, gradients, found.v, columns_PBHS)
        return
    operands, sizes, options = piece.arguments(piece.inputs.plan().keys)
    carried = piece.carried
    dk = [found.k, None] if gradients is None else [gradients.k_right, gradients.k]
    launch_keys(
        piece.grid(found.k.shape[2]),
        *operands,
        piece.layout.end_S,
        None if carried is None else carried.maps,
        do_BTHV,
        lse_BHS,
        delta_BHS,
        less_BHS,
        *dk,
        found.v,
        columns_PBHS,
        *sizes,
        **options,
    )


def attend_queries(
    piece: Piece,
    do_BTHV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    less_BHS: Tensor,
    found: Gradients,
    gradients: CarriedGradients | None,
    ds: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes the gradients of queries, and with maps what comes with them of the tiles; with a gate
    the sums of ds over rows, and over columns inside tiles."""
    if gradients is not None and piece.warp_specialized and piece.layout.levels:
        rows_BHS = None if ds is None else ds[0]
        of_rows = do_BTHV, delta_BHS, less_BHS
        hopper_op.attend_queries(piece, *of_rows, gradients, found.q, rows_BHS)
        return
    operands, sizes, options = piece.arguments(piece.inputs.plan().queries)
    carried, factors = piece.carried, piece.factors
    of_tiles = [*[None] * 6, found.q, *[None] * 4]
    if carried is not None and gradients is not None and factors is not None:
        of_tiles = [piece.inputs.k, factors.w, factors.beta, carried.XT, carried.Y, carried.maps]
        of_tiles += [found.q, gradients.q_left, gradients.q, gradients.logits, gradients.M]
    launch_queries(
        piece.grid(found.q.shape[2]),
        *operands,
        *(do_BTHV, lse_BHS, delta_BHS),
        *of_tiles,
        *((None, None) if ds is None else ds),
        *sizes,
        **options,
    )


def attend_backward(
    piece: Piece,
    do_BTHV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    less_BHS: Tensor,
    found: Gradients,
    ds: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes the gradients of a piece's inputs, but the gate's; with a gate the sums of ds over
    rows [B, H, S], and over columns in parts [parts, B, H, S]."""
    carried = piece.carried
    gradients = None if carried is None else CarriedGradients.empty(carried)
    of_rows = do_BTHV, lse_BHS, delta_BHS, less_BHS
    columns_PBHS = None if ds is None else ds[1]
    attend_keys(piece, *of_rows, found, gradients, columns_PBHS)
    attend_queries(piece, *of_rows, found, gradients, ds)
    if piece.factors is not None:
        assert carried is not None
        assert gradients is not None
        assert found.w is not None
        assert found.beta is not None
        written = found.k, found.w, found.beta
        carry_gradients(
            piece.inputs.q, piece.inputs.k, piece.factors, piece.scale, piece.layout, carried,
            gradients, *written,
        )  # fmt: skip
