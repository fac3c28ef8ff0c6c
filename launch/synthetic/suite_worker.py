"""Entry point of one process of a suite."""

import argparse
import os
import sys
from pathlib import Path

from mixtron.launch.synthetic.suite_config import cells_of, load_suite
from mixtron.launch.train import quiet_libraries


def main(argv: list[str] | None = None) -> int:
    """`python -m mixtron.launch.synthetic.suite_worker SUITE --dir D [--tiny]`; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", type=Path)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(argv)
    suite = load_suite(given.suite, tiny=given.tiny)
    cells = cells_of(suite, given.dir)
    quiet_libraries()
    import torch

    from mixtron.megatron_ext import cpu_backend

    cpu_backend.install()  # first, as in `train`
    from mixtron.launch.synthetic.suite_run import Worker

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    code = Worker(suite, cells).work()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
