"""The files of a checkpoint: layout, manifest, hashes, commit. One process, no torch.

checkpoints/
    step_00000012/              exists under this name only when complete
        __0_0.distcp ...        what each rank wrote, in torch's distributed format
        .metadata               which tensor lies where
        metadata.json           Megatron's format marker
        manifest.json           size and SHA-256 of each file, step, layout, state, config
    latest                      the newest one's name, for people and scripts; not read here
    .step_00000013.tmp-1a2b3c4d         a save under way, or left by one that died
    .step_00000009.removed-5e6f7a8b     being deleted
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
FORMAT_VERSION = 2
"""Raised when an older version could not read what is written; older formats stay readable."""
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(tmp|removed)-[0-9a-f]{8}")
_CHUNK_BYTES = 1 << 23


class CheckpointError(Exception):
    """A checkpoint that cannot be used or written. The message names the file.

    `exit_code` is 2 for what a person must mend and 76 for I/O that a restart may cure.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class CheckpointInfo:
    """One `step_*` folder."""

    path: Path
    step: int
    complete: bool
    reason: str
    """Why it is not complete; empty if it is."""


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Every `step_*` folder, oldest step first. Sizes are checked, contents are not."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        try:
            verify_checkpoint(path, hashes=False)
            reason = ""
        except CheckpointError as error:
            reason = str(error)
        found.append(CheckpointInfo(path, int(match[1]), not reason, reason))
    return sorted(found, key=lambda info: info.step)


def verify_checkpoint(path: Path, hashes: bool) -> None:
    """Checks that every file of the manifest is there with its size and, on demand, its SHA-256.

    Raises:
        CheckpointError: names the first file that is missing, truncated or altered.
    """
    for name, entry in read_manifest(path)["files"].items():
        problem = file_problem(path / name, entry, hashes)
        if problem:
            raise CheckpointError(problem)


def file_problem(path: Path, entry: dict, hashes: bool) -> str:
    """What is wrong with one file; empty if nothing is."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path}: {size} bytes, the manifest says {entry['bytes']}"
        if hashes and file_sha256(path) != entry["sha256"]:
            return f"{path}: contents differ from the manifest's SHA-256"
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: no such folder, no manifest, or a garbled or altered one.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    try:
        manifest = json.loads(file.read_bytes())
        digest = manifest.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; the checkpoint is not complete") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{file}: not a manifest") from None
    if digest != _manifest_sha256(manifest):
        raise CheckpointError(f"{file}: altered since it was written")
    return _upgraded(manifest, file)


def _upgraded(manifest: dict, file: Path) -> dict:
    """A manifest of any format as this version writes it.

    Raises:
        CheckpointError: a later version wrote it.
    """
    found = manifest.pop("format", None) or manifest["format_version"]
    if found > FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version {found}; this version of mixtron reads up to "
            f"{FORMAT_VERSION}: use the one that wrote it, or a later one"
        )
    if found == 1:
        # It counted steps alone, and the global batch could not change.
        config, progress = manifest["config"], manifest["state"].get("progress", {})
        if "training" in config and "step" in progress:
            batch = config["training"]["global_batch_tokens"] // config["data"]["sequence_length"]
            progress["samples"] = progress["step"] * batch
        manifest["saved_at"] = None
    return manifest | {"format_version": FORMAT_VERSION}


def write_manifest(path: Path, manifest: dict) -> None:
    """Writes and syncs the manifest, which carries its own SHA-256."""
    complete = {"sha256": _manifest_sha256(manifest), **manifest}
    _write_synced(path / MANIFEST, json.dumps(complete, indent=1) + "\n")


def _manifest_sha256(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync_and_hash(path: Path) -> dict:
    """Forces a file to the disk; returns its manifest entry."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def begin(root: Path, step: int) -> Path:
    """Makes the folder that a save writes into."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".{step_name(step)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, step: int, manifest: dict) -> Path:
    """Turns a written folder into a checkpoint: manifest, sync, rename, then `latest`.

    A checkpoint of the same step that is already there (damaged, or of an abandoned continuation)
    is replaced.
    """
    root = temporary.parent
    final = root / step_name(step)
    write_manifest(temporary, manifest)
    sync_folder(temporary)
    replaced = set_aside(final) if final.exists() else None
    os.rename(temporary, final)
    sync_folder(root)
    latest = root / f".{LATEST}.tmp"
    _write_synced(latest, final.name + "\n")
    os.replace(latest, root / LATEST)
    sync_folder(root)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def set_aside(path: Path) -> Path:
    """Renames a checkpoint away, so that a half-deleted one never looks complete."""
    removed = path.parent / f".{path.name}.removed-{secrets.token_hex(4)}"
    os.rename(path, removed)
    sync_folder(path.parent)
    return removed


def unfinished(root: Path) -> list[Path]:
    """What dead saves and deletions left, and a save or deletion that is under way."""
    return sorted(p for p in root.iterdir() if _LEFTOVER.fullmatch(p.name)) if root.is_dir() else []


def delete(folders: list[Path]) -> None:
    """Deletes them, and warns of those that resist."""
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.warning("%s: could not be deleted", path)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
