"""Emulation of the `torch.cuda` calls that Megatron-core makes whatever the device is.

It makes the code that ships run on CPU + gloo. Nothing is patched where a GPU exists.
"""

# This file replaces attributes of torch, which is what these rules are against.
# pyright: reportAttributeAccessIssue=false

import contextlib
import functools
from unittest import mock

import torch
from torch.utils._device import _device_constructors

_FACTORIES = [
    *("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
]


def install() -> None:
    """Patches `torch` once, if there is no GPU."""
    if torch.cuda.is_available() or getattr(torch, "_mixtron_cpu_backend", False):
        return
    torch._mixtron_cpu_backend = True
    _import_without_compiler()
    _patch_devices()
    _patch_random_state()
    _patch_streams()


def _import_without_compiler() -> None:
    """Megatron decorates functions with `torch.compile` when it is imported, which imports the
    compiler: a fifth of a process's start, and on a CPU none of these functions is called."""
    with mock.patch.object(torch, "compile", lambda function: function):
        import megatron.core.jit
    megatron.core.jit.disable_jit_fuser()


def _patch_devices() -> None:
    cpu = torch.device("cpu")
    cuda = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.nvtx.range_push = lambda *args, **kwargs: None
    cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    # `with torch.device(...)` knows factories by identity: it must learn the plain ones first.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron's optimizer sorts parameters by these strings and knows only the CUDA ones.
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, dtype=None, **kwargs: (
        plain_type(self).replace("torch.", "torch.cuda.", 1)
        if dtype is None
        else plain_type(self, dtype, **kwargs)
    )
    cuda.FloatTensor = torch.FloatTensor
    cuda.IntTensor = torch.IntTensor
    cuda.LongTensor = torch.LongTensor


def _on_cpu(factory):
    @functools.wraps(factory)
    def build(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return build


def _patch_random_state() -> None:
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.cuda.initial_seed = torch.initial_seed

    import megatron.core.tensor_parallel.random as mcore_random

    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _Stream:
    """A CUDA stream or event where everything has already happened."""

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        return None

    wait_stream = wait_event = record = synchronize = wait = _nothing

    def record_event(self, *args):
        return self

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def _patch_streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
