"""Training tokenizers: SentencePiece BPE and unigram, byte-level BPE."""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import write_whole
from mixtron.data_prep.formats import InputFile, describe
from mixtron.data_prep.pieces import place, whole_pieces
from mixtron.data_prep.progress import progress_bar
from mixtron.data_prep.readers import read_piece
from mixtron.data_prep.storage import find_files

ModelType = Literal["bpe", "unigram", "bytelevel"]
EOD_TOKEN = "<|endoftext|>"
PIECE_CHARACTERS = 1024
"""At most 4,096 bytes: SentencePiece drops any sentence above 4,192."""
MINIMUM_USED = 0.9
SENTENCEPIECE_THREADS = 8
"""Fixed: sums, and so the result, depend on the number of threads."""
RESERVED = {0: "\n", 0x2585: "\n"}
"""Characters (NUL and the lower-five-eighths block) whose sentences SentencePiece drops."""


def train_tokenizer(
    inputs: Sequence[str | Path],
    vocab_size: int,
    model_type: ModelType,
    output: str | Path,
    text_keys: Sequence[str] = ("text",),
    progress: bool = True,
) -> dict[str, int]:
    """Trains a tokenizer on whole files; the same inputs give the same bytes.

    Args:
        inputs: JSONL and text files, folders, globs; the text is held in memory.
        vocab_size: ids, special tokens and bytes included.
        model_type: `bpe` and `unigram` are SentencePiece without normalisation and with byte
            fallback; `bytelevel` is the BPE over bytes of GPT-2.
        output: a `.model` file; for `bytelevel` a folder, for tokenizer.json and its config.

    Returns:
        `bytes_offered` and `bytes_used`: UTF-8 text in the inputs without line ends, and what
        training saw of it.

    Raises:
        DataError: bad input, a vocabulary size out of reach, under 90 % of the text used.
    """
    output = Path(output)
    _check_arguments(model_type, output)
    files = [describe(file, "") for file in find_files([str(path) for path in inputs])]
    total_bytes = sum(file.bytes for file in files)
    used = {"bytes_offered": 0, "bytes_used": 0}
    with progress_bar("read text", total_bytes, show=progress) as advance:
        texts = _texts(files, tuple(text_keys), used, advance)
        if model_type == "bytelevel":
            written = _train_bytelevel(_counted(texts, used), vocab_size, output)
        else:
            pieces = (piece for text in texts for piece in split_text(text))
            written = _train_sentencepiece(_counted(pieces, used), vocab_size, model_type, output)
    if used["bytes_used"] < MINIMUM_USED * used["bytes_offered"]:
        raise DataError(
            f"{output}: only {used['bytes_used']:,} of {used['bytes_offered']:,} bytes of text "
            "were used in training; the rest is characters that SentencePiece reserves"
        )
    for path, content in written.items():
        write_whole(path, content)
    return used


def split_text(text: str) -> Iterator[str]:
    """Lines, long ones cut at a space, so that a trainer drops none of them."""
    for line in text.translate(RESERVED).split("\n"):
        start = 0
        while len(line) - start > PIECE_CHARACTERS:
            space = line.rfind(" ", start + 1, start + PIECE_CHARACTERS)
            stop = space if space > start else start + PIECE_CHARACTERS
            yield line[start:stop]
            start = stop
        if line[start:]:
            yield line[start:]


def _check_arguments(model_type: str, output: Path) -> None:
    if model_type not in ("bpe", "unigram", "bytelevel"):
        raise DataError(f"model_type={model_type!r}: bpe, unigram or bytelevel")
    if model_type == "bytelevel" and output.suffix:
        raise DataError(f"{output}: a bytelevel tokenizer is a folder; give a name without suffix")
    if model_type != "bytelevel" and output.suffix != ".model":
        raise DataError(f"{output}: a {model_type} tokenizer is one file; end its name in .model")


def _texts(
    files: list[InputFile],
    text_keys: tuple[str, ...],
    used: dict[str, int],
    advance: Callable[[int, int], None],
) -> Iterator[str]:
    for piece in whole_pieces(files, text_keys):
        for batch in read_piece(piece, text_keys, hashlib.sha256()):
            for bad in batch.rejected:
                raise DataError(f"{place(piece, bad)}: {bad.reason}")
            for text in batch.texts:
                used["bytes_offered"] += _bytes_of(text)
                yield text
            advance(batch.input_bytes, len(batch.texts))


def _counted(texts: Iterator[str], used: dict[str, int]) -> Iterator[str]:
    for text in texts:
        used["bytes_used"] += _bytes_of(text)
        yield text


def _bytes_of(text: str) -> int:
    """UTF-8 bytes without line ends, at which text is cut."""
    return len(text.encode()) - text.count("\n")


def _train_sentencepiece(
    pieces: Iterator[str], vocab_size: int, model_type: str, output: Path
) -> dict[Path, bytes]:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            # Text comes back as it was: nothing is normalised, unseen characters become bytes.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            num_threads=SENTENCEPIECE_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or str(error)
        raise DataError(f"{output}: vocab_size={vocab_size}: {reason}") from None
    return {output: model.getvalue()}


def _train_bytelevel(texts: Iterator[str], vocab_size: int, output: Path) -> dict[Path, bytes]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise DataError(f"{output}: vocab_size={vocab_size}: at least {len(alphabet) + 1}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise DataError(
            f"{output}: vocab_size={vocab_size}: the text yields only {reached}; give more text"
        )
    config = {"eos_token": EOD_TOKEN}
    return {
        output / "tokenizer.json": tokenizer.to_str().encode(),
        output / "tokenizer_config.json": json.dumps(config).encode() + b"\n",
    }
