"""`mixtron prep`: corpora into indexed shards."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mixtron.data_prep.bad_lines import OnBadLine
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.tokenizer_training import ModelType

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Inputs = Annotated[
    list[str], typer.Option("--input", help="JSONL or text file, folder or quoted glob; repeat it.")
]
MoreInputs = Annotated[
    list[str] | None, typer.Argument(metavar="[INPUT]...", help="More inputs, as a shell glob.")
]
TextKeys = Annotated[
    list[str], typer.Option("--text-key", help="JSON key of the text; several are joined.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
EodToken = Annotated[
    str | None, typer.Option(help="Special token that ends a document; default: the tokenizer's.")
]


@app.command()
def train_tokenizer(
    input: Inputs,
    output: Annotated[Path, typer.Option(help="A .model file; for bytelevel a folder.")],
    vocab_size: Annotated[int, typer.Option(min=1)],
    model_type: ModelType = "bpe",
    text_key: TextKeys = ["text"],  # noqa: B006 (typer copies it)
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
    tokenizer: Annotated[Path, typer.Option(help="A .model, a tokenizer.json or its folder.")],
    output: Annotated[Path, typer.Option(help="Prefix: .bin, .idx and .json are appended.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenise.")] = 1,
    on_bad_line: OnBadLine = "fail",
    text_key: TextKeys = ["text"],  # noqa: B006 (typer copies it)
    eod_token: EodToken = None,
    append_eod: Annotated[bool, typer.Option(help="End each document with its token.")] = True,
    more: MoreInputs = None,
    quiet: Quiet = False,
) -> None:
    """Tokenise text into one shard: the same bytes for any number of workers."""
    from mixtron.data_prep.build import build as build_shard

    manifest = build_shard(
        input + (more or []),
        tokenizer,
        output,
        workers=workers,
        text_keys=text_key,
        on_bad_line=on_bad_line,
        append_eod=append_eod,
        eod_token=eod_token,
        progress=not quiet,
    )
    print(
        f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens as "
        f"{manifest.dtype}; {manifest.counts['empty']:,} empty documents dropped, "
        f"{manifest.counts['rejected']:,} bad lines left out"
    )


@app.command()
def inspect(
    prefix: Annotated[Path, typer.Argument(help="A shard's prefix, without .bin.")],
    document: Annotated[int | None, typer.Option(min=0, help="Show this document.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Decodes the document.")] = None,
    eod_token: EodToken = None,
) -> None:
    """Print a shard's manifest, or one document of it."""
    from mixtron.data_prep.shards import Shard
    from mixtron.data_prep.tokenizer import load_tokenizer

    shard = Shard(prefix)
    if document is None:
        print(json.dumps(asdict(shard.manifest), indent=1, ensure_ascii=False))
        return
    ids = shard.document(document)
    if tokenizer is None:
        print(" ".join(map(str, ids.tolist())))
        return
    loaded = load_tokenizer(tokenizer, eod_token)
    if loaded.sha256 != shard.manifest.tokenizer["sha256"]:
        raise DataError(f"{tokenizer}: not the tokenizer that {prefix} was built with")
    print(loaded.decode(ids))
