"""KLA over context ranks: steps by each exchange, and each exchange alone."""

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
from mixtron.megatron_ext.parallel import init_distributed
from mixtron.megatron_ext.state_relay import StateRelay
from tests.multi_gpu import models
from tests.multi_gpu.cases import Case, Options, Values
from tests.multi_gpu.groups import ranks_of
from tests.multi_gpu.scaling import configuration, run

EXCHANGES = ("relay", "state", "heads")


def cases(options: Options) -> list[Case]:
    debug = options.device == "cpu"
    parallel = ParallelConfig(context=options.gpus)
    found, alone = [], []
    for tokens in models.DEBUG_LENGTHS if debug else models.LENGTHS:
        *recorded, plain = models.long_kla(tokens, 1, debug)
        for exchange in EXCHANGES:
            override = f"mixers.kla.context_exchange={exchange}"
            layout = f"cp{options.gpus} by {exchange}"
            for model in (*recorded, plain):
                config = configuration(model, parallel, 1, override)
                name = f"{model.name}: {layout}"
                found.append(Case(name, partial(run, model.name, layout, config, options.gpus)))
            config = configuration(plain, parallel, 1, override)
            alone.append(Case(f"{plain.name}: {layout}, alone", partial(exchange_alone, config)))
    layout = f"cp{options.gpus}"
    for model in models.long_others(1, debug):
        config = configuration(model, parallel, 1)
        measured = partial(run, model.name, layout, config, options.gpus)
        found.append(Case(f"{model.name}: {layout}", measured))
    return [*found, *alone]


def exchange_alone(config: RunConfig) -> Values:
    """Milliseconds of what one layer exchanges forward and backward, with nothing beside it."""
    device, mixer = init_distributed(), config.mixers["kla"]
    assert isinstance(mixer, KLA)
    ranks = ranks_of(config.parallel)
    tokens = config.data.sequence_length // ranks.context_size
    J, K, V = mixer.value_heads, mixer.key_dim, mixer.value_dim
    group = ranks.groups.cp

    def random(*shape: int, dtype=torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    def rows(*shape: int, dtype=torch.bfloat16) -> Tensor:
        return random(tokens, *shape, dtype=dtype)

    tail = rows(1, sum(mixer.convolved().values()))
    starts = torch.tensor(False, device=device)
    match mixer.context_exchange:
        case "state":
            maps = [random(1, J, K, width, dtype=torch.float32) for width in (K, V)]
            inputs = [tail, *maps]

            def forward() -> list[Tensor]:
                return [state_before(*maps, starts, group)]

        case "relay":
            relay, state = StateRelay(group), random(1, J, K, V, dtype=torch.float32)
            q, v = random(1, 1, mixer.heads, K), random(1, 1, J, V)
            inputs = [tail, q, v, state]

            def forward() -> list[Tensor]:
                before = relay.receive(q, v, starts, {})
                last = state if before is None else state + before
                return [relay.send(v, last), last]

        case "heads":
            exchanged = [*(rows(mixer.heads, K) for _ in range(2)), rows(J, V)]
            exchanged += [rows(J, 1, dtype=torch.float32) for _ in range(2)]
            inputs = [tail, *exchanged]

            def forward() -> list[Tensor]:
                *sent, v, decay, eta = (sequence_to_heads(x, group) for x in exchanged)
                return [*sent, heads_to_sequence(v, group), decay, eta]

    def both() -> None:
        outputs = [rows_before(tail, mixer.conv_width - 1, group), *forward()]
        grads = [torch.ones_like(x) for x in outputs]
        torch.autograd.grad(outputs, inputs, grads, allow_unused=True)

    if device.type == "cpu":
        both()
        return {"tokens": tokens}
    milliseconds = time_ms(both)
    return {
        "ms a layer": milliseconds,
        "ms in all layers": milliseconds * config.model.layers,
        "tokens": tokens,
    }
