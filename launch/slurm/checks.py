"""Refusals of what no cluster could run, before anything is submitted."""

from mixtron.launch.checks import check
from mixtron.launch.config import RunConfig
from mixtron.launch.data import open_data
from mixtron.launch.slurm import queue
from mixtron.launch.slurm.config import SlurmConfig
from mixtron.launch.validate import check_disk
from mixtron.megatron_ext.errors import ConfigError


def check_job(config: RunConfig) -> SlurmConfig:
    """Everything that `mixtron validate` refuses, and the shape of the job.

    Raises:
        ConfigError, DataError: one line each.
    """
    slurm = config.slurm
    if slurm is None:
        raise ConfigError("slurm: the section is missing; add it, or choose a --cluster profile")
    check(config, slurm.ranks)
    limit = queue.partition_limit(slurm.partition)
    if queue.seconds_of(slurm.time_limit) > queue.seconds_of(limit):
        raise ConfigError(
            f"slurm.time_limit={slurm.time_limit} is above the limit of partition "
            f"{slurm.partition or '(default)'}, {limit}; lower it: the run is requeued, "
            "and resumes, until it is finished"
        )
    if slurm.signal_lead_s >= queue.seconds_of(slurm.time_limit):
        raise ConfigError(
            f"slurm.signal_lead_s={slurm.signal_lead_s} is not below "
            f"slurm.time_limit={slurm.time_limit}"
        )
    open_data(config)
    check_disk(config)
    return slurm
