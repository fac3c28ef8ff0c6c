"""The process that interpreted programs are forked from. Started by `interpreter.py`.

Reads folders, one a line; runs the `program.py` in each; answers with the program's exit status.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401  what checkpointing imports, before the fork

import mixtron.kernels.self_test_cases  # noqa: F401


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(Path(line.strip())))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(folder: Path) -> int:
    with open(folder / "output", "w") as output, open(folder / "errors", "w") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            runpy.run_path(str(folder / "program.py"), run_name="__main__")
            return 0
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


if __name__ == "__main__":
    serve()
