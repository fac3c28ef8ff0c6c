"""The plan of a build: what is read, how, and in which units; derived from the inputs alone.

A unit is what is done, repeated, resumed and checked as a whole, by one worker or one element of
a SLURM array.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import write_whole
from mixtron.data_prep.formats import InputFile, describe
from mixtron.data_prep.pieces import Piece, cut
from mixtron.data_prep.storage import find_files, is_url, size_and_state
from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.data_prep.tokenizer_base import Tokenizer

FORMAT_VERSION = 1
SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 8 << 20, 1 << 30
UNITS = 256
"""About so many, unless their size would leave the bounds above. Part of no shard."""

OnBadLine = Literal["fail", "skip", "quarantine"]


@dataclass(frozen=True)
class Recipe:
    """What is asked for, beside the inputs."""

    tokenizer: str
    eod_token: str | None = None
    """See `load_tokenizer`."""
    append_eod: bool = True
    bos_token: str | None = None
    """Special token put before every document; None puts none."""
    special_text: bool = False
    """Names of special tokens within documents become these tokens."""
    text_keys: tuple[str, ...] = ("text",)
    """JSON keys or columns whose strings are the document, joined by an empty line."""
    on_bad_line: OnBadLine = "fail"
    """`fail` ends the build at the first bad line; `skip` counts it; `quarantine` also writes it
    to the output's `.rejected.jsonl`."""
    max_bad_lines: int = 1000
    """More than these in all end the build."""
    deduplicate: bool = False
    """Of documents with the same text, only the first is kept."""
    held_out: float = 0.0
    """Share of documents, chosen by a hash of their text, that go to a shard of their own."""

    def __post_init__(self) -> None:
        if not self.text_keys:
            raise DataError("text_keys: at least one")
        if self.on_bad_line not in get_args(OnBadLine):
            raise DataError(f"on_bad_line={self.on_bad_line!r}: {', '.join(get_args(OnBadLine))}")
        if not 0 <= self.held_out < 1:
            raise DataError(f"held_out={self.held_out}: a share from 0 up to, not including, 1")
        if self.max_bad_lines < 0:
            raise DataError(f"max_bad_lines={self.max_bad_lines}: 0 or more")

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer, self.eod_token, self.special_text)

    @property
    def needs_hashes(self) -> bool:
        return self.deduplicate or self.held_out > 0


