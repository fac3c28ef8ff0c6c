"""`mixtron prep`: corpora into indexed shards."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.plan import OnBadLine, Recipe
from mixtron.data_prep.tokenizer_training import ModelType

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Backend = Literal["plain", "gigatoken"]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        help="JSONL, text, Parquet or Arrow file, folder, quoted glob or URL; repeat it. "
        "NAME=INPUT gives a source its own shard.",
    ),
]
MoreInputs = Annotated[
    list[str] | None, typer.Argument(metavar="[INPUT]...", help="More inputs, as a shell glob.")
]
TextKeys = Annotated[
    list[str], typer.Option("--text-key", help="JSON key or column of text; several are joined.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
EodToken = Annotated[
    str | None, typer.Option(help="Special token that ends a document; default: the tokenizer's.")
]
TokenizerPath = Annotated[
    Path, typer.Option(help="A .model, a tokenizer.json or its folder, or a .tiktoken file.")
]
Output = Annotated[Path, typer.Option(help="Prefix: .bin, .idx and .json are appended.")]
Prefix = Annotated[Path, typer.Argument(help="The --output of the plan.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that tokenise.")]
BackendOption = Annotated[
    Backend, typer.Option(help="gigatoken: the same ids faster; needs mixtron[fast].")
]
AppendEod = Annotated[bool, typer.Option(help="End each document with its token.")]
BosToken = Annotated[
    str | None, typer.Option("--bos", help="Special token put before each document.")
]
SpecialText = Annotated[
    bool, typer.Option("--special-text", help="Names of special tokens in text become them.")
]
MaxBadLines = Annotated[int, typer.Option(min=0, help="More bad lines than this end the build.")]
Deduplicate = Annotated[
    bool, typer.Option("--deduplicate", help="Keep the first of documents of equal text.")
]
HeldOut = Annotated[
    float, typer.Option(min=0, help="Share of documents, by hash of text, in a second shard.")
]
FIRST_TEXT_KEY = ["text"]


@app.command()
def train_tokenizer(
    input: Inputs,
    output: Annotated[Path, typer.Option(help="A .model file; for bytelevel a folder.")],
    vocab_size: Annotated[int, typer.Option(min=1)],
    model_type: ModelType = "bpe",
    text_key: TextKeys = FIRST_TEXT_KEY,
    more: MoreInputs = None,
    quiet: Quiet = False,
) -> None:
    """Train a tokenizer: SentencePiece bpe or unigram, or byte-level BPE."""
    from mixtron.data_prep.tokenizer import load_tokenizer
    from mixtron.data_prep.tokenizer import train_tokenizer as train

    inputs = input + (more or [])
    used = train(inputs, vocab_size, model_type, output, text_key, progress=not quiet)
    tokenizer = load_tokenizer(output)
    share = used["bytes_used"] / max(used["bytes_offered"], 1)
    print(
        f"{output}: {tokenizer.vocab_size:,} ids, end of document {tokenizer.eod_id}, trained on "
        f"{used['bytes_used']:,} of {used['bytes_offered']:,} bytes of text ({share:.1%})"
    )


@app.command()
def build(
    input: Inputs,
    tokenizer: TokenizerPath,
    output: Output,
    workers: Workers = 1,
    backend: BackendOption = "plain",
    on_bad_line: OnBadLine = "fail",
    max_bad_lines: MaxBadLines = 1000,
    text_key: TextKeys = FIRST_TEXT_KEY,
    eod_token: EodToken = None,
    append_eod: AppendEod = True,
    bos: BosToken = None,
    special_text: SpecialText = False,
    deduplicate: Deduplicate = False,
    held_out: HeldOut = 0.0,
    more: MoreInputs = None,
    quiet: Quiet = False,
) -> None:
    """Plan, run, merge and verify on this machine; start it again to continue."""
    from mixtron.data_prep.build import build_all
    from mixtron.data_prep.report import print_result

    recipe = Recipe(
        tokenizer=str(tokenizer),
        eod_token=eod_token,
        append_eod=append_eod,
        bos_token=bos,
        special_text=special_text,
        text_keys=tuple(text_key),
        on_bad_line=on_bad_line,
        max_bad_lines=max_bad_lines,
        deduplicate=deduplicate,
        held_out=held_out,
    )
    merged = build_all(
        input + (more or []), recipe, output, workers, backend=backend, progress=not quiet
    )
    print_result(output, merged)


@app.command()
def plan(
    input: Inputs,
    tokenizer: TokenizerPath,
    output: Output,
    on_bad_line: OnBadLine = "fail",
    max_bad_lines: MaxBadLines = 1000,
    text_key: TextKeys = FIRST_TEXT_KEY,
    eod_token: EodToken = None,
    append_eod: AppendEod = True,
    bos: BosToken = None,
    special_text: SpecialText = False,
    deduplicate: Deduplicate = False,
    held_out: HeldOut = 0.0,
    more: MoreInputs = None,
) -> None:
    """Look at the inputs and cut them into units, for `run`."""
    from mixtron.data_prep.build import plan_to

    recipe = Recipe(
        tokenizer=str(tokenizer),
        eod_token=eod_token,
        append_eod=append_eod,
        bos_token=bos,
        special_text=special_text,
        text_keys=tuple(text_key),
        on_bad_line=on_bad_line,
        max_bad_lines=max_bad_lines,
        deduplicate=deduplicate,
        held_out=held_out,
    )
    made = plan_to(output, input + (more or []), recipe)
    print(
        f"{output}: {len(made.inputs):,} files, {made.input_bytes:,} bytes, "
        f"{len(made.units):,} units"
    )


@app.command()
def run(
    prefix: Prefix,
    workers: Workers = 1,
    backend: BackendOption = "plain",
    array: Annotated[
        bool, typer.Option("--array", help="This SLURM array element's share of the units.")
    ] = False,
    element: Annotated[
        str | None, typer.Option(help="INDEX/COUNT: the same share without SLURM.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Do the units of a plan that are not done yet."""
    from mixtron.data_prep.run import Share, run_units, share_of_array

    share = share_of_array() if array else Share.parse(element) if element else None
    done = run_units(prefix, workers, share, backend, progress=not quiet)
    print(f"{prefix}: {done:,} units done")


