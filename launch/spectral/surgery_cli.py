"""`mixtron spectral linearise | ablate | allocate`: they change runs, and write runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

Runs = Annotated[
    list[Path], typer.Argument(help="Runs or checkpoints; several stand side by side.")
]
Report = Annotated[Path, typer.Option(help="Folder for tables and plots.")]
Output = Annotated[Path | None, typer.Option(help="Run folder for a model that trains on.")]
REPORT = Path("runs/spectral")


def register(app: typer.Typer) -> None:
    app.command()(linearise)
    app.command()(ablate)
    app.command()(allocate)


def linearise(
    models: Runs,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Write the model with so many first layers linear.")
    ] = None,
    output: Output = None,
    report: Report = REPORT,
) -> None:
    """Perplexity with the first n layers as ELU+1 linear attention, for every n."""
    _both_or_none("--layers", layers, output, models)
    console, ranks = _begin()
    from mixtron.launch.spectral import curves
    from mixtron.launch.spectral.mappings import linearised
    from mixtron.launch.spectral.variant import write_run

    variants = _read(models)
    if layers is not None and layers > variants[str(models[0])].config.model.layers:
        raise _wrong(f"--layers {layers}: the model has fewer")
    rows = {
        name: curves.linearisation_curve(variant, ranks, console)
        for name, variant in variants.items()
    }
    curves.tell(rows, ["linear_layers", "perplexity", "change_%"], console)
    paths = curves.write(rows, report, "linearise")
    paths.append(curves.plot_linearisation(rows, report / "linearise.png"))
    console.print("\n".join(map(str, paths)))
    if layers is not None and output is not None:
        write_run(variants[str(models[0])].with_layers(linearised, range(layers)), output, ranks)


def ablate(
    models: Runs,
    rank: Annotated[
        list[int], typer.Option(help="Ranks that S of one layer is cut to (2 is a plane).")
    ] = [2, 8],  # noqa: B006
    keep: Annotated[str | None, typer.Option(help="Write the model with this ablation.")] = None,
    output: Output = None,
    report: Report = REPORT,
) -> None:
    """Perplexity without routing, without filtering, with D averaged, with S of a layer cut."""
    _both_or_none("--keep", keep, output, models)
    console, ranks = _begin()
    from mixtron.launch.spectral import curves
    from mixtron.launch.spectral.ablations import ablations
    from mixtron.launch.spectral.variant import open_validation, perplexity, write_run

    rows, notes, kept = {}, [], None
    for name, variant in _read(models).items():
        validation = open_validation(variant)
        possible, refused = ablations(variant, rank, ranks, validation)
        notes += [f"not done to {name}: {line}" for line in refused]
        whole = perplexity(variant, ranks, validation)
        rows[name] = [{"ablation": "none", "perplexity": whole, "change_percent": 0.0}]
        for ablation, make in track(possible.items(), f"ablating {name}", console=console):
            value = perplexity(make(), ranks, validation)
            change = 100 * (value / whole - 1)
            rows[name].append({"ablation": ablation, "perplexity": value, "change_percent": change})
        if keep is not None and keep not in possible:
            raise _wrong(f"--keep {keep}: not one of {', '.join(possible)}")
        kept = possible[keep]() if keep is not None else None
    curves.tell(rows, ["ablation", "perplexity", "change_%"], console)
    for line in [*notes, *map(str, curves.write(rows, report, "ablate"))]:
        console.print(line)
    if kept is not None and output is not None:
        write_run(kept, output, ranks)


def allocate(
    model: Annotated[Path, typer.Argument(help="A run or a checkpoint.")],
    output: Annotated[Path, typer.Option(help="Run folder for the smaller model.")],
    margin: Annotated[float, typer.Option(min=0.1, help="Width of a head over its rank.")] = 1.0,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Leave widths; make layers of low rank linear.")
    ] = False,
    threshold: Annotated[float, typer.Option(help="--hybrid: linear up to this rank.")] = 4.0,
    linear: Annotated[
        Literal["linear_attention", "kla"], typer.Option(help="--hybrid: what they become.")
    ] = "linear_attention",
    initialise: Annotated[
        bool, typer.Option("--initialise", help="Project the weights instead of drawing them.")
    ] = False,
) -> None:
    """Head widths, or with --hybrid layer kinds, from the measured ranks: config and checkpoint."""
    console, ranks = _begin()
    from mixtron.launch.estimate import parameters
    from mixtron.launch.spectral.allocation import allocate as plan_widths
    from mixtron.launch.spectral.allocation import allocated
    from mixtron.launch.spectral.open import open_model
    from mixtron.launch.spectral.report import measure
    from mixtron.launch.spectral.variant import write_run

    [variant] = _read([model]).values()
    spectra = measure(open_model(model), console)
    plan = plan_widths(variant, spectra, margin, threshold if hybrid else None)
    smaller = allocated(variant, plan, linear, initialise)
    table = Table(title=f"linear up to rank {threshold:g}" if hybrid else f"margin {margin:g}")
    for column in ("layer", "rank", "width before", "becomes"):
        table.add_column(column, justify="right")
    for item in plan:
        becomes = linear if item.linear else f"width {item.width}"
        table.add_row(str(item.layer), f"{item.rank:.2f}", str(item.before), becomes)
    console.print(table)
    before, after = (sum(parameters(v.config).values()) for v in (variant, smaller))
    console.print(f"{before:,} parameters before, {after:,} after")
    write_run(smaller, output, ranks)


def _begin():
    """A console and a world of one rank."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    console = Console(highlight=False, soft_wrap=True)
    return console, init_model_parallel(seed=0, device=init_distributed())


def _read(models: list[Path]) -> dict:
    from mixtron.launch.spectral.runs import is_run
    from mixtron.launch.spectral.variant import Variant

    for model in models:
        if not is_run(model):
            raise _wrong(f"{model}: neither a run (checkpoints/) nor a checkpoint (manifest.json)")
    return {str(model): Variant.read(model) for model in models}


def _both_or_none(option: str, value, output: Path | None, models: list[Path]) -> None:
    if (value is None) != (output is None):
        raise _wrong(f"{option} and --output go together")
    if output is not None and len(models) > 1:
        raise _wrong(f"{option} writes one model; {len(models)} are given")


def _wrong(message: str) -> Exception:
    from mixtron.launch.spectral.weights import SpectralError

    return SpectralError(message)
