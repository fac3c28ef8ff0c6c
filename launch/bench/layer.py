"""Times one layer of a config, forward and backward, for several values of one key:

    python -m mixtron.launch.bench.layer configs/log_linear_400m.yaml \\
        mixers.log_linear.lambda mlp_softplus linear fixed [--set key=value ...]

So `mlp_softplus` beside `linear` says what the network of lambda costs, and beside `fixed` what it
costs with the projection that feeds it.
"""

import argparse
import statistics
from typing import Any

import torch

from mixtron.kernels.measure import table, time_ms, versions
from mixtron.launch.checks import check_device
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.train import quiet_libraries
from mixtron.megatron_ext.batch import make_batch
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel

ROUNDS = 5
"""Each value once a round, so that a drifting clock meets all alike."""


def layer_step(config: RunConfig, ranks: Ranks):
    """A call that runs the first layer forward and backward on a micro-batch of random states."""
    count, length = config.training.micro_batch_sequences, config.data.sequence_length
    (chunk,) = build_model(
        config.model.model_copy(update={"layers": 1}),
        config.mixers,
        config.parallel,
        ranks,
        seed=config.training.seed,
        bf16=config.training.precision == "bf16",
        max_tokens=count * length,
    )
    layer: Any = chunk.decoder.layers[0]
    batch = make_batch([length] * count, step=0, device=ranks.device)
    shape = (count * length, 1, config.model.hidden_size)
    dtype = next(layer.mlp.parameters()).dtype
    hidden_TBD = torch.randn(shape, device=ranks.device, dtype=dtype, requires_grad=True)
    grad_TBD = torch.randn_like(hidden_TBD)
    inputs = [hidden_TBD, *layer.parameters()]

    def step() -> None:
        out_TBD, _ = layer(hidden_TBD, attention_mask=None, packed_seq_params=batch)
        torch.autograd.grad(out_TBD, inputs, grad_TBD)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("key")
    parser.add_argument("values", nargs="+")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    quiet_libraries()
    device = init_distributed()
    ranks = init_model_parallel(1, 1, 1, 1, seed=1, device=device)
    steps = {}
    for value in options.values:
        config = load_config(options.config, [*options.set, f"{options.key}={value}"])
        check_device(config, device.type)
        steps[value] = layer_step(config, ranks)
    times_ms = {value: [] for value in steps}
    for _ in range(ROUNDS):
        for value, step in steps.items():
            times_ms[value].append(time_ms(step, warm_up=2, repeats=5))
    median_ms = {value: statistics.median(times) for value, times in times_ms.items()}
    rows = [
        (value, ms, f"{100 * (median_ms[options.values[0]] / ms - 1):+.1f} %")
        for value, ms in median_ms.items()
    ]
    print(versions())
    print(table((options.key, "layer, forward + backward, ms", "the first against it"), rows))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
