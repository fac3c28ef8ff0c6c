"""The random states of one rank: torch's, the device's, and Megatron's tracker."""

import torch
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from mixtron.megatron_ext.parallel import Ranks


def random_states() -> dict:
    """Copies of all of them, as tensors."""
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": _tracker().get_states(),
    }


def restore_random_states(states: dict) -> None:
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    _tracker().set_states(states["tracker"])


def _tracker() -> CudaRNGStatesTracker:
    return get_cuda_rng_tracker()  # type: ignore[return-value]


def reseed(seed: int, ranks: Ranks) -> None:
    """New states: other ones in each pipeline stage and each data- and context-parallel rank."""
    seed += 100 * ranks.pipeline_rank + 100_003 * ranks.groups.dp_cp.rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
