"""What the tests of PaTH's kernels for Hopper share: random operands, kernels emulated in place of
Triton's, and the machine code of what is launched."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention import hopper_carry, hopper_op, triton_carry, triton_op
from mixtron.kernels.path_attention.triton_carry import Carried, Factors
from mixtron.kernels.path_attention.triton_gates import EdgeSums, GateSums, edge_sums
from mixtron.kernels.path_attention.triton_op import Inputs, Piece
from mixtron.kernels.path_attention.triton_plan import Layout, layout_of
from mixtron.kernels.triton_tools import SHARED_MEMORY_BYTES
from tests.helpers import gluon_emulator
from tests.helpers.machine_code import Compiled, disassembled, overwritten, unset_addresses

K = C = 128

# In programs for Triton's interpreter


@contextmanager
def on_hopper() -> Iterator[list[str]]:
    """The op takes the kernels for Hopper, emulated. Gives the names of those launched so far."""
    launched: list[str] = []

    def emulated(launch: Launched) -> Callable:
        def emulate(grid, *arguments, **constants):
            launched.append(launch.kernel.__name__)
            gluon_emulator.run(launch.kernel, grid, *arguments, **constants)

        return emulate

    with ExitStack() as stack:
        for module in (triton_op, triton_carry):
            stack.enter_context(mock.patch.object(module, "warp_specialized", return_value=True))
        for module in (hopper_op, hopper_carry):
            for name, x in [*vars(module).items()]:
                if isinstance(x, Launched):
                    stack.enter_context(mock.patch.object(module, name, emulated(x)))
        yield launched


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def draw_maps(B: int, T: int, G: int) -> tuple[Tensor, Tensor]:
    """w and beta."""
    return F.normalize(draw(B, T, G, K), dim=-1), 2 * draw(B, T, G).sigmoid()


def draw_inputs(B: int, T: int, H: int, G: int, gated: bool) -> list[Tensor]:
    """The op's inputs in its order."""
    torch.manual_seed(T)
    inputs = [draw(B, T, H, K), draw(B, T, G, K), draw(B, T, G, K), *draw_maps(B, T, G)]
    return [*inputs, F.logsigmoid(draw(B, T, H) + 2)] if gated else inputs


def documents(offsets: Sequence[int] | None) -> tuple[Tensor | None, int | None]:
    """The offsets and the longest document's length, as the op takes them."""
    if offsets is None:
        return None, None
    cu_seqlens = torch.tensor(offsets)
    return cu_seqlens, int(cu_seqlens.diff().max())


def draw_piece(B: int, T: int, H: int, G: int, gated: bool, offsets: Sequence[int] | None) -> Piece:
    """All heads."""
    q, k, v, w, beta, *gate = draw_inputs(B, T, H, G, gated)
    inputs = Inputs(q, k, v, gate[0] if gated else None)
    layout = inputs.layout(*documents(offsets))
    factors, gates = triton_carry.factors_of(w, beta, layout), inputs.gates(layout, maps=True)
    piece = Piece.of(inputs, factors, gates, slice(0, B), slice(0, G), layout, K**-0.5)
    return with_edges(piece, None)


def with_edges(piece: Piece, lse_BHS: Tensor | None) -> Piece:
    """With the gates' sums as the kernels for Hopper take them."""
    if piece.gates is None:
        return piece
    edges = edge_sums(piece.gates, lse_BHS, C, piece.layout.levels)
    return replace(piece, gates=replace(piece.gates, edges=edges))


def rounded(piece: Piece) -> Piece:
    """With operands of the dtypes that they have on a GPU."""
    x, c, f = piece.inputs, piece.carried, piece.factors
    assert c is not None
    assert f is not None
    inputs = Inputs(x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16(), None)
    fine = {name: getattr(c, name).half() for name in ("logits", "maps", "XT", "Y")}
    carried = replace(c, q=c.q.bfloat16(), k=c.k.bfloat16(), **fine)
    return replace(piece, inputs=inputs, carried=carried, factors=replace(f, w=f.w.half()))


