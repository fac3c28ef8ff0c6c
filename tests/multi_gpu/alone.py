"""Speed on one GPU: each of several measures another model."""

import os
from functools import partial

from mixtron.megatron_ext.config import ParallelConfig
from tests.multi_gpu import models
from tests.multi_gpu.cases import Case, Options, Values
from tests.multi_gpu.models import Measured
from tests.multi_gpu.scaling import configuration, run


def cases(options: Options) -> list[Case]:
    return [
        Case(", ".join(model.name for model in some), partial(run_mine, some), alone=True)
        for some in in_turns(measured(options), options.gpus)
    ]


def measured(options: Options) -> list[Measured]:
    if options.device == "cpu":
        return [*models.DEBUG, *long(options)]
    large = [*models.LARGE, *models.LARGE_RECORDED]
    return [*models.DATA_PARALLEL, *large, *long(options)]


def long(options: Options) -> list[Measured]:
    """As many tokens as a context rank has."""
    debug = options.device == "cpu"
    lengths = models.DEBUG_LENGTHS if debug else models.LENGTHS
    gpus = options.gpus
    kla = [m for tokens in lengths for m in models.long_kla(tokens // gpus, gpus, debug)]
    return [*kla, *models.long_others(gpus, debug)]


def in_turns(all_models: list[Measured], gpus: int) -> list[list[Measured]]:
    return [all_models[i : i + gpus] for i in range(0, len(all_models), gpus)]


def run_mine(some: list[Measured], *overrides: str) -> Values:
    rank = int(os.environ["RANK"])
    if rank >= len(some):
        return {}
    model = some[rank]
    return run(
        model.name, "one GPU", configuration(model, ParallelConfig(), 1, *overrides), ranks=1
    )