@dataclass(frozen=True)
class Unit:
    """Neighbouring pieces of one source."""

    key: str
    """Names the unit's files: of the pieces, the state of their files, and the recipe."""
    source: str
    bytes: int
    """Of input; of tables about."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """A plan as it lies in `PREFIX.plan.json`."""

    recipe: Recipe
    tokenizer: dict
    """`type`, `sha256`, `vocab_size`."""
    eod_id: int | None
    bos_id: int | None
    inputs: tuple[InputFile, ...]
    units: tuple[Unit, ...]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(file.source for file in self.inputs))

    @property
    def input_bytes(self) -> int:
        return sum(file.bytes for file in self.inputs)

    def to_json(self) -> str:
        numbers = {file: number for number, file in enumerate(self.inputs)}
        units = [
            {
                "key": unit.key,
                "source": unit.source,
                "bytes": unit.bytes,
                "pieces": [[numbers[p.file], p.start, p.stop] for p in unit.pieces],
            }
            for unit in self.units
        ]
        content = {
            "format_version": FORMAT_VERSION,
            "recipe": asdict(self.recipe),
            "tokenizer": self.tokenizer,
            "eod_id": self.eod_id,
            "bos_id": self.bos_id,
            "inputs": [asdict(file) for file in self.inputs],
            "units": units,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def plan_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.plan.json")


def make_plan(inputs: Sequence[str], recipe: Recipe, tokenizer: Tokenizer | None = None) -> Plan:
    """Looks at every input and cuts them into units.

    Args:
        inputs: paths, folders, globs and URLs; `NAME=PATTERN` puts what it matches into a source
            of its own, which becomes a shard of its own.
        tokenizer: that of the recipe, where it is loaded already.

    Raises:
        DataError: no files, an unknown format, or a tokenizer that cannot do what is asked.
    """
    tokenizer = tokenizer or recipe.load_tokenizer()
    bos_id = None if recipe.bos_token is None else tokenizer.special_id(recipe.bos_token)
    files = [describe(file, source) for source, file in _files_by_source(inputs)]
    identity = {key: getattr(tokenizer, key) for key in ("type", "sha256", "vocab_size")}
    eod_id = tokenizer.eod_id if recipe.append_eod else None
    recipe_key = [
        FORMAT_VERSION,
        identity,
        eod_id,
        bos_id,
        recipe.special_text,
        recipe.text_keys,
        recipe.on_bad_line,
        recipe.needs_hashes,
    ]
    total = sum(file.bytes for file in files)
    unit_bytes = min(max(total // UNITS, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units = [
        Unit(_unit_key(recipe_key, pieces), pieces[0].file.source, size, pieces)
        for pieces, size in _group(files, recipe.text_keys, unit_bytes)
    ]
    return Plan(recipe, identity, eod_id, bos_id, tuple(files), tuple(units))


def save_plan(plan: Plan, prefix: str | Path) -> None:
    write_whole(plan_path(prefix), plan.to_json().encode())


def load_plan(prefix: str | Path) -> Plan:
    """Reads `PREFIX.plan.json`.

    Raises:
        DataError: there is none, or it is of another version.
    """
    path = plan_path(prefix)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such plan; make it with `mixtron prep plan`") from None
    except ValueError as error:
        raise DataError(f"{path}: not a plan: {error}") from None
    if content.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path}: plan of version {content.get('format_version')}; plan again")
    recipe = content["recipe"] | {"text_keys": tuple(content["recipe"]["text_keys"])}
    inputs = tuple(InputFile(**file) for file in content["inputs"])
    units = tuple(
        Unit(
            u["key"],
            u["source"],
            u["bytes"],
            tuple(Piece(inputs[n], start, stop) for n, start, stop in u["pieces"]),
        )
        for u in content["units"]
    )
    kept = {key: content[key] for key in ("tokenizer", "eod_id", "bos_id")}
    return Plan(Recipe(**recipe), **kept, inputs=inputs, units=units)


def check_unchanged(unit: Unit) -> None:
    """Raises DataError when a file of the unit is not the one that was planned."""
    for piece in unit.pieces:
        file = piece.file
        try:
            now = size_and_state(file.file)
        except FileNotFoundError:
            raise DataError(f"{file.file}: in the plan, but no longer there") from None
        if now != (file.bytes, file.state):
            raise DataError(
                f"{file.file}: changed since it was planned ({file.bytes} bytes then, {now[0]} "
                "now); plan again, which keeps the finished units of other files"
            )


def _files_by_source(inputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Sources in the order given, the files of each sorted."""
    patterns: dict[str, list[str]] = {}
    for pattern in inputs:
        name, equals, rest = str(pattern).partition("=")
        named = equals and name.replace("-", "").replace("_", "").isalnum()
        if named and not is_url(name) and not Path(pattern).exists():
            patterns.setdefault(name, []).append(rest)
        else:
            patterns.setdefault("", []).append(str(pattern))
    find_files([pattern for group in patterns.values() for pattern in group])  # each once in all
    for source, group in patterns.items():
        for file in find_files(group):
            yield source, file


def _group(
    files: list[InputFile], text_keys: tuple[str, ...], unit_bytes: int
) -> Iterator[tuple[tuple[Piece, ...], int]]:
    """Neighbouring pieces of one source, so many that they reach `unit_bytes`."""
    group: list[Piece] = []
    size = 0
    for file in files:
        for piece, piece_bytes in cut(file, text_keys, unit_bytes):
            full = size + piece_bytes > unit_bytes
            if group and (full or group[-1].file.source != file.source):
                yield tuple(group), size
                group, size = [], 0
            group.append(piece)
            size += piece_bytes
    if group:
        yield tuple(group), size


def _unit_key(recipe_key: list, pieces: tuple[Piece, ...]) -> str:
    content = json.dumps([recipe_key, [asdict(piece) for piece in pieces]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
