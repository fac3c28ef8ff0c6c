"""Hands a recurrent state from context rank to context rank; no token is summed up twice.

Each rank runs its tokens from the state that the rank before left, so the ranks work on one layer
one after the other, but on several layers at the same time: in forward a rank is behind the one
before it by the time of one layer's recurrence, and in backward, where the state's gradient goes
the other way, ahead of it. Over all layers that is waited for once, not in each.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class StateRelay:
    """One layer's way to the ranks beside this one.

    A rank sends 4 J K V bytes forward and as many backward, whatever its number of tokens. Every
    rank's output must be in a graph that backward passes.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        rank, size = group.rank(), group.size()
        self.before = dist.get_global_rank(group, rank - 1) if rank else None
        self.after = dist.get_global_rank(group, rank + 1) if rank + 1 < size else None
        self._under_way: tuple[dist.Work, Tensor] | None = None

    def receive(self, q_BTHK: Tensor, v_BTJV: Tensor, starts_document: Tensor) -> Tensor | None:
        """The state [B, J, K, V] fp32 that the rank before left; None on the first rank.

        Args:
            q_BTHK: this rank's, as v_BTJV; through it autograd knows of the state.
            starts_document: whether this rank's first token begins a document (0-dim bool): then
                the state is zero.
        """
        if self.before is None:
            return None
        shape = (q_BTHK.shape[0], v_BTJV.shape[2], q_BTHK.shape[3], v_BTJV.shape[3])
        state: Tensor = _Receive.apply(q_BTHK, shape, self)  # type: ignore[assignment]
        return state * ~starts_document

    def send(self, output: Tensor, state: Tensor) -> Tensor:
        """Sends this rank's last state on; the output, through which its gradient comes in."""
        if self.after is None:
            return output
        return _Send.apply(output, state, self)  # type: ignore[return-value]

    def start(self, x: Tensor, rank: int) -> None:
        """Begins to send. What was sent before has long arrived, and is let go."""
        self.finish()
        x = x.contiguous()
        work = dist.isend(x, rank, group=self.group)
        assert work is not None
        self._under_way = (work, x)

    def finish(self) -> None:
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None

    def take(self, shape: tuple[int, ...], like: Tensor, rank: int) -> Tensor:
        received = torch.empty(shape, device=like.device, dtype=torch.float32)
        dist.recv(received, rank, group=self.group)
        return received


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, shape, relay):
        ctx.relay = relay
        return relay.take(shape, anchor, relay.before)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        ctx.relay.start(grad, ctx.relay.before)
        return None, None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, state, relay):
        ctx.relay, ctx.shape = relay, state.shape
        relay.start(state, relay.after)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, ctx.relay.take(ctx.shape, grad, ctx.relay.after), None
