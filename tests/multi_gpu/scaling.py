"""Speed of 0.4B models on one GPU and on all, and what they send: predicted and seen."""

from functools import partial

from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.traffic import bytes_sent_per_step
from mixtron.megatron_ext.config import ParallelConfig
from tests.contract.cases import CONFIGS
from tests.launch.counted_traffic import SentBytes
from tests.multi_gpu.bench import build, measure, profile
from tests.multi_gpu.cases import Case, Options, Values

MODELS = {"attention_400m": 4, "kla_400m": 4}
"""And the sequences of a micro-batch."""
DEBUG_MODELS = {"debug_softmax_attention": 1, "debug_kla": 1}
MICRO_BATCHES = 2
"""For each GPU."""
PROFILED_S = 4.0
"""Longer steps, of mixers without a GPU kernel, make traces that take minutes to read."""
TP2_SP = ParallelConfig(tensor=2, sequence=True)


def cases(options: Options) -> list[Case]:
    models = MODELS if options.device == "cuda" else DEBUG_MODELS
    return [case for model, size in models.items() for case in cases_of(model, options, size)]


def cases_of(
    model: str,
    options: Options,
    micro_batch: int,
    overrides: tuple[str, ...] = (),
    name: str = "",
) -> list[Case]:
    """On one GPU, data-parallel on all, and in tensor-parallel pairs."""
    name = name or model

    def case(layout: str, parallel: ParallelConfig, alone: bool = False) -> Case:
        ranks = 1 if alone else options.gpus
        config = configuration(model, parallel, ranks, micro_batch, overrides)
        return Case(f"{name}: {layout}", partial(run, name, layout, config, ranks), alone)

    pairs = options.gpus // 2
    return [
        case("one GPU", ParallelConfig(), alone=True),
        case(f"dp{options.gpus}", ParallelConfig()),
        case("tp2 sp" if pairs == 1 else f"tp2 sp x dp{pairs}", TP2_SP),
    ]


def configuration(
    model: str,
    parallel: ParallelConfig,
    ranks: int,
    micro_batch: int,
    overrides: tuple[str, ...] = (),
    micro_batches: int = MICRO_BATCHES,
) -> RunConfig:
    """The model's, in bf16, with as many tokens for each of the ranks whatever the layout is."""
    config = load_config(CONFIGS / f"{model}.yaml", [*overrides, "training.precision=bf16"])
    tokens = ranks * micro_batches * micro_batch * config.data.sequence_length
    training = {"micro_batch_sequences": micro_batch, "global_batch_tokens": tokens}
    return config.model_copy(
        update={
            "parallel": parallel,
            "training": config.training.model_copy(update=training),
        }
    )


def run(model: str, layout: str, config: RunConfig, ranks: int) -> Values:
    """Measures the model, and what a step sends if there is somebody to send to."""
    bench = build(config)
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
    if ranks > 1:
        values["predicted bytes"] = bytes_sent_per_step(config, ranks)
        with SentBytes() as sent:
            bench.step()
        values["counted bytes"] = sent.by_kind
    if bench.ranks.device.type == "cuda" and speed["speed/step_s"] < PROFILED_S:
        seen = profile(bench)
        values["profiled bytes"] = seen.sent_bytes
        values["NCCL s"], values["exposed s"] = seen.seconds, seen.exposed_s
        values["computing s"], values["kernels without sizes"] = seen.computing_s, seen.unsized
    return values
