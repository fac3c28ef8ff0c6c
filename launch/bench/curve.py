"""One curve of `mixtron bench curves`, in a process of its own:

python -m mixtron.launch.bench.curve CONFIG ROWS STEPS LIMIT_S [key=value ...]
"""

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from mixtron.launch import exit_codes
from mixtron.launch.bench.step import begin, build_run
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.data import open_data
from mixtron.launch.loop import train_step
from mixtron.launch.train import quiet_libraries
from mixtron.megatron_ext.layer_graphs import release_recordings

LOGGED = ("train/loss", "train/grad_norm", "train/skipped_steps")


def write_curve(config: RunConfig, rows: Path, steps: int, limit_s: float) -> None:
    """Trains a new model by the loop's own step; a line of `rows` a step, nothing is saved.

    Args:
        limit_s: stops after the step that ends this long after the first one began; 0: never.
    Raises:
        ConfigError, DataError: as training does.
    """
    _, data, _ = open_data(config)
    ranks = begin(config)
    run = build_run(config, ranks, data)
    started = time.perf_counter()
    with rows.open("w", buffering=1) as file:
        for step in range(1, steps + 1):
            values = train_step(run)
            seconds = time.perf_counter() - started
            row = {name.removeprefix("train/"): values[name] for name in LOGGED}
            file.write(json.dumps({"step": step, "seconds": seconds, **row}) + "\n")
            if limit_s and seconds > limit_s:
                break


def main(path: str, rows: str, steps: str, limit_s: str, *overrides: str) -> int:
    quiet_libraries()
    try:
        write_curve(load_config(path, list(overrides)), Path(rows), int(steps), float(limit_s))
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        if code == exit_codes.FAILED:
            raise
        print(f"mixtron: {error}", file=sys.stderr)
        return code
    release_recordings()
    dist.destroy_process_group()
    return exit_codes.FINISHED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
