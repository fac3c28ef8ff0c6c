"""Compiles what the other parts launch, while other processes compile as well: nothing is timed."""

import os
from functools import partial

from mixtron.megatron_ext.config import ParallelConfig
from tests.multi_gpu import alone
from tests.multi_gpu.bench import build
from tests.multi_gpu.cases import Case, Options, Values
from tests.multi_gpu.models import Measured
from tests.multi_gpu.scaling import configuration


def cases(options: Options) -> list[Case]:
    return [
        Case(", ".join(model.name for model in some), partial(step, some), alone=True)
        for some in alone.in_turns(alone.measured(options), options.gpus)
    ]


def step(some: list[Measured]) -> Values:
    """Of a layer of this rank's model."""
    rank = int(os.environ["RANK"])
    if rank < len(some):
        config = configuration(some[rank], ParallelConfig(), 1, "model.layers=1")
        build(config).step()
    return {}
