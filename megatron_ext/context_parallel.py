"""Ways for a mixer to work on a sequence that is split over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Sends block i of dimension 0 to rank i; its own transpose, so backward is the same."""

    @staticmethod
    def forward(ctx, blocks, group):
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _AllToAll.apply(grad, ctx.group), None


def sequence_to_heads(x_THK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T/cp, H, K] of this rank's tokens to [T, H/cp, K] of this rank's heads."""
    size = group.size()
    tokens, heads, dim = x_THK.shape
    blocks = x_THK.view(tokens, size, heads // size, dim).transpose(0, 1).contiguous()
    return _AllToAll.apply(blocks, group).reshape(size * tokens, heads // size, dim)  # type: ignore[union-attr]


def heads_to_sequence(x_THK: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H/cp, K] of this rank's heads back to [T/cp, H, K] of this rank's tokens."""
    size = group.size()
    total, heads, dim = x_THK.shape
    blocks = _AllToAll.apply(x_THK.reshape(size, total // size, heads, dim), group)
    return blocks.transpose(0, 1).reshape(total // size, size * heads, dim)  # type: ignore[union-attr]


class _Gather(torch.autograd.Function):
    """[...] of every rank as [cp, ...]; backward returns to each rank the sum of its gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        # Flat along dimension 0, the one form that gloo takes too.
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return own, None


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of every rank as [cp, n, ...]. Backward returns to each rank the sum of its
    gradients, so every rank's result must be in a graph that backward passes."""
    return _Gather.apply(x, group)  # type: ignore[return-value]


def nothing_of(x: Tensor) -> Tensor:
    """Zeros in whose graph x is, so that no rank's backward leaves its part in an exchange out.
    Not a product: 0 * inf is NaN."""
    return x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0)


class _Pending:
    """A collective under way. It refers to no tensor that autograd tracks: that would be a cycle
    through the graph, and the group would outlive the run."""

    def __init__(self):
        self.work: dist.Work | None = None
        self.received: Tensor | None = None

    def finish(self) -> Tensor | None:
        assert self.work is not None
        self.work.wait()
        received, self.work, self.received = self.received, None, None
        return received


class _StartGather(torch.autograd.Function):
    """Begins to gather [E, ...] of every rank; backward ends what `_EndGather`'s began."""

    @staticmethod
    def forward(ctx, x, group, pending):
        ctx.pending = pending
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        pending.work = dist.all_gather_into_tensor(gathered, x.contiguous(), group, async_op=True)
        return gathered

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return ctx.pending.finish(), None, None


class _EndGather(torch.autograd.Function):
    """[cp, ...] of what `_StartGather` began; backward begins to sum each rank's gradients."""

    @staticmethod
    def forward(ctx, gathered, group, pending):
        ctx.group, ctx.pending = group, pending
        pending.finish()
        return gathered.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        sent = grad.flatten(0, 1).contiguous()
        own = sent.new_empty(grad.shape[1:])
        ctx.pending.received = own
        ctx.pending.work = dist.reduce_scatter_tensor(own, sent, group=ctx.group, async_op=True)
        return sent, None, None


class StateExchange:
    """The recurrent state [B, J, K, V] fp32 that the ranks before this one leave to it.

    Every rank sums its tokens up as S_after = transition S_before + write and sends
    4 J K (E + V) bytes, whatever its number of tokens; each folds the maps of those before it.
    The maps travel from construction to `state()`: what is computed in between hides the exchange,
    and its backward hides the backward of the exchange.

    Args:
        transition_BJKE: a matrix (E = K), or its diagonal (E = 1).
        starts_document: whether this rank's first token begins a document (0-dim bool): then
            nothing reaches it, or what comes after, from before.
    """

    def __init__(
        self,
        transition_BJKE: Tensor,
        write_BJKV: Tensor,
        starts_document: Tensor,
        group: dist.ProcessGroup,
    ):
        self.E = transition_BJKE.shape[-1]
        self.group = group
        self.starts_document = starts_document
        kept_BJKE = transition_BJKE.masked_fill(starts_document, 0.0)
        own = torch.cat([kept_BJKE, write_BJKV], dim=-1)
        self.pending = _Pending()
        self.travelling = _StartGather.apply(own, group, self.pending)

    def state(self) -> Tensor:
        maps: Tensor = _EndGather.apply(self.travelling, self.group, self.pending)  # type: ignore
        # Masks, not products: what overflowed in another document must not come in as 0 * inf.
        maps = maps.masked_fill(self.starts_document, 0.0)
        apply = torch.mul if self.E == 1 else torch.matmul
        state_BJKV = nothing_of(maps[self.group.rank()][..., self.E :])
        for before in maps[: self.group.rank()]:
            transition, write = before[..., : self.E], before[..., self.E :]
            cut = ~transition.flatten(-2).any(-1)[..., None, None]
            state_BJKV = apply(transition, state_BJKV.masked_fill(cut, 0.0)) + write
        return state_BJKV


def state_before(
    transition_BJKE: Tensor, write_BJKV: Tensor, starts_document: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """The state of a `StateExchange` that nothing hides."""
    return StateExchange(transition_BJKE, write_BJKV, starts_document, group).state()


def rows_before(x_TBE: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """The last rows [rows, B, E] of the rank before this one; zeros on the first.

    Raises:
        ValueError: a rank holds fewer rows than asked for.
    """
    if rows > x_TBE.shape[0]:
        raise ValueError(
            f"a context rank holds {x_TBE.shape[0]} tokens, fewer than the {rows} the next needs"
        )
    tails = _Gather.apply(x_TBE[-rows:], group)
    rank = group.rank()
    return tails[rank - 1] if rank else nothing_of(tails[0])  # type: ignore[index]
