"""KLA over context ranks: steps by exchange of states and of heads, and each exchange alone."""

from functools import partial

import torch
from torch import Tensor

from mixtron.kernels.measure import time_ms
from mixtron.launch.config import RunConfig
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.context_parallel import (
    heads_to_sequence,
    rows_before,
    sequence_to_heads,
    state_before,
)
from mixtron.megatron_ext.mixers.kla.config import Config as KLA
from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel
from tests.multi_gpu.cases import Case, Options, Values
from tests.multi_gpu.scaling import configuration, run

MIXER = "kla"


def cases(options: Options) -> list[Case]:
    cuda = options.device == "cuda"
    model = "kla_400m" if cuda else "debug_kla"
    found = []
    for tokens in (32_768, 131_072) if cuda else (128, 256):
        config = long(model, tokens, ParallelConfig(), "state")
        label = f"{model} of {tokens:,} tokens"
        found.append(
            Case(f"{label}: one GPU", partial(run, label, "one GPU", config, 1), alone=True)
        )
        for exchange in ("state", "heads"):
            config = long(model, tokens, ParallelConfig(context=options.gpus), exchange)
            layout = f"cp{options.gpus} by {exchange}"
            found += [
                Case(f"{label}: {layout}", partial(run, label, layout, config, options.gpus)),
                Case(f"{label}: {layout}, alone", partial(exchange_alone, config, exchange)),
            ]
    return found


def long(model: str, tokens: int, parallel: ParallelConfig, exchange: str) -> RunConfig:
    """One sequence of so many tokens; every layer recomputed, or one GPU could not hold it."""
    return configuration(
        model,
        parallel,
        ranks=1,
        micro_batch=1,
        micro_batches=1,
        overrides=(
            f"data.sequence_length={tokens}",
            f"mixers.{MIXER}.context_exchange={exchange}",
            "training.recompute=full",
        ),
    )


def exchange_alone(config: RunConfig, exchange: str) -> Values:
    """Milliseconds of what one layer exchanges forward and backward, with nothing beside it."""
    device, mixer = init_distributed(), config.mixers[MIXER]
    assert isinstance(mixer, KLA)
    ranks = init_model_parallel(context=config.parallel.context, seed=1, device=device)
    tokens = config.data.sequence_length // ranks.context_size

    def random(*shape: int, dtype=torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    J, K, V = mixer.value_heads, mixer.key_dim, mixer.value_dim
    tail = random(tokens, 1, sum(mixer.convolved().values()))
    inputs, group = [tail], ranks.groups.cp
    if exchange == "state":
        inputs += [random(1, J, K, K, dtype=torch.float32), random(1, J, K, V, dtype=torch.float32)]
        starts = torch.tensor(False, device=device)

        def forward() -> list[Tensor]:
            return [state_before(*inputs[1:], starts, group)]
    else:
        inputs += [random(tokens, mixer.heads, K) for _ in range(2)] + [random(tokens, J, V)]
        inputs += [random(tokens, J, 1, dtype=torch.float32) for _ in range(2)]

        def forward() -> list[Tensor]:
            *sent, v, decay, eta = (sequence_to_heads(x, group) for x in inputs[1:])
            return [*sent, heads_to_sequence(v, group), decay, eta]

    def both() -> None:
        outputs = [rows_before(tail, mixer.conv_width - 1, group), *forward()]
        torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])

    if device.type == "cpu":
        both()
        return {"tokens": tokens}
    milliseconds = time_ms(both)
    return {
        "ms a layer": milliseconds,
        "ms in all layers": milliseconds * config.model.layers,
        "tokens": tokens,
    }
