"""Speed of `build` against other ways to do the same: `python -m mixtron.data_prep.benchmark`.

Every way reads the same documents with the same tokenizer, in a process of its own, start-up
included. The ways take turns, and the median of each counts; the pools, which take minutes, run
once. Those that are not ours are made here from the description of Megatron-LM's tools, without
their import of Megatron, which takes seconds:
`pool and parent` is `preprocess_data.py` (a pool of workers that parse and tokenise 32 lines at a
time, one parent that writes), `one call` is `preprocess_data_fast.py` (gigatoken's own file
reader, the whole corpus in memory). Theirs give fewer tokens than ours where a document has the
name of a special token, which becomes that token there.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from mixtron.data_prep.build import build_all
from mixtron.data_prep.plan import Recipe
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer_training import train_tokenizer

DOCUMENT_CHARACTERS = 6_000
TRAINED_DOCUMENTS = 1_000
LINES_AT_ONCE = 32
SLOW = "pool"
MADE = "made"
"""Folder of what a way writes, empty when it starts."""
Encode = Callable[[str], list[int]]


def pool_and_parent(load: Callable[[str], Encode]) -> Callable[[Path, int], int]:
    """A pool of tokenising workers, whose results one parent writes a document at a time."""

    def run(folder: Path, workers: int) -> int:
        tokens, lengths = 0, []
        start = _Encoder(load, str(folder / "tokenizer"))
        start.open()  # as there, for the size of the vocabulary
        # fork, as by default on Linux until Python 3.14.
        pool = multiprocessing.get_context("fork").Pool(workers, start.open)
        with (
            pool,
            open(folder / "corpus.jsonl", "rb") as lines,
            open(folder / MADE / "p.bin", "wb") as out,
        ):
            for ids in pool.imap(start.encode, lines, LINES_AT_ONCE):
                document = np.array(ids, dtype=np.uint16)
                out.write(document.tobytes(order="C"))
                lengths.append(len(document))
                tokens += len(document)
        np.array(lengths, dtype=np.int32).tofile(folder / MADE / "p.idx")
        return tokens

    return run


class _Encoder:
    """What a worker of the pool holds; opened in the worker."""

    tokenize: Encode

    def __init__(self, load: Callable[[str], Encode], folder: str) -> None:
        self._load, self._folder = load, folder

    def open(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _Encoder.tokenize = staticmethod(self._load(self._folder))

    def encode(self, line: bytes) -> list[int]:
        return [*_Encoder.tokenize(json.loads(line)["text"]), 0]


def transformers_tokenizer(folder: str) -> Encode:
    """As Megatron-core's `HuggingFaceTokenizer.text_to_ids` encodes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True)
    return lambda text: tokenizer(text).input_ids


