"""The `mixtron` command."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from mixtron.launch import exit_codes

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pretraining with pluggable sequence mixers on Megatron-core.",
)
ConfigPath = Annotated[Path, typer.Argument(help="A run's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command()
def validate(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks the run will have; default: one model copy.")
    ] = None,
) -> None:
    """Check a config without a GPU: shapes, parameters, FLOPs, memory, traffic, data, disk."""
    from mixtron.launch.validate import print_report

    print_report(config, overrides or [], ranks)


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 1,
    debug: Debug = False,
) -> None:
    """Train: one process, several with --nproc, or as one rank under torchrun or srun."""
    from mixtron.launch.checks import check
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.launcher import start_torchrun
    from mixtron.launch.train import main as train_rank

    arguments = [str(config), *(overrides or []), *(["--debug"] if debug else [])]
    if nproc == 1:
        raise typer.Exit(train_rank(arguments))
    resolved = load_config(config, overrides)
    check(resolved, nproc)
    open_data(resolved)
    raise typer.Exit(start_torchrun(Path(resolved.run_dir), nproc, arguments))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config file, for editors."""
    from mixtron.launch.config import json_schema

    print(json_schema(), end="")


@app.command()
def quickstart(
    folder: Annotated[
        Path, typer.Option("--dir", help="Where shards, run and plot are written.")
    ] = Path("runs/quickstart"),
) -> None:
    """The main job in miniature on an embedded corpus: CPU, two ranks, minutes."""
    from mixtron.launch.quickstart import run

    run(folder)


def mount_parts() -> None:
    from mixtron.data_prep.cli import app as prep
    from mixtron.launch.bench.cli import app as bench
    from mixtron.launch.checkpoint_cli import app as ckpt
    from mixtron.launch.eval_cli import app as evaluation
    from mixtron.launch.inference.cli import add_to as add_inference
    from mixtron.launch.report.cli import add_to as add_report
    from mixtron.launch.slurm.cli import add_to
    from mixtron.launch.spectral.cli import app as spectral

    add_to(app, prep)
    add_inference(app, evaluation)
    add_report(app)
    app.add_typer(prep, name="prep", help="Corpora into indexed shards.")
    app.add_typer(ckpt, name="ckpt", help="Look at checkpoints; check, compare, convert them.")
    app.add_typer(evaluation, name="eval")
    app.add_typer(bench, name="bench")
    app.add_typer(spectral, name="spectral", help="Routing and filtering in attention heads.")


def main() -> None:
    """Runs the command; an error a person can mend is one line and its exit code."""
    if sys.argv[1:2] == ["prep"]:  # numpy's threads, of no use there, would forbid to fork workers
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    mount_parts()
    try:
        app()
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        print(f"mixtron: {error}", file=sys.stderr)
        if "--debug" in sys.argv or code == exit_codes.FAILED:
            traceback.print_exc()
        sys.exit(code)


if __name__ == "__main__":
    main()
