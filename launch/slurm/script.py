"""Renders the batch scripts from the templates in `slurm/`."""

import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from mixtron.launch.slurm.config import SlurmConfig


def render(template: str, **values: Any) -> str:
    """A template's text with `values`; `quote` makes any text one word of the shell."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(files("mixtron.slurm").joinpath(template).read_text()).render(
        values
    )


def job_script(
    name: str,
    slurm: SlurmConfig,
    folder: Path,
    *,
    working_dir: Path,
    array_size: int = 0,
    chained: bool = False,
) -> str:
    """The batch script of one run, or of an array of runs that `folder`/runs.txt lists.

    Args:
        folder: the run's folder, or that of the sweep; `code/` and the script are in it.
    """
    output = "%A_%a.out" if array_size else "%j.out"
    mounts = [working_dir, folder]
    return render(
        "job.sh.j2",
        name=name,
        slurm=slurm,
        run_dir=str(folder),
        folder=str(folder),
        comment=shlex.quote(f"mixtron {folder}"),
        working_dir=shlex.quote(str(working_dir)),
        output=shlex.quote(f"{folder}/slurm/{output}"),
        code=str(folder / "code"),
        array_size=array_size,
        chained=chained,
        **container(slurm, mounts),
    )


def container(slurm: SlurmConfig, mounts: list[Path]) -> dict[str, str]:
    """What goes before the interpreter, and into srun's options, to run in a container."""
    if slurm.container is None:
        return {
            "container_options": "",
            "container_command": "",
            "python": slurm.python or sys.executable,
        }
    python = slurm.python or "python3"
    binds = [*slurm.container.mounts, *(f"{path}:{path}" for path in mounts)]
    image = shlex.quote(slurm.container.image)
    if slurm.container.type == "pyxis":
        options = f" --container-image={image} --container-mounts={shlex.quote(','.join(binds))}"
        return {"container_options": options, "container_command": "", "python": python}
    command = f"apptainer exec --nv --bind {shlex.quote(','.join(binds))} {image} "
    return {"container_options": "", "container_command": command, "python": python}
