"""From text files to one shard: workers tokenise pieces of the input, the parent writes in order.

The output depends on the inputs and the tokenizer alone, never on the number of workers.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mixtron.data_prep.bad_lines import BadLines, OnBadLine
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.progress import progress_bar
from mixtron.data_prep.readers import find_files, plan_units
from mixtron.data_prep.shard_writer import ShardWriter
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.workers import Options, Workers


def build(
    inputs: Sequence[str | Path],
    tokenizer_path: str | Path,
    output_prefix: str | Path,
    workers: int = 1,
    text_keys: Sequence[str] = ("text",),
    on_bad_line: OnBadLine = "fail",
    append_eod: bool = True,
    eod_token: str | None = None,
    progress: bool = True,
) -> Manifest:
    """Builds the shard `output_prefix`.bin, .idx and .json; nothing is there unless it is whole.

    Args:
        inputs: JSONL and text files, folders, globs.
        workers: processes that tokenise.
        text_keys: keys of a JSON line whose strings are the document, joined by an empty line.
        on_bad_line: `fail` ends the build at the first bad line; `skip` counts it; `quarantine`
            also writes it to `output_prefix`.rejected.jsonl.
        eod_token: see `load_tokenizer`.
        progress: shows a progress bar.

    Raises:
        DataError: bad input, with file and line; no documents; the prefix is taken.
        WorkerError: a worker process died.
    """
    _check_arguments(workers, text_keys, on_bad_line)
    files = find_files([str(path) for path in inputs])
    tokenizer = load_tokenizer(tokenizer_path, eod_token)
    identity = {key: getattr(tokenizer, key) for key in ("type", "sha256", "vocab_size")}
    eod_id = tokenizer.eod_id if append_eod else None
    options = Options(str(tokenizer_path), eod_token, tuple(text_keys), append_eod)
    total_bytes = sum(os.path.getsize(file) for file in files)
    with (
        ShardWriter(output_prefix, tokenizer.vocab_size, eod_id, identity) as writer,
        BadLines(on_bad_line, Path(f"{output_prefix}.rejected.jsonl")) as bad_lines,
        progress_bar("tokenise", total_bytes, show=progress) as advance,
        Workers(workers, options) as pool,
    ):
        empty, sources = 0, []
        for unit, encoded in pool.encode(plan_units(files)):
            bad_lines.take(unit, encoded.rejected, encoded.lines)
            writer.add(encoded.tokens, encoded.lengths)
            empty += encoded.empty
            sources += encoded.files
            advance(encoded.input_bytes, len(encoded.lengths))
        sources += pool.line_file_hashes()
        sources.sort(key=lambda source: source["file"])
        bad_lines.publish()
        return writer.publish(sources, {"empty": empty, "rejected": bad_lines.count})


def _check_arguments(workers: int, text_keys: Sequence[str], on_bad_line: str) -> None:
    if workers < 1:
        raise DataError(f"workers={workers}: at least 1")
    if isinstance(text_keys, str) or not text_keys:
        raise DataError(f"text_keys={text_keys!r}: a list of one key or more")
    if on_bad_line not in get_args(OnBadLine):
        raise DataError(f"on_bad_line={on_bad_line!r}: {', '.join(get_args(OnBadLine))}")
