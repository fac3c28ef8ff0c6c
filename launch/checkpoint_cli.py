"""`mixtron ckpt`: look at checkpoints, check, compare and convert them."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track

from mixtron.launch.checkpoint_files import (
    CheckpointError,
    CheckpointInfo,
    list_checkpoints,
    read_manifest,
    unfinished,
)

app = typer.Typer(no_args_is_help=True)
console = Console(soft_wrap=True, highlight=False)
Run = Annotated[Path, typer.Argument(help="A run folder, or its folder of checkpoints.")]
Checkpoint = Annotated[Path, typer.Argument(help="A step_* folder.")]
SHOWN_TENSORS = 20


@app.command()
def ls(run: Run) -> None:
    """List checkpoints: step, time, size, whether complete or why not, layout."""
    from mixtron.launch.checkpoint_tools import checkpoints_of

    root = checkpoints_of(run)
    rows = [["step", "saved at", "size", "layout", "state"]]
    rows += map(_row, list_checkpoints(root))
    for path in unfinished(root):
        step = int(path.name.split(".")[1].removeprefix("step_"))
        rows.append([str(step), "", "", "", f"not finished: {path.name}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), markup=False)


def _row(info: CheckpointInfo) -> list[str]:
    if not info.complete:
        return [str(info.step), "", "", "", f"NOT COMPLETE: {info.reason}"]
    manifest = read_manifest(info.path)
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    layout = manifest["layout"]
    shown = " ".join(f"{name} {count}" for name, count in layout.items() if count > 1)
    return [
        str(info.step),
        manifest["saved_at"] or "not recorded",
        f"{size / 2**20:,.1f} MiB",
        (shown or "one rank") if layout else "converted",
        "complete",
    ]


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A step_* folder, or a run: all of them.")],
) -> None:
    """Read every byte: SHA-256, each tensor readable and finite. Exit code 2 if it is not so."""
    from mixtron.launch.checkpoint_tools import checkpoint_paths, problems_of

    bad = 0
    for path in checkpoint_paths(checkpoint):
        try:
            problems = problems_of(path, _progress(f"verify {path.name}"))
        except CheckpointError as error:
            problems = [str(error)]
        for problem in problems:
            console.print(problem, markup=False)
        console.print(f"{path}: {'NOT GOOD' if problems else 'good'}", markup=False)
        bad += bool(problems)
    if bad:
        raise typer.Exit(2)


@app.command()
def diff(a: Checkpoint, b: Checkpoint) -> None:
    """Compare two checkpoints: config, versions, layout, counters and every tensor."""
    from mixtron.launch.checkpoint_identity import leaf_differences
    from mixtron.launch.checkpoint_tools import compare_tensors

    first, second = read_manifest(a), read_manifest(b)
    for part in ("config", "versions", "layout", "state"):
        for key, was, now in leaf_differences(first[part], second[part]):
            console.print(f"{part} {key}: {was} | {now}", markup=False)
    found = compare_tensors(a, b, _progress("compare"))
    for path, names in ((a, found.only_first), (b, found.only_second)):
        if names:
            console.print(f"only in {path}: {_some(names, ', ')}", markup=False)
    lines = [f"{difference.name}: {difference.what}" for difference in found.different]
    if lines:
        console.print(_some(lines, "\n"), markup=False)
    others = len(found.only_first) + len(found.only_second)
    console.print(
        f"{len(found.equal)} tensors are equal bit for bit, {len(lines)} differ, "
        f"{others} are in one alone"
    )


def _some(lines: list[str], separator: str) -> str:
    more = len(lines) - SHOWN_TENSORS
    return separator.join(lines[:SHOWN_TENSORS] + ([f"and {more} more"] if more > 0 else []))


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="A step_* folder, or a .safetensors file; a run with --to.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            help="The .safetensors file, or the folder of checkpoints to add to; a new run with "
            "--to."
        ),
    ],
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Take the optimizer's state along.")
    ] = False,
    to: Annotated[
        Literal["path"] | None,
        typer.Option(help="Make a run of it whose softmax attention has become this mixer."),
    ] = None,
    forget_gate: Annotated[
        bool, typer.Option("--forget-gate", help="With --to path: PaTH-FoX.")
    ] = False,
) -> None:
    """Put a sharded checkpoint into one safetensors file, or make one of such a file; or, with --to
    path, turn softmax attention into PaTH, which `mixtron train TARGET/config.yaml` trains on."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    if to is not None:
        if optimizer:
            raise CheckpointError("--optimizer: with --to the optimizer starts afresh")
        convert_mixers(source, target, forget_gate=forget_gate)
        torch.distributed.destroy_process_group()
        return
    if forget_gate:
        raise CheckpointError("--forget-gate: goes with --to path")
    from mixtron.launch.checkpoint_tools import from_safetensors, to_safetensors

    if source.suffix == ".safetensors":
        console.print(f"{from_safetensors(source, target)}: written", markup=False)
        torch.distributed.destroy_process_group()
        return
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: the target of a checkpoint is a .safetensors file")
    to_safetensors(source, target, _progress("convert"), optimizer=optimizer)
    console.print(f"{target}: written", markup=False)


def convert_mixers(source: Path, target: Path, *, forget_gate: bool) -> None:
    from mixtron.launch.conversion import softmax_run_to_path
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    ranks = init_model_parallel(seed=0, device=init_distributed())
    layers = softmax_run_to_path(source, target, ranks, forget_gate=forget_gate)
    console.print(f"{target}: written, {layers} layers converted", markup=False)


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face folder (Llama, Mistral, Qwen, GPT-NeoX).")
    ],
    run: Annotated[Path, typer.Argument(help="The run folder to write.")],
) -> None:
    """Make a run of a Hugging Face model: checkpoint of step 0, config and tokenizer."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    from mixtron.launch.exchange.importing import import_folder

    console.print(f"{import_folder(source, run)}: written", markup=False)
    torch.distributed.destroy_process_group()


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run (its newest checkpoint) or a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    remote_code: Annotated[
        bool, typer.Option("--remote-code", help="A model file even where transformers has one.")
    ] = False,
) -> None:
    """Write a Hugging Face folder: of a known family, or with a model file."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    from mixtron.launch.exchange.exporting import export_folder

    written = export_folder(source, folder, remote_code=remote_code)
    console.print(f"{folder}: written as {written}", markup=False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _progress(what: str):
    return lambda names: track(names, what, console=Console(stderr=True), transient=True)
