"""Names of a job's nodes, as `scontrol show hostnames` gives them, and by hand without it."""

import re
import shutil
import subprocess
from itertools import product

from mixtron.megatron_ext.errors import ConfigError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def hostnames(nodelist: str) -> list[str]:
    """Every node of a SLURM node list, in order. Many containers have no scontrol."""
    if shutil.which("scontrol"):
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True
        )
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()
    return expand(nodelist)


def expand(nodelist: str) -> list[str]:
    """`a[1-2],b03` is a1, a2, b03. Leading zeros keep their width; brackets may come repeatedly.

    Raises:
        ConfigError: a list that no SLURM prints.
    """
    names = []
    for part in _split_outside_brackets(nodelist):
        fixed = _BRACKETS.split(part)  # text, ranges, text, ranges, ..., text
        if any("[" in text or "]" in text for text in fixed[::2]):
            raise ConfigError(f"node list {nodelist!r}: brackets do not match")
        choices = [_numbers(ranges, nodelist) for ranges in fixed[1::2]]
        for chosen in product(*choices):
            pieces = [*(p for pair in zip(fixed[::2], chosen, strict=False) for p in pair)]
            names.append("".join([*pieces, fixed[-1]]))
    return names


def _split_outside_brackets(nodelist: str) -> list[str]:
    parts = re.split(r",(?![^\[]*\])", nodelist.strip())
    if not all(parts):
        raise ConfigError(f"node list {nodelist!r}: an empty name")
    return parts


def _numbers(ranges: str, nodelist: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise ConfigError(f"node list {nodelist!r}: {part!r} is not a range of numbers")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def count_of(text: str | None) -> int | None:
    """The number in what SLURM puts into SLURM_GPUS_PER_NODE and its like.

    `8`, `a100:8` and `gpu:a100:4(S:0-1)` are 8, 8 and 4; nothing is None; `8(x2)` is 8.

    Raises:
        ConfigError: no number in it.
    """
    if not text:
        return None
    number = text.split("(")[0].rsplit(":", 1)[-1]
    if not number.isdigit():
        raise ConfigError(f"{text!r}: expected a count such as 8, a100:8 or gpu:a100:4(S:0-1)")
    return int(number)
