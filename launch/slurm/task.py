"""Where one task stands in its job step, read from its own environment."""

from collections.abc import Mapping
from dataclasses import dataclass

from mixtron.launch import exit_codes
from mixtron.launch.slurm.hostlist import hostnames
from mixtron.megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Task:
    """Where this task stands in its job step."""

    launch: str
    """Job id and restart count."""
    job_id: int
    task: int
    tasks: int
    node: str
    node_number: int
    nodes: list[str]
    local_task: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Task":
        """Raises ConfigError outside a job step: `srun` was forgotten."""
        try:
            job_id = int(environment["SLURM_JOB_ID"])
            restart = environment.get("SLURM_RESTART_COUNT", "0")
            nodes = hostnames(
                environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
            )
            number = int(environment["SLURM_NODEID"])
            return cls(
                launch=environment.get(exit_codes.LAUNCH_VARIABLE, f"{job_id}.{restart}"),
                job_id=job_id,
                task=int(environment["SLURM_PROCID"]),
                # Of the step: in the batch shell the same name means the whole job.
                tasks=int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]),
                node=environment.get("SLURMD_NODENAME") or nodes[number],
                node_number=number,
                nodes=nodes,
                local_task=int(environment["SLURM_LOCALID"]),
            )
        except KeyError as error:
            raise ConfigError(
                f"{error.args[0]} is not set: this runs in the tasks of a SLURM job, started by "
                "srun; submit the run with `mixtron submit`"
            ) from None
