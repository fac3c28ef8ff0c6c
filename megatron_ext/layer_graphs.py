"""Layers recorded as CUDA graphs: the host launches a graph a layer and direction, not a hundred
kernels.

A replay repeats the kernels of the recording with its arguments. What they read on the device is
copied into the tensors that were recorded; what a layer reads of a batch on the host must be the
same in every batch, and what it read is compared. Everything else stays as without graphs: each
layer is a node of autograd, and gradients are registered with Megatron as they become ready.

What a layer's ranks send each other under tensor and context parallelism is recorded as well. All
of them record at the same micro-batch and replay in the same order: they see the same documents.
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from reprlib import repr
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor, nn

from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.scalars import Scalars
from mixtron.megatron_ext.state_relay import Neighbours

EAGER_MICRO_BATCHES = 3
"""Before a recording: they compile kernels and let libraries set themselves up, NCCL's connections
between ranks among them."""
ON_THE_HOST = frozenset({"lengths", "rows", "token_kinds"})


class WatchedBatch(Batch):
    """A batch that knows what has been read of it on the host."""

    read: dict[str, tuple[Any, Any]]
    """By name the value, and the first layer that read it."""
    reader: Any
    """The layer at work."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ON_THE_HOST:
            self.read.setdefault(name, (value, self.reader))
        return value


def watched(batch: Batch) -> WatchedBatch:
    """A copy with tensors of its own, for any documents that fill its rows; the step is one too."""
    made: Any = copy.copy(batch)
    made.__class__ = WatchedBatch
    made.read, made.reader, made._shared, made.scalars = {}, None, {}, Scalars()
    # By `made`, so that other rows are refused: no document of theirs may be longer.
    made.max_seqlen = _tokens(batch) // made.rows
    made.position_ids = torch.empty_like(batch.position_ids)
    made.cu_seqlens = torch.empty_like(batch.cu_seqlens)
    made.step = torch.empty((), dtype=torch.int64, device=batch.position_ids.device)
    take(made, batch)
    return made


def take(made: Any, batch: Batch) -> None:
    """Copies what the device reads of a batch."""
    made.step.fill_(batch.step)
    made.position_ids.copy_(batch.position_ids)
    offsets = len(batch.cu_seqlens)
    made.cu_seqlens[:offsets].copy_(batch.cu_seqlens)
    made.cu_seqlens[offsets:].fill_(_tokens(batch))


def _tokens(batch: Batch) -> int:
    """Of the whole stream, of which a context rank holds a share."""
    return batch.context_size * len(batch.position_ids)


class LayerGraphs:
    """The layers of one model chunk. Every layer calls `run` in its stead."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.wrapped = wrapped
        self.layers: Any = list(wrapped.module.decoder.layers)  # type: ignore[union-attr]
        self.eager_left = EAGER_MICRO_BATCHES
        self.recorded: list[RecordedLayer] = []
        self.batch: WatchedBatch | None = None
        self.buffers: list[Tensor] = []
        for layer in self.layers:
            layer.graphs = self
        _alive.add(self)

    def run(self, layer: Any, hidden_TBD: Tensor, batch: Batch) -> Tensor:
        """What `layer.compute` gives.

        Raises:
            ConfigError: the batch differs from the recorded one in what layers read on the host.
        """
        if layer is self.layers[0]:
            self._begin(hidden_TBD, batch)
        if not self.recorded:
            return layer.compute(hidden_TBD, batch)
        recorded = self.recorded[self.layers.index(layer)]
        output_TBD: Any = _Replayed.apply(hidden_TBD, recorded)
        if layer is self.layers[-1] and batch.scalars is not None:
            reported = self.batch and self.batch.scalars
            assert reported is not None
            batch.scalars.add_all(reported)
        return output_TBD

    def _begin(self, hidden_TBD: Tensor, batch: Batch) -> None:
        """Records when it is time, and takes the micro-batch's tensors."""
        if self.eager_left > 0:
            self.eager_left -= 1
            return
        if self.batch is None or len(batch.cu_seqlens) > len(self.batch.cu_seqlens):
            self._record(hidden_TBD, batch)
        assert self.batch is not None
        for name, (recorded, layer) in self.batch.read.items():
            if (found := getattr(batch, name)) != recorded:
                raise _other_batch(name, recorded, found, layer)
        take(self.batch, batch)

    def release(self) -> None:
        """Frees the recordings and their memory."""
        self.recorded, self.batch, self.buffers = [], None, []

    def _record(self, hidden_TBD: Tensor, batch: Batch) -> None:
        self.release()
        for group in self._bucket_groups(self.wrapped.parameters()):
            group.finish_param_sync()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream), torch.enable_grad():
            unrecorded = watched(batch)
            input_TBD = hidden_TBD.detach().clone().requires_grad_()
            for layer in self.layers:
                with _leaves(layer, scratch=True) as leaves:
                    output_TBD = layer.compute(input_TBD, unrecorded)
                torch.autograd.grad(output_TBD, [input_TBD, *leaves], output_TBD.detach())
                # A recording cannot wait for what was launched before it.
                for beside in neighbours(layer):
                    beside.finish()
            del output_TBD, leaves
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what this stream alone could use
            # Megatron gathers into buffers that it replaces by larger ones; those recorded stay.
            self.buffers = list(get_global_memory_buffer().buffer.values())
            # Other tensors than those before: what is kept of a tensor is then computed anew.
            self.batch = watched(batch)
            gradient_TBD = torch.zeros_like(hidden_TBD)
            torch.cuda.synchronize()
            with _without_collecting():
                for layer in self.layers:
                    self.batch.reader = layer
                    recorded = RecordedLayer(self, layer, input_TBD, pool, stream)
                    self.recorded.append(recorded)
                    input_TBD = recorded.output_TBD.detach().requires_grad_()
                for recorded in reversed(self.recorded):
                    recorded.record_backward(gradient_TBD, pool, stream)
                    gradient_TBD = recorded.input_gradient_TBD
        torch.cuda.synchronize()

    def _bucket_groups(self, parameters: Any) -> list[Any]:
        """Those whose weights may still be on their way from other data ranks."""
        if not self.wrapped.ddp_config.overlap_param_gather:
            return []
        return list(dict.fromkeys(self.wrapped.param_to_bucket_group[p] for p in parameters))

    def ready(self, parameter: Tensor) -> None:
        """The parameter's gradient of this micro-batch is in Megatron's buffer."""
        wrapped = self.wrapped
        if wrapped.ddp_config.overlap_grad_reduce:
            group = wrapped.param_to_bucket_group[parameter]
            group.register_grad_ready(parameter, wrapped.force_all_reduce)


