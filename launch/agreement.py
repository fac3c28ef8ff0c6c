"""Work whose errors every rank learns of, so that no rank is left waiting for one that failed."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mixtron.launch.checkpoint_files import CheckpointError
from mixtron.launch.exit_codes import FAILED, RETRYABLE
from mixtron.megatron_ext.parallel import Ranks


def gather[T](value: T) -> list[T]:
    """The value of every rank, by rank. `value` must be small."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def any_rank(device: torch.device, *flags: bool) -> list[bool]:
    """For each flag, whether any rank sets it; one all-reduce. A rank alone waits for nothing."""
    if dist.get_world_size() == 1:
        return list(flags)
    agreed = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in agreed.tolist()]


def everywhere[T](ranks: Ranks, work: Callable[[], T]) -> T:
    """Runs `work` on every rank. It may communicate only if it fails on all ranks or on none.

    Raises:
        CheckpointError: on all ranks the same, if it failed on any.
    """
    result, error, failure = None, None, None
    try:
        result = work()
    except (Exception, CheckpointException) as caught:
        error, failure = caught, _describe(caught, ranks.world_rank)
    failures = [f for f in gather(failure) if f is not None]
    if failures:
        raise CheckpointError(*failures[0]) from error
    return result  # type: ignore[return-value]


def on_first[T](ranks: Ranks, work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and gives its result, or its error, to all."""
    result, error, failure = None, None, None
    if ranks.is_first:
        try:
            result = work()
        except Exception as caught:
            error, failure = caught, _describe(caught, 0)
    answer = [(result, failure)]
    dist.broadcast_object_list(answer, src=0)
    result, failure = answer[0]
    if failure is not None:
        raise CheckpointError(*failure) from error
    return result  # type: ignore[return-value]


def _describe(error: BaseException, rank: int) -> tuple[str, int]:
    """The line and the exit code that an error becomes on all ranks."""
    if hasattr(error, "exit_code"):
        return str(error), error.exit_code  # type: ignore[attr-defined]
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda item: item[0])
    code = RETRYABLE if isinstance(error, OSError) else FAILED
    return f"rank {rank}: {type(error).__name__}: {error}", code
