"""`mixtron eval`: what a trained model can do."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from mixtron.megatron_ext.errors import ConfigError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def group() -> None:
    """What a trained model can do."""


@app.command()
def synthetic(
    task: Annotated[str, typer.Argument(help="A task, or `suite`.")],
    target: Annotated[Path, typer.Argument(help="A run folder; for `suite` a suite's YAML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="parameter=value or =v1,v2: all combinations are evaluated."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences a combination.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the sequences.")] = 1,
    tiny: Annotated[bool, typer.Option("--tiny", help="suite: the variant for a CPU.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="suite: where runs and the table are written.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="suite: models trained at once; default: as many as fit."),
    ] = None,
) -> None:
    """Accuracy on a synthetic task by length and load; `suite` trains and compares models."""
    if task == "suite":
        if settings:
            raise ConfigError(f"suite takes no {settings[0]!r}; change the suite's file instead")
        from mixtron.launch.synthetic.suite import run_suite

        raise typer.Exit(run_suite(target, folder, tiny=tiny, workers=workers))
    from mixtron.launch.synthetic.task import tasks

    known = tasks()
    if task not in known:
        close = difflib.get_close_matches(task, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"no task {task!r}{hint}; tasks: {', '.join(known)} (or suite)")
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    from mixtron.launch.synthetic.evaluate import evaluate_run

    evaluate_run(known[task], target, settings or [], sequences, seed)
