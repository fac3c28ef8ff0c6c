"""What a checkpoint says of the run that wrote it, held against the run that continues it."""

import contextlib
import functools
import math
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mixtron.launch.config import RunConfig
from mixtron.launch.data import AnyTraining, TrainingData, compare_records
from mixtron.megatron_ext.errors import ConfigError

FREE = (
    *("name", "run_dir", "parallel", "checkpoint", "logging", "slurm", "engine", "deepspeed"),
    "training.recompute",
    "training.layer_graphs",
    "training.deterministic",
    "training.micro_batch_sequences",
    "training.eval_every_steps",
    "training.max_skipped_steps",
    "training.skip_steps",
)
"""Keys that may change at any resume: none of them changes what is computed, but for rounding,
dropout and what a person asks for just then."""
OWN_RULES = ("data", "training.global_batch_tokens")
"""Keys that are compared by content."""
BRANCH = ("optimizer", "schedule", "training.steps")
"""Keys that a branch may change beyond that."""
BATCH = "training.global_batch_tokens"


@functools.cache
def versions() -> dict[str, str]:
    """Of the code that writes a checkpoint; in a git checkout with the commit."""
    found = {name: version(name) for name in ("mixtron", "megatron-core", "torch")}
    root = Path(__file__).parents[1]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    if (root / ".git").exists():
        answer = subprocess.run(git, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            found["commit"] = answer.stdout.strip()
    return found


def refuse_changes(path: Path, manifest: dict, config: RunConfig, *, branch: bool) -> list[str]:
    """Compares the run that wrote a checkpoint with the one that continues it, field by field.

    Args:
        branch: whether this run starts from another run's checkpoint.
    Returns:
        What changed and may, a line each.
    Raises:
        ConfigError: what may not; names both values and the override that would allow it.
    """
    allowed = (*config.checkpoint.allow_changes, *(BRANCH if branch else ()))
    notes, refused = [], {}
    for key, was, now in config_differences(manifest["config"], config.model_dump(mode="json")):
        change = f"{key} was {was}, is {now}"
        if _within(key, FREE + OWN_RULES):
            continue
        if _within(key, allowed):
            notes.append(change)
        else:
            refused[key] = change
    if refused:
        keys = ", ".join([*config.checkpoint.allow_changes, *refused])
        raise ConfigError(
            f"{path} was written by another config: {'; '.join(refused.values())}; set them back, "
            f"or go on with the new values by checkpoint.allow_changes='[{keys}]'"
        )
    saved, current = manifest["versions"], versions()
    return notes + [
        f"{name} was {saved.get(name, 'not recorded')}, is {now}"
        for name, now in current.items()
        if saved.get(name) != now
    ]


def refuse_changed_data(
    path: Path, state: dict, config: RunConfig, data: AnyTraining, *, branch: bool
) -> list[str]:
    """The same for tokenizer and corpora, which are compared by their content."""
    differences = compare_records(state["data_record"], data.record())
    was, now = state.get("tokenizer_sha256"), tokenizer_sha256(data)
    if was is not None and now is not None and was != now:
        differences.append(f"the tokenizer's sha256 was {was[:12]}, is {now[:12]}")
    if differences and not (config.data.allow_changed or branch):
        raise ConfigError(
            f"{path}: the data differ from the checkpoint's: {'; '.join(differences)}; "
            "set data.allow_changed=true to go on with the data as they are now"
        )
    return [f"data changed since the checkpoint: {difference}" for difference in differences]


def converted_step(
    path: Path, manifest: dict, config: RunConfig, data_ranks: int, *, branch: bool
) -> int:
    """The number of the last step, counted in steps of this run's global batch.

    Raises:
        ConfigError: the batch changed within a run, or does not divide what was consumed.
    """
    progress, saved = manifest["state"]["progress"], manifest["config"]
    was, now = saved["training"]["global_batch_tokens"], config.training.global_batch_tokens
    if was == now:
        return progress["step"]
    change = f"{path}: {BATCH} was {was}, is {now}"
    if not branch:
        raise ConfigError(
            f"{change}, which numbers the steps anew; set it back, or branch into another folder: "
            f"checkpoint.branch_from={path} run_dir=NEW"
        )
    consumed = progress["samples"] * saved["data"]["sequence_length"]
    if consumed % now:
        unit = data_ranks * config.training.micro_batch_sequences * config.data.sequence_length
        nearest = _nearest_divisors(consumed, now, unit)
        raise ConfigError(
            f"{change}, which does not divide the {consumed} tokens consumed so far; "
            f"nearest that work: {', '.join(map(str, nearest)) or 'none'}"
        )
    return consumed // now


def _nearest_divisors(number: int, wanted: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `wanted`, below and above it, that divide `number`."""
    if number % unit:
        return []
    parts = number // unit
    small = [d for d in range(1, math.isqrt(parts) + 1) if parts % d == 0]
    found = sorted({unit * d for part in small for d in (part, parts // part)})
    return [*[d for d in found if d < wanted][-1:], *[d for d in found if d > wanted][:1]]


def tokenizer_sha256(data: AnyTraining) -> str | None:
    """Of the tokenizer that all shards were built with; synthetic data have none."""
    return data.shards[0].manifest.tokenizer["sha256"] if isinstance(data, TrainingData) else None


def config_differences(saved: dict, current: dict) -> Iterator[tuple[str, Any, Any]]:
    """Key path and both values of every field that differs, in the order of the current config."""
    with contextlib.suppress(ValidationError):
        # Fields that were added since get their defaults. Where a field is no more, all are shown.
        saved = RunConfig.model_validate(saved).model_dump(mode="json")
    yield from leaf_differences(saved, current)


def leaf_differences(saved: dict, current: dict) -> Iterator[tuple[str, Any, Any]]:
    """The same for any two trees."""
    before, after = dict(_leaves(saved)), dict(_leaves(current))
    for key in after | before:
        was, now = before.get(key, ABSENT), after.get(key, ABSENT)
        if was != now:
            yield key, was, now


class _Absent:
    def __str__(self) -> str:
        return "absent"


ABSENT = _Absent()


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and (node or not path):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
