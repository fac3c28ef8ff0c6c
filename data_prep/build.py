"""From text to shards on one machine: plan, run, merge and verify in one call.

The output depends on the inputs and the recipe alone, never on workers, kills or units.
"""

from collections.abc import Sequence
from pathlib import Path

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.merge import Merged, merge, remove_parts
from mixtron.data_prep.outputs import outputs_of
from mixtron.data_prep.plan import (
    OnBadLine,
    Plan,
    Recipe,
    load_plan,
    make_plan,
    plan_path,
    save_plan,
)
from mixtron.data_prep.run import run_units
from mixtron.data_prep.shards import shard_paths
from mixtron.data_prep.tokenizer_base import Tokenizer
from mixtron.data_prep.verify import verify


def build(
    inputs: Sequence[str | Path],
    tokenizer_path: str | Path,
    output_prefix: str | Path,
    workers: int = 1,
    text_keys: Sequence[str] = ("text",),
    on_bad_line: OnBadLine = "fail",
    append_eod: bool = True,
    eod_token: str | None = None,
    progress: bool = True,
) -> Manifest:
    """Builds the shard `output_prefix`.bin, .idx and .json of unnamed inputs.

    The arguments are those of `Recipe` and `build_all`.
    """
    if isinstance(text_keys, str):
        raise DataError(f"text_keys={text_keys!r}: a list of one key or more")
    recipe = Recipe(
        str(tokenizer_path),
        eod_token=eod_token,
        append_eod=append_eod,
        text_keys=tuple(text_keys),
        on_bad_line=on_bad_line,
    )
    merged = build_all(inputs, recipe, output_prefix, workers, progress=progress)
    return merged[0].manifest


def build_all(
    inputs: Sequence[str | Path],
    recipe: Recipe,
    prefix: str | Path,
    workers: int = 1,
    backend: str = "plain",
    progress: bool = True,
) -> list[Merged]:
    """Builds every shard of a recipe; nothing bears a shard's name unless it is whole.

    Started again after a kill or a mended input, it does what is not done yet; when all is done,
    it does nothing.

    Args:
        inputs: paths, folders, globs, URLs, `NAME=` before any of them; see `make_plan`.
        workers: processes that tokenise.
        backend: see `run_units`.
        progress: shows progress bars.

    Raises:
        DataError: bad input, with file and line; no documents; the prefix is taken.
        WorkerError: a worker process died.
        Stopped: a signal asked to stop.
    """
    tokenizer = recipe.load_tokenizer()
    plan_to(prefix, inputs, recipe, tokenizer)
    run_units(prefix, workers, backend=backend, progress=progress, tokenizer=tokenizer)
    merged = merge(prefix, progress)
    for one in merged:
        verify(one.output.prefix, progress)
    remove_parts(prefix)
    return merged


def plan_to(
    prefix: str | Path,
    inputs: Sequence[str | Path],
    recipe: Recipe,
    tokenizer: Tokenizer | None = None,
) -> Plan:
    """Makes a plan and writes it; a plan of changed inputs keeps the units it shares with it.

    The arguments are those of `make_plan`.

    Raises:
        DataError: a shard is there that was built from something else.
    """
    plan = make_plan([str(path) for path in inputs], recipe, tokenizer)
    same = plan_path(prefix).exists() and load_plan(prefix) == plan
    if not same:
        _refuse_existing(plan, prefix)
        save_plan(plan, prefix)
    return plan


def _refuse_existing(plan: Plan, prefix: str | Path) -> None:
    # Without a plan, any file was made by someone else; with one, the manifest makes a shard.
    first = 2 if plan_path(prefix).exists() else 0
    for output in outputs_of(plan, prefix):
        for path in shard_paths(output.prefix)[first:]:
            if path.exists():
                raise DataError(
                    f"{path} exists, built from other inputs or options; remove it or choose "
                    "another output prefix"
                )
