"""The `mixtron report` command."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def add_to(app: typer.Typer) -> None:
    app.command()(report)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are overlaid.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to write to; default: RUN/report of the first.")
    ] = None,
    spectra: Annotated[
        bool, typer.Option(help="Measure the newest checkpoints' attention heads.")
    ] = True,
) -> None:
    """Write one page of figures, and PNGs, of what runs logged."""
    from mixtron.launch.report.diagnostics import cascade_figures, mixer_figures
    from mixtron.launch.report.figures import progress_figures
    from mixtron.launch.report.page import write_page, write_pngs
    from mixtron.launch.report.runs import read_runs
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    console = Console(highlight=False, soft_wrap=True)
    read = read_runs(runs)
    figures = progress_figures(read) + mixer_figures(read)
    if spectra:
        figures += cascade_figures(read, console)
    folder = output or runs[0] / "report"
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    write_page(page, " and ".join(run.name for run in read), read, figures)
    pngs = write_pngs(folder, figures)
    console.print(f"{page}: {len(figures)} figures, {len(pngs)} PNGs beside it", markup=False)
