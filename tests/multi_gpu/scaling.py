"""Speed on all GPUs, data-parallel and in tensor-parallel pairs, and what is sent: predicted and
seen."""

import traceback
from dataclasses import replace
from functools import partial

from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.traffic import bytes_sent_per_step
from mixtron.megatron_ext.config import ParallelConfig
from tests.contract.cases import CONFIGS
from tests.launch.counted_traffic import SentBytes
from tests.multi_gpu import models
from tests.multi_gpu.bench import Bench, build, measure, profile
from tests.multi_gpu.cases import Case, Options, Values
from tests.multi_gpu.models import Measured

PROFILED_S = 4.0
"""Longer steps, of mixers without a GPU kernel, make traces that take minutes to read."""
TP2_SP = ParallelConfig(tensor=2, sequence=True)


def cases(options: Options) -> list[Case]:
    if options.device == "cpu":
        return [dp(m, options) for m in models.DEBUG] + [tp(m, options) for m in models.DEBUG]
    return [
        *(dp(model, options) for model in models.DATA_PARALLEL),
        *(tp(model, options) for model in (*models.LARGE_RECORDED, *models.LARGE)),
        *(dp(model, options) for model in (*models.LARGE_RECORDED, *models.LARGE)),
        *(tp(model, options) for model in models.SMALL),
    ]


def dp(model: Measured, options: Options) -> Case:
    return case(model, f"dp{options.gpus}", ParallelConfig(), options.gpus)


def tp(model: Measured, options: Options) -> Case:
    # Twice the sequences at a time for two ranks: each keeps half as much of them.
    model = replace(model, micro_batch=2 * model.micro_batch)
    pairs = options.gpus // 2
    layout = "tp2 sp" if pairs == 1 else f"tp2 sp x dp{pairs}"
    return case(model, layout, TP2_SP, options.gpus)


def case(model: Measured, layout: str, parallel: ParallelConfig, ranks: int) -> Case:
    config = configuration(model, parallel, ranks)
    return Case(f"{model.name}: {layout}", partial(run, model.name, layout, config, ranks))


def configuration(
    model: Measured, parallel: ParallelConfig, ranks: int, *overrides: str
) -> RunConfig:
    """In bf16, with as many tokens for each of the ranks whatever the layout is."""
    path = CONFIGS / f"{model.config}.yaml"
    config = load_config(path, [*model.overrides, *overrides, "training.precision=bf16"])
    tokens = ranks // parallel.tensor * model.sequences * config.data.sequence_length
    training = {"micro_batch_sequences": model.micro_batch, "global_batch_tokens": tokens}
    return config.model_copy(
        update={
            "parallel": parallel,
            "training": config.training.model_copy(update=training),
        }
    )


def run(model: str, layout: str, config: RunConfig, ranks: int) -> Values:
    """Measures the model, and what a step sends if there is somebody to send to."""
    bench, parallel = build(config), config.parallel
    speed = measure(bench)
    values: Values = {
        "model": model,
        "layout": layout,
        "sequence": config.data.sequence_length,
        "ranks": ranks,
        "step s": speed["speed/step_s"],
        "tokens/s": speed["speed/tokens_per_s"],
        "MFU": speed.get("speed/mfu"),
        "peak GiB": speed["memory/peak_gib"],
    }
    try:
        if bench.ranks.device.type == "cuda" and speed["speed/step_s"] < PROFILED_S:
            add_profile(values, bench)
        # What is recorded no call and no trace has sizes of.
        recorded = config.training.layer_graphs and parallel.tensor * parallel.context > 1
        if ranks > 1 and not recorded:
            values["predicted bytes"] = bytes_sent_per_step(config, ranks)
            with SentBytes() as sent:
                bench.step()
            values["counted bytes"] = sent.by_kind
    except Exception:
        values["error"] = traceback.format_exc()  # the case fails, and its speed is known
    return values


def add_profile(values: Values, bench: Bench) -> None:
    seen = profile(bench)
    values["profiled bytes"] = seen.sent_bytes
    values["NCCL s"], values["exposed s"] = seen.seconds, seen.exposed_s
    values["computing s"], values["kernels without sizes"] = seen.computing_s, seen.unsized
    values["kernels s"] = seen.kernels_s
