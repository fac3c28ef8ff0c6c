"""Compiles what the other parts launch, while other processes compile as well: nothing is timed."""

import os
from dataclasses import replace
from functools import partial

from mixtron.megatron_ext.config import ParallelConfig
from tests.multi_gpu import alone, parity
from tests.multi_gpu.bench import build
from tests.multi_gpu.cases import Case, Options, Values
from tests.multi_gpu.models import Measured
from tests.multi_gpu.scaling import configuration
from tests.multi_gpu.subjects import subjects


def cases(options: Options) -> list[Case]:
    return [
        *(
            Case(f"step: {', '.join(m.name for m in some)}", partial(step, some), alone=True)
            for some in alone.in_turns(alone.measured(options), options.gpus)
        ),
        Case("parity's kernels on half of the heads", partial(halves, options), alone=True),
    ]


def step(some: list[Measured]) -> Values:
    """Of a layer of this rank's model."""
    rank = int(os.environ["RANK"])
    if rank < len(some):
        config = configuration(some[rank], ParallelConfig(), 1, "model.layers=1")
        build(config).step()
    return {}


def halves(options: Options) -> Values:
    """As tensor-parallel ranks have them; each rank another subject's."""
    named = [(n, s) for n, s in subjects(options).items() if n.endswith("triton")]
    rank = int(os.environ["RANK"])
    layout = parity.spread("one rank", ParallelConfig(), 1)
    for _, subject in named[rank :: options.gpus]:
        halved = tuple(o.replace("heads=4", "heads=2") for o in subject.overrides)
        parity.train(replace(subject, overrides=halved), layout, bf16=True)
    return {}
