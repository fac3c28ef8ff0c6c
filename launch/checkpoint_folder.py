"""The folder that a run's checkpoints lie in: what is kept there, and whether all ranks see it.

Every function is called by all ranks, and raises the same CheckpointError on all or on none.
"""

import secrets
import time
from pathlib import Path

from mixtron.launch.agreement import gather, on_first
from mixtron.launch.checkpoint_files import (
    CheckpointError,
    list_checkpoints,
    set_aside,
    unfinished,
)
from mixtron.megatron_ext.parallel import Ranks

SHARED_FOLDER_WAIT_S = 5.0
"""How long a rank looks for what rank 0 wrote: network file systems show new files late."""


def set_aside_old(
    root: Path, keep: int | None, ranks: Ranks, *, keep_every_steps: int | None = None
) -> list[Path]:
    """Renames complete checkpoints beyond the newest `keep` (None: none), for `delete`.

    Damaged checkpoints do not count and are left for a person to look at.

    Args:
        keep: at least 1.
        keep_every_steps: those of steps that it divides stay for ever.
    Returns:
        On rank 0 what is to be deleted, with what dead saves and deletions left; else nothing.
    """

    def set_aside_all() -> list[Path]:
        complete = [info for info in list_checkpoints(root) if info.complete]
        for info in [] if keep is None else complete[:-keep]:
            if not (keep_every_steps and info.step % keep_every_steps == 0):
                set_aside(info.path)
        return unfinished(root)

    folders = on_first(ranks, set_aside_all)
    return folders if ranks.is_first else []


def check_shared_folder(root: Path, ranks: Ranks) -> None:
    """Refuses a folder that is not the same on all ranks.

    Raises:
        CheckpointError: exit code 2; names the ranks that do not see what rank 0 wrote.
    """
    token = secrets.token_hex(8)

    def write() -> Path:
        try:
            root.mkdir(parents=True, exist_ok=True)
            file = root / f".shared-{token}"
            file.write_text(token)
        except OSError as error:
            raise CheckpointError(f"{root}: cannot be written: {error.strerror}") from None
        return file

    name = on_first(ranks, write).name
    blind = [rank for rank, seen in enumerate(gather(_appears(root / name))) if not seen]
    if ranks.is_first:
        (root / name).unlink()
    if blind:
        raise CheckpointError(
            f"{root} is not the same folder on all ranks: ranks {', '.join(map(str, blind))} do "
            "not see what rank 0 wrote; run_dir must lie on a file system that all nodes share"
        )


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + SHARED_FOLDER_WAIT_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
