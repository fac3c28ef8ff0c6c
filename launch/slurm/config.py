"""The `slurm:` section of a run, and cluster profiles, which are files of the same keys."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mixtron.megatron_ext.config import Count, Positive, Section
from mixtron.megatron_ext.errors import ConfigError

PROFILES = Path("configs") / "clusters"
Port = Annotated[int, Field(ge=1024, le=65535)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
OneLine = Annotated[str, Field(pattern=r"^[^\n]+$")]


class ContainerConfig(Section):
    type: Literal["pyxis", "apptainer"]
    """pyxis: `srun --container-image` (enroot); apptainer: `apptainer exec --nv` in each task."""
    image: OneLine
    mounts: list[OneLine] = []
    """host:container, beside the working folder and the run folder, which are always mounted."""


class SlurmConfig(Section):
    nodes: Positive = 1
    gpus_per_node: Count = 8
    """0 on nodes without GPUs, which take `ranks_per_node`."""
    gpu_type: OneLine | None = None
    """As in `--gres=gpu:TYPE:N`; null asks for any kind."""
    ranks_per_node: Positive | None = None
    """null: one a GPU."""
    launcher: Literal["torchrun", "srun"] = "torchrun"
    """torchrun: a task a node, which starts that node's ranks; srun: a task a rank."""
    tasks_per_node: Positive | None = None
    """Follows from `launcher`; any other number is refused."""
    cpus_per_task: Positive | None = None
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")] = "24:00:00"
    signal_lead_s: Annotated[int, Field(ge=1, le=65535)] = 300
    """How long before the time limit the ranks are told to stop (SLURM adds up to 60 s)."""
    restarts_without_progress: Positive = 3
    """Launches in a row that ended without a newer checkpoint before the job is given up."""
    partition: OneLine | None = None
    account: OneLine | None = None
    sbatch_options: list[Annotated[str, Field(pattern=r"^-[^\n]+$")]] = []
    """More #SBATCH lines as they are, such as --qos=long, --exclusive or --mem=0."""
    port_range: Annotated[list[Port], Field(min_length=2, max_length=2)] = [20000, 29999]
    """Where the rendezvous port is taken from; keep it out of the nodes' ephemeral ports."""
    scratch_dir: OneLine = "/tmp"
    """On each node's own disk or memory: heartbeats, and Triton's cache, which is kept there."""
    python: OneLine | None = None
    """The interpreter on the nodes; null: the one that submits, or `python3` of a container."""
    modules: list[OneLine] = []
    """Loaded by `module load` before the ranks start."""
    environment: dict[VariableName, str] = {}
    """Exported to every rank; a run's variables are added to its cluster profile's."""
    container: ContainerConfig | None = None

    @model_validator(mode="after")
    def _fits(self):
        if self.gpus_per_node == 0 and self.ranks_per_node is None:
            raise ValueError("gpus_per_node=0 needs ranks_per_node, the CPU ranks of a node")
        if self.tasks_per_node not in (None, self.tasks):
            owner = "one task a node, which starts all ranks of it"
            if self.launcher == "srun":
                owner = "one task a rank"
            raise ValueError(
                f"tasks_per_node={self.tasks_per_node} cannot work: launcher={self.launcher} needs "
                f"{owner}; leave the key out, or set it to {self.tasks}"
            )
        if self.port_range[0] > self.port_range[1]:
            raise ValueError(f"port_range={self.port_range}: the first is above the last")
        return self

    @property
    def ranks_of_node(self) -> int:
        return self.ranks_per_node or self.gpus_per_node

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_of_node

    @property
    def tasks(self) -> int:
        """Tasks a node."""
        return 1 if self.launcher == "torchrun" else self.ranks_of_node


def load_profile(cluster: str) -> dict[str, Any]:
    """A cluster profile's keys, by its file or its name under configs/clusters.

    Raises:
        ConfigError: no such profile (names those there are), or a key or value that is not valid.
    """
    path = Path(cluster)
    if path.suffix != ".yaml":
        checkout = Path(__file__).parents[2]
        places = [Path.cwd() / PROFILES, checkout / PROFILES]
        found = [place / f"{cluster}.yaml" for place in places]
        path = next((p for p in found if p.is_file()), None)
        if path is None:
            names = sorted({p.stem for place in places for p in place.glob("*.yaml")})
            raise ConfigError(
                f"--cluster {cluster}: no such profile; {PROFILES} has {', '.join(names) or 'none'}"
                "; a path ending in .yaml works too"
            )
    try:
        raw = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such cluster profile") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected the keys of `slurm:`, found {type(raw).__name__}")
    try:
        SlurmConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {key}: {first['msg']}") from None
    return raw