def bare_tokenizer(folder: str) -> Encode:
    """The library below it, called directly."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def one_call(folder: Path, workers: int) -> int:
    """gigatoken reads and encodes the file by itself, on as many threads as there are cores."""
    import awkward as ak
    import gigatoken

    tokenizer = gigatoken.Tokenizer(folder / "tokenizer")
    source = gigatoken.JsonlFileSource([folder / "corpus.jsonl"])
    documents = tokenizer.encode_files(source, parallel=True)
    ends = ak.Array(np.zeros((len(documents), 1), dtype=np.uint32))
    documents = ak.concatenate([documents, ak.from_regular(ends)], axis=1)
    ids = ak.to_numpy(ak.flatten(documents)).astype(np.uint16)
    ids.tofile(folder / MADE / "o.bin")
    ak.to_numpy(ak.num(documents)).astype(np.int32).tofile(folder / MADE / "o.idx")
    return len(ids)


def ours(name: str, backend: str) -> Callable[[Path, int], int]:
    """`build` of one file: plan, run, merge, verify."""

    def run(folder: Path, workers: int) -> int:
        recipe = Recipe(str(folder / "tokenizer"))
        prefix = folder / MADE / "ours"
        build_all([folder / name], recipe, prefix, workers, backend=backend, progress=False)
        return Shard(prefix).total_tokens

    return run


WAYS: dict[str, Callable[[Path, int], int]] = {
    "pool and parent, transformers": pool_and_parent(transformers_tokenizer),
    "pool and parent, tokenizers": pool_and_parent(bare_tokenizer),
    "build, tokenizers": ours("corpus.jsonl", "plain"),
    "one call, gigatoken": one_call,
    "build, gigatoken": ours("corpus.jsonl", "gigatoken"),
    "build, gigatoken, Parquet": ours("corpus.parquet", "gigatoken"),
    "build, gigatoken, Parquet by snappy": ours("corpus.snappy.parquet", "gigatoken"),
    "build, gigatoken, JSON lines by zstd": ours("corpus.jsonl.zst", "gigatoken"),
    "build, gigatoken, Parquet by zstd": ours("corpus.zstd.parquet", "gigatoken"),
}


def prepare(final: Path, texts: list[Path], megabytes: int) -> None:
    """Corpus, as JSON lines and as Parquet, plain and compressed, and a tokenizer of it."""
    import pyarrow as pa
    from pyarrow import parquet
    from zstandard import ZstdCompressor

    folder = final.with_suffix(".tmp")
    folder.mkdir(parents=True)
    documents, size = [], 0
    for text in _documents(texts):
        documents.append(text)
        size += len(text.encode())
        if size >= megabytes * 1_000_000:
            break
    sample = folder / "sample.txt"
    sample.write_text("\n".join(documents[:TRAINED_DOCUMENTS]), encoding="utf-8")
    train_tokenizer([sample], 32_000, "bytelevel", folder / "tokenizer", progress=False)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as out:
        for text in documents:
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    with (
        open(folder / "corpus.jsonl", "rb") as plain,
        open(folder / "corpus.jsonl.zst", "wb") as out,
    ):
        ZstdCompressor().copy_stream(plain, out)
    table = pa.table({"text": documents})
    for codec, name in [("none", ""), ("snappy", ".snappy"), ("zstd", ".zstd")]:
        path = folder / f"corpus{name}.parquet"
        parquet.write_table(table, path, row_group_size=2000, compression=codec)
    (folder / "text_bytes").write_text(str(size))
    folder.rename(final)


def _documents(texts: list[Path]) -> Iterator[str]:
    """Stretches of the texts, mixed; when all were taken, again, cut at other places."""
    contents = [path.read_text(encoding="utf-8") for path in texts]
    for turn in range(1_000_000):
        first = 37 * turn % DOCUMENT_CHARACTERS
        stretches = [
            content[start : start + DOCUMENT_CHARACTERS]
            for content in contents
            for start in range(first, len(content), DOCUMENT_CHARACTERS)
        ]
        random.Random(turn).shuffle(stretches)
        yield from stretches


def measure(way: str, folder: Path, workers: int) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and tokens of one way, in a process of its own."""
    shutil.rmtree(folder / MADE, ignore_errors=True)
    (folder / MADE).mkdir()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = ["-m", "mixtron.data_prep.benchmark", "--way", way, "--folder", str(folder)]
    # Compiled modules are kept, as they are where people work; numpy's threads are off, as in
    # `mixtron prep`.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    run = subprocess.run(
        [sys.executable, *command, "--workers", str(workers)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, int(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", nargs="*", type=Path, help="text files to make corpora of")
    parser.add_argument("--megabytes", nargs="+", type=int, default=[400], help="of each corpus")
    parser.add_argument("--corpora", type=Path, help="where corpora are kept for another time")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="their median counts")
    parser.add_argument("--skip", nargs="*", choices=WAYS, default=[], help="ways to leave out")
    parser.add_argument("--prepare", action="store_true", help="make the corpora, no more")
    parser.add_argument("--folder", type=Path, help="of the corpus of one way")
    parser.add_argument("--way", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.way:
        print(WAYS[arguments.way](arguments.folder, arguments.workers))
        return
    ways = [way for way in WAYS if way not in arguments.skip]
    print(f"{arguments.workers} workers, {os.cpu_count()} cores, Python", platform.python_version())
    with tempfile.TemporaryDirectory() as temporary:
        for megabytes in arguments.megabytes:
            folder = (arguments.corpora or Path(temporary)) / f"{megabytes}-mb"
            if not folder.exists():
                prepare(folder, arguments.text, megabytes)
            if not arguments.prepare:
                _compare(folder, ways, arguments.workers, arguments.rounds)


def _compare(folder: Path, ways: list[str], workers: int, rounds: int) -> None:
    found = {way: [] for way in ways}
    for turn in range(rounds):
        for way in ways:
            if turn == 0 or not way.startswith(SLOW):
                found[way].append(measure(way, folder, workers))
                load = os.getloadavg()[0]
                print(f"round {turn + 1}, load {load:.0f}: {way}: {found[way][-1]}", flush=True)
    _print_table(found, int((folder / "text_bytes").read_text()) / 1e6)


def _print_table(found: dict[str, list[tuple[float, float, int]]], size: float) -> None:
    print(f"\n{size:.0f} MB of text")
    print("| way | MB/s | times the first | MB per CPU second | times the first | tokens |")
    print("|---|---|---|---|---|---|")
    medians = {way: tuple(map(median, zip(*runs, strict=True))) for way, runs in found.items()}
    first = next(iter(medians.values()))
    for way, (seconds, cpu, tokens) in medians.items():
        print(
            f"| {way} | {size / seconds:.1f} | {first[0] / seconds:.1f} "
            f"| {size / cpu:.1f} | {first[1] / cpu:.1f} | {tokens:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
