"""Hands a recurrent state from context rank to context rank; no token is summed up twice.

Each rank runs its tokens from the state that the rank before left, so the ranks work on one layer
one after the other, but on several layers at the same time: in forward a rank is behind the one
before it by the time of one layer's recurrence, and in backward, where gradients go the other way,
ahead of it. Over all layers that is waited for once, not in each, as long as no layer gathers
anything from all context ranks: a convolution's last rows go the same way.

A layer that is computed again in backward takes what it took the first time. Were it sent again,
each rank would wait for the one before it in the middle of backward, which goes the other way.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor


def is_second_forward() -> bool:
    """Whether this forward of a layer is its second, for backward. Not within autograd's
    functions."""
    return is_checkpointing() and torch.is_grad_enabled()


class Neighbours:
    """The context ranks beside this one, for one layer and one kind of message.

    Messages go to the next rank in forward, and their gradients to the one before in backward. What
    a rank's message is computed from must be in a graph that every rank's backward passes.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        rank, size = group.rank(), group.size()
        self.before = dist.get_global_rank(group, rank - 1) if rank else None
        self.after = dist.get_global_rank(group, rank + 1) if rank + 1 < size else None
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def start(self, x: Tensor, rank: int) -> None:
        """Begins to send. What was sent before has long arrived, and is let go."""
        self.finish()
        x = x.contiguous()
        work = dist.isend(x, rank, group=self.group)
        assert work is not None
        self._under_way = (work, x)

    def finish(self) -> None:
        """What is computed next begins when what was sent has left."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None

    def take(self, like: Tensor, rank: int) -> Tensor:
        received = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(received, rank, group=self.group)
        return received

    def keep(self, taken: Tensor, received: dict) -> None:
        """For the second forward, if there will be one."""
        if is_checkpointing() and not torch.is_grad_enabled():
            received[self] = taken

    def rows_before(self, x_TBE: Tensor, rows: int, received: dict) -> Tensor:
        """The last rows [rows, B, E] of the rank before this one; zeros on the first.

        Args:
            received: a micro-batch's, see Batch.
        Raises:
            ValueError: a rank holds fewer rows than asked for.
        """
        if rows > x_TBE.shape[0]:
            raise ValueError(
                f"a context rank holds {x_TBE.shape[0]} tokens, fewer than the {rows} needed next"
            )
        known = received if is_second_forward() else None
        before: Tensor = _Shift.apply(x_TBE[-rows:], self, known)  # type: ignore[assignment]
        self.keep(before, received)
        return before


class _Shift(torch.autograd.Function):
    """Sends a tensor on and returns what the rank before sent, or zeros; or what is known."""

    @staticmethod
    def forward(ctx, x, beside, known):
        ctx.beside = beside
        if known is not None:
            return known.pop(beside)
        if beside.after is not None:
            beside.start(x, beside.after)
        return torch.zeros_like(x) if beside.before is None else beside.take(x, beside.before)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        beside = ctx.beside
        if beside.before is not None:
            beside.start(grad, beside.before)
        taken = torch.zeros_like(grad) if beside.after is None else beside.take(grad, beside.after)
        return taken, None, None


class StateRelay(Neighbours):
    """A state [B, J, K, V] fp32: 4 J K V bytes a sequence, whatever the number of tokens."""

    def receive(
        self, q_BTHK: Tensor, v_BTJV: Tensor, starts_document: Tensor, received: dict
    ) -> Tensor | None:
        """The state that the rank before left; None on the first rank.

        Args:
            q_BTHK: this rank's, as v_BTJV; through it autograd knows of the state.
            starts_document: whether this rank's first token begins a document (0-dim bool): then
                the state is zero.
            received: a micro-batch's, see Batch.
        """
        if self.before is None:
            return None
        shape = (q_BTHK.shape[0], v_BTJV.shape[2], q_BTHK.shape[3], v_BTJV.shape[3])
        known = received if is_second_forward() else None
        state: Tensor = _Receive.apply(q_BTHK, shape, self, known)  # type: ignore[assignment]
        self.keep(state, received)
        # Not a product: what overflowed in another document must not come in as 0 * inf.
        return state.masked_fill(starts_document, 0.0)

    def send(self, output: Tensor, state: Tensor) -> Tensor:
        """Sends this rank's last state on; the output, through which its gradient comes in."""
        if self.after is None:
            return output
        return _Send.apply(output, state, self, is_second_forward())  # type: ignore[return-value]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, shape, relay, known):
        ctx.relay = relay
        if known is not None:
            return known.pop(relay)
        return relay.take(anchor.new_empty(shape, dtype=torch.float32), relay.before)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        ctx.relay.start(grad, ctx.relay.before)
        return None, None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, state, relay, again):
        ctx.relay, ctx.shape = relay, state.shape
        if not again:
            relay.start(state, relay.after)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        like = grad.new_empty(ctx.shape, dtype=torch.float32)
        return grad, ctx.relay.take(like, ctx.relay.after), None, None
