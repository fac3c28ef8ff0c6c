"""Finished units into shards, one for each source, and one for what is held out of it."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mixtron.data_prep.background_digest import BackgroundDigest
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import drop_from_memory, remove_leftovers
from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.outputs import Output, all_made, outputs_of
from mixtron.data_prep.plan import Plan, load_plan
from mixtron.data_prep.progress import progress_bar
from mixtron.data_prep.quarantine import write_rejected
from mixtron.data_prep.run import parts_folder, receipts_of, refuse_too_many
from mixtron.data_prep.selection import Selection
from mixtron.data_prep.shard_writer import ShardWriter
from mixtron.data_prep.shards import Shard, shard_paths
from mixtron.data_prep.unit import Receipt, unit_path

BLOCK_TOKENS = 1 << 20
"""Tokens copied at once, unless one document has more."""


@dataclass(frozen=True)
class Merged:
    """A shard that was made."""

    output: Output
    manifest: Manifest


def merge(prefix: str | Path, progress: bool = True) -> list[Merged]:
    """Makes the shards of a plan whose units are all done; those made before are kept.

    Raises:
        DataError: units are missing or damaged, too many bad lines, or no documents.
    """
    plan = load_plan(prefix)
    outputs = outputs_of(plan, prefix)
    if all_made(plan, prefix):
        return [Merged(output, Shard(output.prefix).manifest) for output in outputs]
    folder, receipts = parts_folder(prefix), receipts_of(plan, prefix)
    missing = [i for i, unit in enumerate(plan.units) if unit.key not in receipts]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of {len(plan.units)} units are not done (the first is "
            f"number {missing[0]}); run `mixtron prep run` again"
        )
    refuse_too_many(sum(r.rejected for r in receipts.values()), plan)
    if plan.recipe.on_bad_line == "quarantine":
        write_rejected(plan, receipts, folder, Path(f"{prefix}.rejected.jsonl"))
    copied = sum(receipts[unit.key].sizes["bin"] for unit in plan.units)
    with (
        Selection(plan, receipts, folder) as selection,
        progress_bar("merge", copied * (1 + (plan.recipe.held_out > 0)), show=progress) as advance,
    ):
        made = [_merge_one(o, plan, receipts, selection, advance) for o in outputs]
        return [Merged(*pair) for pair in zip(outputs, made, strict=True)]


def remove_parts(prefix: str | Path) -> None:
    """Removes the units' files; the plan stays, as a record."""
    shutil.rmtree(parts_folder(prefix), ignore_errors=True)


def _merge_one(
    output: Output,
    plan: Plan,
    receipts: dict[str, Receipt],
    selection: Selection,
    advance: Callable[[int, int], None],
) -> Manifest:
    bin_path, idx_path, json_path = shard_paths(output.prefix)
    for path in (bin_path, idx_path, json_path):
        remove_leftovers(path)
    if json_path.exists():
        return Shard(output.prefix).manifest
    for path in (bin_path, idx_path):  # of a publication that was killed between its renames
        path.unlink(missing_ok=True)
    units = [unit for unit in plan.units if unit.source == output.source]
    done = [receipts[unit.key] for unit in units]
    cardinality = plan.tokenizer["vocab_size"]
    policy = {"bos_id": plan.bos_id, "special_text": plan.recipe.special_text}
    with ShardWriter(output.prefix, cardinality, plan.eod_id, plan.tokenizer, **policy) as writer:
        for receipt in done:
            for tokens, lengths in _documents(receipt, writer.dtype, selection, output.held_out):
                writer.add(tokens, lengths)
            if output.held_out or not plan.recipe.held_out:  # nobody reads it again
                drop_from_memory(unit_path(selection.folder, receipt.key, "bin"))
            advance(receipt.sizes["bin"], receipt.documents)
        counts = {
            "empty": sum(receipt.empty for receipt in done),
            "rejected": sum(receipt.rejected for receipt in done),
            "duplicates": selection.duplicates([unit.key for unit in units]),
            "eod_in_text": sum(receipt.eod_in_text for receipt in done),
            "text_bytes": sum(receipt.text_bytes for receipt in done),
            "text_tokens": sum(receipt.tokens for receipt in done),
        }
        return writer.publish([piece for receipt in done for piece in receipt.pieces], counts)


def _documents(
    receipt: Receipt, dtype: np.dtype, selection: Selection, held_out: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The kept documents of a unit, some at a time; its files are held against its receipt."""
    paths = {part: unit_path(selection.folder, receipt.key, part) for part in ("bin", "lengths")}
    digests = {part: BackgroundDigest() for part in paths}
    with open(paths["bin"], "rb") as bin_file, open(paths["lengths"], "rb") as lengths_file:
        for keep in selection.blocks(receipt.key, held_out):
            content = lengths_file.read(4 * len(keep))
            digests["lengths"].update(content)
            lengths = np.frombuffer(content, dtype="<i4").astype(np.int64)
            for first, stop in _runs(lengths):
                data = bin_file.read(int(lengths[first:stop].sum()) * dtype.itemsize)
                digests["bin"].update(data)
                tokens, kept = np.frombuffer(data, dtype=dtype), keep[first:stop]
                if not kept.all():
                    tokens = tokens[np.repeat(kept, lengths[first:stop])]
                yield tokens, lengths[first:stop][kept]
    for part, digest in digests.items():
        if digest.hexdigest() != receipt.sha256[part]:
            raise DataError(
                f"{paths[part]}: damaged (its SHA-256 is not the one in its receipt); remove it "
                "and run `mixtron prep run` again"
            )


def _runs(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Neighbouring documents of about `BLOCK_TOKENS` in all."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right")))
        yield first, stop
        first = stop
