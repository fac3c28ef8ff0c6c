"""What a shard says of itself: the `.json` beside its `.bin` and `.idx`, published last."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mixtron.data_prep.errors import DataError

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """Depends on the inputs alone: no times, hosts or worker counts."""

    dtype: str
    """numpy name of the token type, `uint16` or `int32`."""
    documents: int
    tokens: int
    max_id: int
    """Largest id that occurs."""
    longest_document: int
    """Tokens."""
    cardinality: int
    """Largest id that could occur, plus 1."""
    eod_id: int | None
    """Id at the end of every document; None: none was appended."""
    bos_id: int | None
    """Id at the beginning of every document; None: none was put there."""
    special_text: bool
    """Whether names of special tokens within documents became these tokens."""
    tokenizer: dict
    """`type`, `sha256`, `vocab_size`."""
    inputs: list[dict]
    """`file`, `bytes`, `sha256`, `lines` of each, and `range` for a part of a file, as read.

    The SHA-256 is that of the bytes read; of a table, of its text columns.
    """
    bin_sha256: str
    idx_sha256: str
    counts: dict
    """`empty`: documents without text, dropped; `rejected`: bad lines or files, left out;
    `duplicates`: repeated documents, left out; `eod_in_text`: times that the end-of-document
    token's name occurs in text. Of the shard's source, held-out documents included."""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Reads and checks a manifest.

    Raises:
        DataError: missing, not JSON, of another version, or not with exactly these keys.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path}: the shard's manifest is missing (its build did not finish); build it again "
            "with `mixtron prep build`"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not a shard manifest: {error}") from None
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{path}: manifest format {version}, this version reads {FORMAT_VERSION}")
    expected = set(Manifest.__dataclass_fields__)
    if set(fields) != expected:
        wrong = ", ".join(sorted(set(fields) ^ expected))
        raise DataError(f"{path}: manifest keys missing or unknown: {wrong}")
    return Manifest(**fields)
