"""`mixtron bench`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
PLOT = Path("curves.png")
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps that are timed.")]


@app.callback()
def group() -> None:
    """How fast a training step, the ops and the input pipeline are."""


@app.command()
def step(
    config: Annotated[Path, typer.Argument(help="A run's YAML file; its data are not read.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    steps: Steps = 10,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a data-parallel rank a step.")] = 1,
    documents: Annotated[int, typer.Option(min=1, help="In each sequence.")] = 1,
    profiled_steps: Annotated[int, typer.Option(min=0, help="0: no table of kernels.")] = 2,
    rows: Annotated[int, typer.Option(min=1, help="Of that table.")] = 40,
    peer: Annotated[
        bool, typer.Option(help="Another library's model in the same run, if the extra is there.")
    ] = True,
) -> None:
    """A config's training step on random tokens: tokens/s, MFU, memory by part, top kernels."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    from mixtron.launch.bench.step import Options, bench_step
    from mixtron.launch.config import load_config

    options = Options(steps, warm_up, micro_batches, documents, profiled_steps, rows, peer)
    bench_step(load_config(config, overrides), options)
    torch.distributed.destroy_process_group()


@app.command()
def peer(
    config: Annotated[Path, typer.Argument(help="A run's YAML file; its data are not read.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    steps: Steps = 6,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 3,
) -> None:
    """Another library's model of a config's size: tokens/s and memory of its training step."""
    from mixtron.launch.bench.peer import bench_peer
    from mixtron.launch.config import load_config

    bench_peer(load_config(config, overrides), steps, warm_up)


@app.command()
def ops(
    names: Annotated[list[str] | None, typer.Argument(help="Of ops; all by default.")] = None,
) -> None:
    """The ops beside their peers on a GPU, in tables."""
    from mixtron.launch.bench.ops import run_benches

    raise typer.Exit(1 if run_benches(names or []) else 0)


@app.command("self-test")
def self_test(
    names: Annotated[
        list[str] | None, typer.Argument(help="Of ops, as their folders; all by default.")
    ] = None,
) -> None:
    """Whether each op's Triton form is right on this GPU; a run asks that of the forms it uses."""
    from mixtron.launch.bench.self_test import run_self_tests

    run_self_tests(names or [])


@app.command()
def data(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="That are read.")] = 50,
    tokens_per_s: Annotated[
        float, typer.Option(min=1, help="What one rank trains, as `bench step` says.")
    ] = 200_000,
) -> None:
    """How fast a config's samples are read and collated, beside what training needs."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    from mixtron.launch.bench.data import bench_data
    from mixtron.launch.config import load_config

    bench_data(load_config(config, overrides), micro_batches, tokens_per_s)
    torch.distributed.destroy_process_group()


@app.command()
def lengths(
    runs: Annotated[list[str], typer.Argument(help='"CONFIG key.path=value ...", one or more.')],
    change: Annotated[
        list[str] | None, typer.Option(help="key.path=value of every run; several times.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a sequence; several times.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of a step, at every length.")] = 131072,
    steps: Steps = 3,
) -> None:
    """How speed and memory depend on the sequence's length at a constant number of tokens."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    from mixtron.launch.bench.lengths import bench_lengths

    bench_lengths(runs, change or [], length or [4096, 32768, 131072], tokens, steps)
    torch.distributed.destroy_process_group()


@app.command()
def overhead(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    steps: Steps = 10,
    rounds: Annotated[int, typer.Option(min=1, help="With and without each; one more first.")] = 3,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a data-parallel rank a step.")] = 2,
) -> None:
    """What reading data, logging and saving cost, by switching each off in turn."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    import torch

    from mixtron.launch.bench.overhead import bench_overhead
    from mixtron.launch.config import load_config

    bench_overhead(load_config(config, overrides), steps, rounds, micro_batches)
    torch.distributed.destroy_process_group()


@app.command()
def curves(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    form: Annotated[
        list[str] | None, typer.Option(help='"NAME key.path=value ...", two or more times.')
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="key.path=value ... that change the first form's rounding and nothing else, such "
            "as training.micro_batch_sequences=1: a form that the others are measured by."
        ),
    ] = None,
    plot: Annotated[Path, typer.Option(help="PNG; a JSON is written beside it.")] = PLOT,
    steps: Annotated[int, typer.Option(min=1, help="Of each form.")] = 300,
    limit_s: Annotated[float, typer.Option(min=0, help="Of a form's steps; 0: none.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Forms that train side by side.")] = 1,
) -> None:
    """Trains a config once in each form, on the same data in order, and compares the losses."""
    from mixtron.launch.bench.curves import bench_curves, parse_forms

    forms = parse_forms(form or [], noise)
    options = {"steps": steps, "limit_s": limit_s, "at_once": at_once}
    raise typer.Exit(1 if bench_curves(config, overrides or [], forms, plot, **options) else 0)