class RecordedLayer:
    """One layer's two graphs, and the tensors that they read and write."""

    def __init__(self, graphs: LayerGraphs, layer: Any, input_TBD: Tensor, pool, stream) -> None:
        self.graphs = graphs
        self.parameters = list(layer.parameters())
        self.bucket_groups = graphs._bucket_groups(self.parameters)
        self.input_TBD = input_TBD
        self.beside = neighbours(layer)
        self.forward = torch.cuda.CUDAGraph()
        with _leaves(layer) as self.leaves, _recording(self.forward, pool, stream):
            self.attached_TBD = layer.compute(input_TBD, graphs.batch)
            self._finish_sending()
        self.output_TBD = self.attached_TBD.detach()

    def record_backward(self, gradient_TBD: Tensor, pool, stream) -> None:
        self.gradient_TBD = gradient_TBD
        self.backward = torch.cuda.CUDAGraph()
        with _recording(self.backward, pool, stream):
            inputs = [self.input_TBD, *self.leaves]
            input_gradient, *found = torch.autograd.grad(self.attached_TBD, inputs, gradient_TBD)
            for leaf, gradient in zip(self.leaves, found, strict=True):
                if not leaf.grad_added_to_main_grad:
                    leaf.main_grad.add_(gradient)
            self._finish_sending()
        self.input_gradient_TBD = input_gradient
        del self.attached_TBD, self.leaves

    def _finish_sending(self) -> None:
        """A recording ends with all that it began."""
        for beside in self.beside:
            beside.finish()

    def replay_forward(self, input_TBD: Tensor) -> Tensor:
        for group in self.bucket_groups:
            group.finish_param_sync()
        if input_TBD.data_ptr() != self.input_TBD.data_ptr():
            self.input_TBD.copy_(input_TBD)
        self.forward.replay()
        return self.output_TBD.detach()

    def replay_backward(self, gradient_TBD: Tensor) -> Tensor:
        if gradient_TBD.data_ptr() != self.gradient_TBD.data_ptr():
            self.gradient_TBD.copy_(gradient_TBD)
        self.backward.replay()
        for parameter in self.parameters:
            self.graphs.ready(parameter)
        return self.input_gradient_TBD.detach()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_TBD, recorded):
        ctx.recorded = recorded
        return recorded.replay_forward(input_TBD)

    @staticmethod
    def backward(ctx, gradient_TBD):  # type: ignore[override]
        return ctx.recorded.replay_backward(gradient_TBD), None


_alive: WeakSet[LayerGraphs] = WeakSet()


def release_recordings() -> None:
    """Before process groups are destroyed: NCCL waits until no graph holds its calls."""
    for graphs in list(_alive):
        graphs.release()


def neighbours(layer: nn.Module) -> list[Neighbours]:
    """Through which the layer's parts send to other context ranks beside its computing."""
    held = (value for module in layer.modules() for value in vars(module).values())
    return [value for value in held if isinstance(value, Neighbours)]


def _other_batch(name: str, recorded: Any, found: Any, layer: Any) -> ConfigError:
    """The error for a batch that a layer, if it is one, would have read otherwise."""
    who, out = "a layer", "set training.layer_graphs=false"
    if layer is not None:
        mixer = layer.config.layer_mixers[layer.layer_number - 1]
        who = f"mixer {mixer!r}"
        if layer.self_attention.mixer.kernel != "triton":
            out = f"set mixers.{mixer}.kernel=triton, or training.layer_graphs=false"
    return ConfigError(
        f"training.layer_graphs=true: {who} reads {name} of a batch on the host, which was "
        f"{repr(recorded)} when it was recorded and is {repr(found)}; {out}"
    )


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream):
        # Other threads, such as NCCL's, may ask about their own events.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()


@contextmanager
def _leaves(layer: Any, *, scratch: bool = False) -> Iterator[list[Any]]:
    """The layer's parameters are tensors of their own in the same memory, with Megatron's marks;
    their gradients go into its buffers, or if `scratch` nowhere.

    Autograd's nodes of the parameters themselves, which Megatron's hooks hold, belong to the stream
    that they were made on, and a recording must not wait for another stream than its own.
    """
    own = [
        (m, name, p) for m in layer.modules() for name, p in m._parameters.items() if p is not None
    ]
    leaves: list[Any] = []
    for module, name, parameter in own:
        leaf: Any = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        leaf.__dict__.update(parameter.__dict__)
        leaf.grad_added_to_main_grad = False
        if scratch:
            leaf.main_grad = torch.zeros_like(leaf.main_grad)
        module._parameters[name] = leaf
        leaves.append(leaf)
    try:
        yield leaves
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Freeing what Python finds unused would call CUDA in the middle of a recording."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
