"""Launches what carries queries and keys on Hopper, and its gradient inside tiles (hopper_*.py), in
place of Triton's kernels."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mixtron.kernels.hopper_launching import WARPS, fine, head_boxes, programs, row_boxes
from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention.hopper_tile_gradients import hopper_tile_gradient_kernel
from mixtron.kernels.path_attention.hopper_versions import hopper_version_kernel
from mixtron.kernels.path_attention.triton_plan import Layout

BLOCK = 64
launch_version = Launched(hopper_version_kernel)
launch_tile_gradient = Launched(hopper_tile_gradient_kernel)


def blocks(x: Tensor) -> TensorDescriptor:
    return row_boxes(x, BLOCK, BLOCK)


def versions(
    q_BTHK: Tensor, k_BTGK: Tensor, w: Tensor, beta: Tensor, L: Tensor, Y: Tensor, maps: Tensor,
    scale: float, layout: Layout,
    XT: Tensor, logits: Tensor, q_versions: Tensor, k_versions: Tensor,
) -> None:  # fmt: skip
    """Writes X^T [B, G, S, C], logits [B, H, S, C] inside tiles, q_versions
    [B, H, versions, C, K] and k_versions [B, G, versions, C, K]."""
    (B, T, H, _), G, low = q_BTHK.shape, k_BTGK.shape[2], q_BTHK.dtype
    N = layout.tiles
    launch_version(
        (programs(q_BTHK.device, -(-N // 2) * B * G),),
        head_boxes(q_BTHK, BLOCK, BLOCK), head_boxes(k_BTGK, BLOCK, BLOCK),
        *map(blocks, (w, L, Y, maps, XT, logits.view(low), q_versions, k_versions)),
        beta, layout.start_S, layout.end_S, scale,
        T, G, B * G, N, layout.levels, layout.reach, layout.versions, layout.nodes,
        R=H // G, FINE=fine(w),
        DOCUMENTS=layout.start_S is not None, num_warps=WARPS,
    )  # fmt: skip


def tile_gradients(
    q_BTHK: Tensor, k_BTHK: Tensor, w: Tensor, beta: Tensor, L: Tensor, XT: Tensor, Y: Tensor,
    dlogits: Tensor, dM: Tensor, dq_left: Tensor, dk_right: Tensor, dmaps: Tensor,
    scale: float, layout: Layout,
    dk: Tensor, dw: Tensor, dbeta: Tensor,
) -> None:  # fmt: skip
    """Writes dk to dbeta, laid out like the op's inputs."""
    (B, T, H, _), low = q_BTHK.shape, q_BTHK.dtype
    work = layout.tiles * B * H

    def rows(x: Tensor) -> TensorDescriptor:
        return row_boxes(x.view(low), BLOCK)

    launch_tile_gradient(
        (programs(q_BTHK.device, work),),
        head_boxes(q_BTHK, BLOCK), head_boxes(k_BTHK, BLOCK),
        rows(w), blocks(L.view(low)), blocks(XT.view(low)), rows(Y),
        *map(blocks, (dlogits, dM)), *map(rows, (dq_left, dk_right)), row_boxes(dmaps, 128),
        beta, layout.start_S, dk, dw, dbeta, scale,
        T, layout.S, layout.heads, H, layout.nodes, work,
        FINE=fine(w), DOCUMENTS=layout.start_S is not None, num_warps=WARPS,
    )  # fmt: skip