def attended(piece: Piece) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What backward takes of rows: a random gradient of the output, and lse, delta and less."""
    (B, T, H, _), layout, gates = piece.inputs.q.shape, piece.layout, piece.gates
    o, do, lse = torch.empty(B, T, H, K), draw(B, T, H, K), torch.empty(B, H, layout.S)
    triton_op.attend(piece, o, lse)
    delta, less = torch.empty_like(lse), torch.empty_like(lse)
    triton_op.launch_delta(
        (layout.tiles, B * H), o, do, lse, None if gates is None else gates.tokens_4BHS[2],
        delta, less, T, layout.S, H, V=K, C=C, GATE=gates is not None, num_warps=4,
    )  # fmt: skip
    return do, lse, delta, less


def compare_gradients(
    gradients_of: Callable[..., list[Tensor]], piece: Piece, sums: int = 0
) -> None:
    """Of a piece and what `attended` gives: they are the same on Hopper, and near them of rounded
    operands, but for the last ones, which are `sums` that cancel."""
    do, *rows = attended(piece)
    piece = with_edges(piece, rows[0])
    exact = gradients_of(piece, do, *rows)
    with on_hopper() as launched:
        found = gradients_of(piece, do, *rows)
        low = gradients_of(rounded(piece), do.bfloat16(), *rows)
    assert len(launched) == 2
    for x, y in zip(exact, found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-4, equal_nan=True)
    for x, y in [*zip(exact, low, strict=True)][: len(exact) - sums]:
        there = ~x.isnan()
        # bf16's 2^-9, in each of several products.
        assert (y.float() - x)[there].norm() <= 0.01 * x[there].norm(), x.shape


# For the compiler


def layout_to_compile(packed: bool) -> Layout:
    """Of 500 tokens and two heads."""
    return layout_of(500, 2, C, *documents([0, 100, 500] if packed else None))


def piece_to_compile(gated: bool, packed: bool) -> Piece:
    """Of two query heads that share a key; in a GPU's dtypes, and nothing but zeros."""
    layout = layout_to_compile(packed)
    q_BTHK, k_BTGK = (torch.zeros(1, 500, heads, K).bfloat16() for heads in (2, 1))
    queries_BHSC, keys_BGSC = (torch.zeros(1, heads, layout.S, C).half() for heads in (2, 1))
    q, k = (torch.zeros(1, heads, layout.versions, C, K).bfloat16() for heads in (2, 1))
    maps = keys_BGSC.new_zeros(1, 1, layout.nodes, K, K)
    carried = Carried(q, k, queries_BHSC, maps, keys_BGSC, keys_BGSC)
    factors = Factors(keys_BGSC, torch.zeros(1, 1, layout.S), keys_BGSC)
    gates = None
    if gated:
        edges = EdgeSums(*(torch.zeros(layout.levels, 1, 2, layout.S) for _ in range(2)))
        blocks_BHN = torch.zeros(1, 2, layout.S // 64)
        gates = GateSums(torch.zeros(4, 1, 2, layout.S), blocks_BHN, edges)
    return Piece(Inputs(q_BTHK, k_BTGK, k_BTGK, None), factors, gates, carried, layout, 1.0)


def machine_code(module: ModuleType, name: str, launch: Callable[[], None], folder: Path) -> str:
    """Of the kernel that is launched by a name of a module. It fits a multiprocessor, and reads no
    operand that is not there."""
    kernel = Compiled(getattr(module, name).kernel)
    with mock.patch.object(module, name, lambda grid, *x, **y: kernel[grid](*x, **y)):
        launch()
    assert kernel.shared_bytes[0] <= SHARED_MEMORY_BYTES[90]
    text = disassembled(kernel.cubins[0], folder)
    assert not overwritten(text)
    assert not unset_addresses(text)
    return text
