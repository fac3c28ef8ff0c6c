"""Layers recorded with what their ranks send each other: not a bit differs from plain ones."""

from functools import partial

import torch

from mixtron.megatron_ext.config import ParallelConfig
from tests.megatron_ext.test_gpu_layer_graphs import MIXERS
from tests.megatron_ext.test_layer_graphs import trained
from tests.multi_gpu.cases import Case, Differs, Options, Values
from tests.multi_gpu.groups import ranks_of

EXCHANGES = {
    exchange: f"{MIXERS['kla'][:-1]}, context_exchange: {exchange}}}"
    for exchange in ("relay", "state", "heads")
}
LAYOUTS = {
    "tp2 sp": ParallelConfig(tensor=2, sequence=True),
    "tp2": ParallelConfig(tensor=2, sequence=False),
    "cp2": ParallelConfig(context=2),
}
SUBJECTS = [
    ("tp2 sp", "kla, attention"),
    ("tp2", "kla, attention"),
    ("cp2", "relay"),
    ("cp2", "state, heads"),
    ("cp2", "attention, sd"),
    ("cp2", "gla, linear, mamba2"),
    ("tp2 sp", "gla, linear, mamba2, sd"),
    ("tp2 sp", "path, path_fox, fox, sa_swa"),
]


def cases(options: Options) -> list[Case]:
    if options.device == "cpu" or options.gpus != 2:
        return []
    return [
        Case(f"{pattern}: {layout}", partial(compare, pattern, LAYOUTS[layout]))
        for layout, pattern in SUBJECTS
    ]


def compare(pattern: str, parallel: ParallelConfig) -> Values:
    """Steps over packed documents of random lengths, on all ranks."""
    names = pattern.split(", ")
    mixers = ", ".join(f"{name}: {(MIXERS | EXCHANGES)[name]}" for name in names)
    # Each tensor rank has its own keys.
    mixers = mixers.replace("kv_heads: 1", f"kv_heads: {parallel.tensor}")
    overrides = [
        *(f"mixers={{{mixers}}}", f"model.pattern=[{pattern}]"),
        *(f"model.layers={max(2, len(names))}", "model.hidden_size=64"),
        *("training.precision=bf16", "data.sequence_length=512"),
        *(f"parallel.{key}={getattr(parallel, key)}" for key in ("tensor", "context")),
        f"parallel.sequence={str(parallel.sequence).lower()}",
    ]
    ranks = ranks_of(parallel)
    plain, weights = trained("debug_kla", overrides, ranks=ranks)
    recorded, found = trained("debug_kla", overrides, True, ranks=ranks)
    if recorded != plain:
        raise Differs(f"recorded {recorded}, plain {plain}")
    if not all(map(torch.equal, found, weights)):
        raise Differs("the weights differ")
    return {"loss": plain[-1]["train/loss"]}
