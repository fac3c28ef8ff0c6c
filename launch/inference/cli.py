"""The commands that ask a trained model: `mixtron generate` and parts of `mixtron eval`."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mixtron.megatron_ext.errors import ConfigError

Model = Annotated[Path, typer.Argument(help="A run (its newest checkpoint) or a checkpoint.")]
Tensor = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks to load the model on.")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="The run's tokenizer; default: the copy in the run folder.")
]
OverrideMixer = Annotated[
    list[str] | None,
    typer.Option(
        help="Replace a mixer, keeping its weights: NAME={type: stochastic, paths: sa, window: 128}"
    ),
]


def add_to(app: typer.Typer, evaluation: typer.Typer) -> None:
    app.command()(generate)
    evaluation.command()(perplexity)
    evaluation.command()(zeroshot)


def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of texts, one a line.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Only so many of the likeliest.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Only the likeliest that together have this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line a text.")] = False,
    tensor: Tensor = 1,
    tokenizer: TokenizerPath = None,
    override_mixer: OverrideMixer = None,
) -> None:
    """Continue texts from a run's newest checkpoint. Several are continued side by side."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    from mixtron.launch.inference.generate import Request
    from mixtron.launch.inference.generate import generate as continue_texts
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.sampling import Sampling
    from mixtron.launch.inference.source import find_source

    request = Request(_prompts(prompt, prompts), tokens, Sampling(temperature, top_k, top_p, seed))
    source = find_source(
        model, tensor=tensor, tokenizer=tokenizer, override_mixers=override_mixer or []
    )
    request.ids(source)
    start_ranks(tensor)
    loaded = load(source)
    continue_texts(loaded, request, speaker(loaded.ranks.is_first), as_json=as_json)
    end_ranks()


def perplexity(
    model: Model,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of context, as 1024,4096; default: the trained one.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens a window moves by; default: half its length.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--set", help="A validation set of the run; default: the first.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A shard's prefix instead.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text instead, as one document.")] = None,
    documents: Annotated[
        str,
        typer.Option(help="all; long: those of the largest length; joined: all as one document."),
    ] = "all",
    output: Annotated[Path | None, typer.Option(help="A JSON file to write as well.")] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks to start; they share the windows.")] = 1,
    tensor: Tensor = 1,
    tokenizer: TokenizerPath = None,
    override_mixer: OverrideMixer = None,
) -> None:
    """Perplexity and bits per byte by length, by a window that slides over each document."""
    from mixtron.launch.train import quiet_libraries

    quiet_libraries()
    from rich.console import Console

    from mixtron.launch.inference.documents import documents_of
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.perplexity import perplexity as measure
    from mixtron.launch.inference.source import find_source

    if documents not in ("all", "long", "joined"):
        raise ConfigError(f"--documents {documents}: one of all, long, joined")
    ranks = max(nproc, tensor)
    if ranks % tensor:
        raise ConfigError(f"--nproc {nproc} is not a multiple of --tensor {tensor}")
    source = find_source(
        model, tensor=tensor, tokenizer=tokenizer, override_mixers=override_mixer or []
    )
    asked = _lengths(lengths, source.config.data.sequence_length)
    for length in asked:
        if stride is not None and stride > length:
            raise ConfigError(f"--stride {stride} is more than the length {length}")
    chosen = documents_of(
        source, name=name, shard=data, text=text, choice=documents, longest=max(asked)
    )
    start_ranks(ranks)
    loaded = load(source)
    console = Console(stderr=True)
    say = speaker(loaded.ranks.is_first)
    say(f"{len(chosen)} documents of {source.config.name}, {source.checkpoint.name}\n")
    say(f"{'length':>8} {'stride':>8} {'tokens':>12} {'loss':>9} {'perplexity':>11} bits a byte\n")
    results = []
    for length in asked:
        found = measure(loaded, chosen, length, stride or max(length // 2, 1), console)
        results.append(found)
        say(
            f"{found.length:>8} {found.stride:>8} {found.tokens:>12,} {found.loss:>9.4f} "
            f"{found.perplexity:>11.3f} {found.bits_per_byte:>11.4f}\n"
        )
    if output is not None and loaded.ranks.is_first:
        output.write_text(json.dumps([asdict(found) for found in results], indent=1) + "\n")
    end_ranks()


def zeroshot(
    model: Model,
    tasks: Annotated[str, typer.Option(help="Names of the harness's tasks, as piqa,arc_easy.")],
    tasks_dir: Annotated[Path | None, typer.Option(help="A folder of task files.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before a question; default: the task's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many of a task.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed at once.")] = 4096,
    output: Annotated[Path | None, typer.Option(help="A JSON file to write as well.")] = None,
    tensor: Tensor = 1,
    tokenizer: TokenizerPath = None,
    override_mixer: OverrideMixer = None,
) -> None:
    """Tasks of lm-evaluation-harness (the extra `eval`). Their data are fetched or given by you."""
    from importlib.util import find_spec

    from mixtron.launch.train import quiet_libraries

    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed: pip install 'mixtron[eval]'")
    quiet_libraries()
    from mixtron.launch.inference.model import load
    from mixtron.launch.inference.source import find_source

    source = find_source(
        model, tensor=tensor, tokenizer=tokenizer, override_mixers=override_mixer or []
    )
    start_ranks(tensor)
    from mixtron.launch.inference.harness import evaluate_tasks

    loaded = load(source)
    found = evaluate_tasks(
        loaded,
        tasks.split(","),
        folder=tasks_dir,
        fewshot=fewshot,
        limit=limit,
        batch_tokens=batch_tokens,
    )
    say = speaker(loaded.ranks.is_first)
    for task, numbers in found.items():
        values = {name: x for name, x in numbers.items() if isinstance(x, float)}
        say(f"{task}: {', '.join(f'{name} {value:.4f}' for name, value in values.items())}\n")
    if output is not None and loaded.ranks.is_first:
        output.write_text(json.dumps(found, indent=1, default=str) + "\n")
    end_ranks()


def _lengths(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--lengths {text!r}: expected numbers of tokens, as 1024,4096")
    return [int(part) for part in parts]


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    lines = list(given or [])
    if file is not None:
        try:
            lines += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts {file}: {error}") from None
    if not lines:
        raise ConfigError("nothing to continue: give --prompt TEXT or --prompts FILE")
    return lines


def start_ranks(ranks: int) -> None:
    """Goes on in this process if it is all there is, or one of the ranks; else starts the ranks and
    exits as they do."""
    if ranks > 1 and "RANK" not in os.environ:
        from mixtron.launch.launcher import repeat_on_ranks

        raise typer.Exit(repeat_on_ranks(ranks))


def end_ranks() -> None:
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def speaker(is_first: bool):
    """Writes on the first rank, at once."""

    def say(text: str) -> None:
        if is_first and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    return say
