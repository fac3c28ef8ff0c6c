"""Runs programs in which Triton's interpreter runs the kernels.

It is chosen when Triton is imported: each program is a fork of one process that has done so.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


def run_interpreted(program: str) -> list[str]:
    """The lines that a program prints, which must end well."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="interpreted-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(program)
        print(folder, file=server.stdin, flush=True)
        status = server.stdout.readline()
        assert status == "0\n", (status, (folder / "errors").read_text()[-2000:])
        return (folder / "output").read_text().splitlines()


@cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.interpreter_server"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server
