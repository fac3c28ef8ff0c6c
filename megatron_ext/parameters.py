"""How a parameter is drawn, split over tensor-parallel ranks, and how its gradient is made whole.

Every parameter is drawn from (seed, its global name) at full size and then sliced, so the initial
model does not depend on TP, PP, VPP or DP.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

Draw = Callable[[torch.Generator, tuple[int, ...]], Tensor]
"""Draws one full-size component in fp32 on the CPU."""
DRAWING_THREADS = 4
"""Each holds a full-size parameter in host memory."""


def normal(std: float) -> Draw:
    return lambda generator, shape: torch.randn(shape, generator=generator) * std


def constant(value: float) -> Draw:
    return lambda generator, shape: torch.full(shape, float(value))


def uniform(low: float, high: float) -> Draw:
    return lambda generator, shape: torch.rand(shape, generator=generator) * (high - low) + low


def draw_log_decay_rate(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """A_log, with A ~ U(1, 16)."""
    return (torch.rand(shape, generator=generator) * 15 + 1).log()


def draw_dt_bias(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """softplus^-1(dt), dt log-uniform in [1e-3, 1e-1]: the state starts by forgetting slowly."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = (torch.rand(shape, generator=generator) * (high - low) + low).exp()
    return dt + torch.log(-torch.expm1(-dt))


@dataclass(frozen=True)
class Declaration:
    """What `initialise` needs to know of one parameter."""

    draw: Draw
    tensor_dim: int | None = None
    """The dimension split over tensor-parallel ranks; None is replicated."""
    components: dict[str, int] = field(default_factory=dict)
    """Full sizes of a fused parameter's parts along `tensor_dim`, in order; each rank holds its
    slice of every part. Empty: one part."""
    used_rows: int | None = None
    """Rows that are drawn; those beyond (vocabulary padding) are zero."""


def declare(
    parameter: nn.Parameter,
    draw: Draw,
    *,
    tensor_dim: int | None = None,
    components: dict[str, int] | None = None,
    used_rows: int | None = None,
) -> nn.Parameter:
    """Attaches the declaration, and Megatron's mark, without which gradient norms lose shards."""
    parameter.declaration = Declaration(draw, tensor_dim, components or {}, used_rows)  # type: ignore[attr-defined]
    if tensor_dim is not None:
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(parameter, name):
                delattr(parameter, name)
        set_tensor_model_parallel_attributes(parameter, True, tensor_dim, 1)
    return parameter


def initialise(
    parameters: Iterator[tuple[str, nn.Parameter]], seed: int, tensor_rank: int, tensor_size: int
) -> None:
    """Fills every parameter from (seed, global name).

    Raises:
        ValueError: a parameter nobody declared; its start would depend on the layout.
    """

    @torch.no_grad()
    def fill(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        declaration: Declaration | None = getattr(parameter, "declaration", None)
        if declaration is None:
            raise ValueError(f"parameter {name} has no declared initialisation")
        parts = declaration.components or {"": -1}
        slices = [
            _slice(name, part, size, parameter, declaration, seed, tensor_rank, tensor_size)
            for part, size in parts.items()
        ]
        full = slices[0] if len(slices) == 1 else torch.cat(slices, dim=declaration.tensor_dim or 0)
        parameter.copy_(full.to(parameter.dtype))

    # Each draws from a generator of its own, so their order does not matter.
    with ThreadPoolExecutor(DRAWING_THREADS) as pool:
        list(pool.map(fill, parameters))  # raises what a thread raised


def _slice(
    name: str,
    part: str,
    size: int,
    parameter: nn.Parameter,
    declaration: Declaration,
    seed: int,
    tensor_rank: int,
    tensor_size: int,
) -> Tensor:
    """This rank's slice of one part, drawn at full size."""
    dim = declaration.tensor_dim
    shape = list(parameter.shape)
    if dim is not None:
        shape[dim] = size if size >= 0 else shape[dim] * tensor_size
    digest = hashlib.sha256(f"{seed}:{name}:{part}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    rows = declaration.used_rows
    full = declaration.draw(generator, tuple([rows, *shape[1:]] if rows is not None else shape))
    if rows is not None and rows < shape[0]:
        full = torch.cat([full, full.new_zeros(shape[0] - rows, *shape[1:])])
    return full if dim is None else full.chunk(tensor_size, dim=dim)[tensor_rank]


class _SumGradients(torch.autograd.Function):
    """Identity forward; backward sums the gradients over a group in one all-reduce."""

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        flat = torch.cat([g.reshape(-1).float() for g in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([g.numel() for g in grads])
        return None, *(p.view_as(g).to(g.dtype) for p, g in zip(parts, grads, strict=True))


def replicated(group: dist.ProcessGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Parameters that every tensor-parallel rank holds whole but applies to its own heads.

    Their gradients are partial on each rank. Called once per layer with all of them, this sums them
    in backward whatever the mode (sequence parallelism on or off) and engine.
    """
    if group.size() == 1:
        return parameters
    return _SumGradients.apply(group, *parameters)  # type: ignore[return-value]


def residual_std(std: float, layers: int) -> float:
    """Standard deviation of projections into the residual stream."""
    return std / math.sqrt(2 * layers)
