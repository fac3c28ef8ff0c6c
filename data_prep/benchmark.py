"""Speed of `build` against other ways to do the same: `python -m mixtron.data_prep.benchmark`.

Every way reads the same documents and gives the same tokens, in a process of its own, start-up
included. The two that are not ours are made here from the description of Megatron-LM's tools:
`pool and parent` (a pool of workers that parse and tokenise 32 lines at a time, and one parent
that writes) and `one call` (gigatoken's own file reader, the whole corpus in memory).
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mixtron.data_prep.build import build_all
from mixtron.data_prep.plan import Recipe
from mixtron.data_prep.shards import Shard
from mixtron.data_prep.tokenizer_training import train_tokenizer

DOCUMENT_CHARACTERS = 6_000
LINES_AT_ONCE = 32


def pool_and_parent(folder: Path, workers: int) -> int:
    """A pool of tokenising workers, whose results one parent writes a document at a time."""
    tokens, lengths = 0, []
    pool = multiprocessing.get_context("spawn").Pool(workers, _open_tokenizer, (folder,))
    with pool, open(folder / "corpus.jsonl", "rb") as lines, open(folder / "p.bin", "wb") as out:
        for ids in pool.imap(_encode_line, lines, LINES_AT_ONCE):
            document = np.array(ids, dtype=np.uint16)
            out.write(document.tobytes(order="C"))
            lengths.append(len(document))
            tokens += len(document)
    np.array(lengths, dtype=np.int32).tofile(folder / "p.idx")
    return tokens


_opened: dict = {}


def _open_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _opened["tokenizer"] = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))


def _encode_line(line: bytes) -> list[int]:
    text = json.loads(line)["text"]
    return [*_opened["tokenizer"].encode(text, add_special_tokens=False).ids, 0]


def one_call(folder: Path, workers: int) -> int:
    """gigatoken reads and encodes the file by itself, on as many threads as there are cores."""
    import gigatoken

    tokenizer = gigatoken.Tokenizer(folder / "tokenizer")
    source = gigatoken.JsonlFileSource([folder / "corpus.jsonl"])
    rows = tokenizer.encode_files(source, parallel=True).layout
    offsets, ids = np.asarray(rows.offsets.data), np.asarray(rows.content.data)  # type: ignore
    lengths = np.diff(offsets) + 1
    out = np.zeros(lengths.sum(), dtype=np.uint16)
    is_text = np.ones(len(out), dtype=bool)
    is_text[np.cumsum(lengths) - 1] = False
    out[is_text] = ids
    out.tofile(folder / "o.bin")
    lengths.astype(np.int32).tofile(folder / "o.idx")
    return len(out)


def ours(name: str, backend: str) -> Callable[[Path, int], int]:
    """`build` of one file: plan, run, merge, verify."""

    def run(folder: Path, workers: int) -> int:
        prefix = folder / f"ours-{backend}-{name.rpartition('.')[2]}"
        recipe = Recipe(str(folder / "tokenizer"))
        build_all([folder / name], recipe, prefix, workers, backend=backend, progress=False)
        return Shard(prefix).total_tokens

    return run


WAYS: dict[str, Callable[[Path, int], int]] = {
    "pool and parent, tokenizers": pool_and_parent,
    "build, tokenizers": ours("corpus.jsonl", "plain"),
    "one call, gigatoken": one_call,
    "build, gigatoken": ours("corpus.jsonl", "gigatoken"),
    "build, gigatoken, Parquet": ours("corpus.parquet", "gigatoken"),
}


def prepare(folder: Path, texts: list[Path], megabytes: int) -> int:
    """Tokenizer and corpus, as JSON lines and as Parquet; returns bytes of text."""
    import pyarrow as pa
    from pyarrow import parquet

    train_tokenizer(texts, 32_000, "bytelevel", folder / "tokenizer", progress=False)
    documents, size = [], 0
    for text in _documents(texts):
        documents.append(text)
        size += len(text.encode())
        if size >= megabytes * 1_000_000:
            break
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as out:
        for text in documents:
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    table = pa.table({"text": documents})
    parquet.write_table(table, folder / "corpus.parquet", row_group_size=2000, compression="zstd")
    return size


def _documents(texts: list[Path]) -> Iterator[str]:
    """Stretches of the texts, each round cut at other places."""
    contents = [path.read_text(encoding="utf-8") for path in texts]
    for turn in range(1_000_000):
        for content in contents:
            for start in range(37 * turn % DOCUMENT_CHARACTERS, len(content), DOCUMENT_CHARACTERS):
                yield content[start : start + DOCUMENT_CHARACTERS]


def measure(way: str, folder: Path, workers: int) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and tokens of one way, in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = ["-m", "mixtron.data_prep.benchmark", "--way", way, "--folder", str(folder)]
    # Compiled modules are kept, as they are where people work.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
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
    parser.add_argument("--text", nargs="*", type=Path, help="text files to make the corpus of")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="holds the corpus of an earlier start")
    parser.add_argument("--way", choices=WAYS)
    arguments = parser.parse_args()
    if arguments.way:
        print(WAYS[arguments.way](arguments.folder, arguments.workers))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = prepare(folder, arguments.text, arguments.megabytes) / 1e6
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        print(f"{size:.0f} MB of text, {arguments.workers} workers, {os.cpu_count()} cores,")
        print(f"Python {platform.python_version()}, load {load} at the start\n")
        print("| way | MB/s | times the first | MB per CPU second | tokens |")
        print("|---|---|---|---|---|")
        first = None
        for way in WAYS:
            seconds, cpu, tokens = measure(way, folder, arguments.workers)
            first = first or seconds
            print(
                f"| {way} | {size / seconds:.1f} | {first / seconds:.1f} | {size / cpu:.1f} "
                f"| {tokens:,} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
