"""The `mixtron spectral` command."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from mixtron.launch.spectral.surgery_cli import register


class _MeasureByDefault(TyperGroup):
    """`mixtron spectral MODEL` is `mixtron spectral measure MODEL`."""

    def parse_args(self, ctx, args):
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_MeasureByDefault, no_args_is_help=True)
register(app)
ModelPath = Annotated[
    Path, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face folder.")
]
Output = Annotated[Path | None, typer.Option(help="Folder for what is written.")]


@app.command()
def measure(
    model: ModelPath,
    output: Output = None,
    text: Annotated[
        Path | None, typer.Option(help="Measure on this text too: S, D and L of its tokens.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many of its tokens.")] = 256,
) -> None:
    """Routing against filtering in every head: table, JSON, CSV and the cascade over depth."""
    from mixtron.launch.spectral import report
    from mixtron.launch.spectral.open import open_model

    console = Console(highlight=False, soft_wrap=True)
    opened = open_model(model)
    folder = output or Path("runs/spectral") / opened.name
    found = [(report.measure(opened, console), folder)]
    if text is not None:
        from mixtron.launch.spectral.sequences import measure_text

        found.append((measure_text(model, text, tokens), folder / "text"))
    for spectra, into in found:
        report.print_table(spectra, console)
        for path in report.write(spectra, into):
            console.print(str(path))