@app.command()
def status(prefix: Prefix) -> None:
    """Say which units of a plan are done."""
    from mixtron.data_prep.report import status_lines

    print("\n".join(status_lines(prefix)))


@app.command()
def merge(
    prefix: Prefix,
    keep_parts: Annotated[bool, typer.Option(help="Leave the units' files.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make the shards of a plan whose units are all done."""
    from mixtron.data_prep.merge import merge as merge_units
    from mixtron.data_prep.merge import remove_parts
    from mixtron.data_prep.report import print_result

    merged = merge_units(prefix, progress=not quiet)
    if not keep_parts:
        remove_parts(prefix)
    print_result(prefix, merged)


@app.command()
def verify(
    prefixes: Annotated[list[Path], typer.Argument(help="Shards' prefixes, without .bin.")],
    quiet: Quiet = False,
) -> None:
    """Read whole shards again and hold them against their manifests."""
    from mixtron.data_prep.verify import verify as verify_shard

    for prefix in prefixes:
        manifest = verify_shard(prefix, progress=not quiet)
        print(f"{prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens: sound")


@app.command()
def adopt(
    prefix: Annotated[Path, typer.Argument(help="Prefix of a .bin and .idx of Megatron-LM.")],
    tokenizer: TokenizerPath,
    eod_token: EodToken = None,
    quiet: Quiet = False,
) -> None:
    """Write the manifest of a shard that Megatron-LM made."""
    from mixtron.data_prep.adopt import adopt as adopt_shard

    manifest = adopt_shard(prefix, tokenizer, eod_token, progress=not quiet)
    ends = "documents end with their token" if manifest.eod_id is not None else "no common end"
    print(
        f"{prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens as "
        f"{manifest.dtype}, largest id {manifest.max_id}, {ends}"
    )


@app.command()
def inspect(
    prefix: Annotated[Path, typer.Argument(help="A shard's prefix, without .bin.")],
    document: Annotated[int | None, typer.Option(min=0, help="Show this document.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Decodes the document.")] = None,
    eod_token: EodToken = None,
) -> None:
    """Print a shard's fingerprint and manifest, or one document of it."""
    from mixtron.data_prep.shards import Shard
    from mixtron.data_prep.tokenizer import load_tokenizer

    shard = Shard(prefix)
    if document is None:
        shown = {"fingerprint": shard.fingerprint} | asdict(shard.manifest)
        print(json.dumps(shown, indent=1, ensure_ascii=False))
        return
    ids = shard.document(document)
    if tokenizer is None:
        print(" ".join(map(str, ids.tolist())))
        return
    loaded = load_tokenizer(tokenizer, eod_token)
    if loaded.sha256 != shard.manifest.tokenizer["sha256"]:
        raise DataError(f"{tokenizer}: not the tokenizer that {prefix} was built with")
    print(loaded.decode(ids))
