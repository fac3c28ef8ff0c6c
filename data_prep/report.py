"""What a person is told at the end, and in between."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mixtron.data_prep.merge import Merged
from mixtron.data_prep.outputs import all_made
from mixtron.data_prep.plan import Plan, load_plan
from mixtron.data_prep.run import parts_folder, receipts_of


def final_table(merged: list[Merged]) -> Table:
    """A row for each shard."""
    table = Table(title="shards", title_justify="left")
    table.add_column("shard", no_wrap=True)
    columns = ("documents", "tokens", "share", "bytes/token", "longest", "type")
    dropped = ("empty", "rejected", "duplicates", "eod_in_text")
    for name in (*columns, *(name.replace("_", " ") for name in dropped)):
        table.add_column(name, justify="right")
    total = sum(m.manifest.tokens for m in merged)
    for one in merged:
        manifest = one.manifest
        counts = [f"{manifest.counts[name]:,}" for name in dropped]
        table.add_row(
            one.output.prefix,
            f"{manifest.documents:,}",
            f"{manifest.tokens:,}",
            f"{manifest.tokens / total:.1%}",
            f"{manifest.counts['text_bytes'] / max(manifest.counts['text_tokens'], 1):.2f}",
            f"{manifest.longest_document:,}",
            manifest.dtype,
            *(counts if not one.output.held_out else ["-"] * len(counts)),
        )
    return table


def data_block(plan: Plan, merged: list[Merged]) -> str:
    """The `data:` section of a run's config; the weights are the sources' tokens."""
    recipe = plan.recipe
    lines = ["data:", "  sequence_length: 4096", f"  tokenizer: {_quoted(recipe.tokenizer)}"]
    if recipe.eod_token is not None:
        lines.append(f"  eod_token: {_quoted(recipe.eod_token)}")
    lines.append("  train:")
    for one in merged:
        if not one.output.held_out:
            path = _quoted(one.output.prefix)
            lines.append(f"    - {{path: {path}, weight: {one.manifest.tokens}.0}}")
    if recipe.held_out > 0:
        lines.append("  validation:")
        for one in merged:
            if one.output.held_out:
                name = one.output.source or "held-out"
                lines.append(f"    {name}: {{path: {_quoted(one.output.prefix)}}}")
    return "\n".join(lines)


def print_result(prefix: str | Path, merged: list[Merged]) -> None:
    # Into a file or a pipe, wide enough for every column.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(final_table(merged))
    print(data_block(load_plan(prefix), merged))


def status_lines(prefix: str | Path) -> list[str]:
    """What is done of a plan and what is not."""
    plan = load_plan(prefix)
    if all_made(plan, prefix):
        return [f"{prefix}: all shards are made"]
    receipts = receipts_of(plan, prefix)
    missing = [i for i, unit in enumerate(plan.units) if unit.key not in receipts]
    done = receipts.values()
    lines = [
        f"{parts_folder(prefix)}: {len(receipts)} of {len(plan.units)} units done, "
        f"{sum(r.documents for r in done):,} documents, {sum(r.tokens for r in done):,} tokens, "
        f"{sum(r.empty for r in done):,} empty, {sum(r.rejected for r in done):,} rejected"
    ]
    if missing:
        shown = " ".join(map(str, missing[:20])) + (" ..." if len(missing) > 20 else "")
        lines.append(f"not done: {shown}")
    return lines


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
