"""The shards that a plan makes, and their names."""

from dataclasses import dataclass
from pathlib import Path

from mixtron.data_prep.plan import Plan
from mixtron.data_prep.shards import shard_paths


@dataclass(frozen=True)
class Output:
    """One shard."""

    prefix: str
    source: str
    held_out: bool


def outputs_of(plan: Plan, prefix: str | Path) -> list[Output]:
    """PREFIX for unnamed inputs, PREFIX-NAME for a source; and -held-out after it for a second."""
    outputs = []
    for source in plan.sources:
        name = f"{prefix}-{source}" if source else str(prefix)
        outputs.append(Output(name, source, False))
        if plan.recipe.held_out > 0:
            outputs.append(Output(f"{name}-held-out", source, True))
    return outputs


def all_made(plan: Plan, prefix: str | Path) -> bool:
    """A shard is made when its manifest is there, which is published last."""
    return all(shard_paths(output.prefix)[2].exists() for output in outputs_of(plan, prefix))
