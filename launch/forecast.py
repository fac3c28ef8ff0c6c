"""Speed on many nodes, forecast from one GPU's measured speed and the bytes that a step sends.

    python -m mixtron.launch.forecast --gpus 64 --gpus 256 --gpus 1024 \\
        configs/kla_400m.yaml=180000 configs/attention_400m.yaml=200000

prints a Markdown table; a number behind a config is its tokens/s on one GPU. What is assumed is in
`Cluster` and in `forecast`; launch/README.md has a table and says what it rests on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mixtron.launch.checks import check
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.memory import stage_parameters
from mixtron.launch.traffic import bytes_sent_per_step, ring


@dataclass(frozen=True)
class Cluster:
    """Nodes of eight GPUs, each with a network card of its own."""

    network_gbit: float = 400.0
    """Of a GPU's card, in each direction."""
    network_share: float = 0.8
    """Of that, what NCCL's large collectives reach."""
    nvlink_gbyte: float = 450.0
    """Of a GPU inside a node, in each direction."""
    nvlink_share: float = 0.8
    hop_us: float = 8.0
    """From a rank to the next in a ring that leaves the node."""
    gpus_per_node: int = 8

    def seconds(self, sent: float, ranks: int, in_node: bool) -> float:
        """A ring collective in which each rank sends so many bytes."""
        if in_node:
            return sent / (self.nvlink_gbyte * 1e9 * self.nvlink_share)
        rate = self.network_gbit / 8 * 1e9 * self.network_share
        # A ring passes through all GPUs of a node before it leaves it.
        return sent / rate + (ranks - 1) / self.gpus_per_node * self.hop_us * 1e-6


@dataclass(frozen=True)
class Forecast:
    """Of one optimizer step."""

    gpus: int
    tokens: int
    compute_s: float
    sent_s: dict[str, float]
    """Communication by kind, hidden or not."""
    exposed_s: dict[str, float]

    @property
    def step_s(self) -> float:
        return self.compute_s + sum(self.exposed_s.values())

    @property
    def efficiency(self) -> float:
        """Of as many GPUs that need not communicate."""
        return self.compute_s / self.step_s


def forecast(config: RunConfig, gpus: int, tokens_per_s: float, cluster: Cluster) -> Forecast:
    """A step on so many GPUs.

    Computing takes what one GPU alone needs for its share of the tokens, times the pipeline's
    bubble. Tensor and context ranks lie inside a node, pipeline and data ranks on several. Data
    ranks reduce gradients beside the last micro-batch's backward (two thirds of its time) and
    gather weights beside the first one's forward (a third), but for the last bucket of the former
    and the first of the latter; each bucket is one collective. Other kinds are not hidden.

    Raises:
        ConfigError: the config does not fit the GPUs.
    """
    check(config, gpus)
    parallel, tokens = config.parallel, config.training.global_batch_tokens
    replicas = gpus // (parallel.tensor * parallel.pipeline)
    micro_batches = config.global_batch_sequences // (
        gpus // parallel.model_ranks * config.training.micro_batch_sequences
    )
    work_s = tokens / tokens_per_s / gpus
    bubble = (parallel.pipeline - 1) / parallel.virtual_pipeline / micro_batches
    sent = bytes_sent_per_step(config, gpus)
    sent_s = {
        kind: cluster.seconds(count, 1, in_node=kind in ("tensor", "context"))
        for kind, count in sent.items()
        if kind != "data"
    }
    exposed_s = dict(sent_s)
    if "data" in sent:
        in_node = gpus <= cluster.gpus_per_node
        buckets = max(1, int(stage_parameters(config, 0)) // parallel.bucket_parameters)
        held = stage_parameters(config, 0) * ring(replicas) / buckets
        micro_s = work_s / micro_batches
        reduce_s = cluster.seconds(4 * held, replicas, in_node)
        gather_s = cluster.seconds(2 * held, replicas, in_node)
        sent_s["data"] = buckets * (reduce_s + gather_s)
        exposed_s["data"] = sum(
            each + max((buckets - 1) * each - share * micro_s, 0.0)
            for each, share in ((reduce_s, 2 / 3), (gather_s, 1 / 3))
        )
    return Forecast(gpus, tokens, work_s * (1 + bubble), sent_s, exposed_s)


def with_tokens_per_gpu(config: RunConfig, gpus: int, tokens: int) -> RunConfig:
    training = config.training.model_copy(update={"global_batch_tokens": gpus * tokens})
    return config.model_copy(update={"training": training})


def rows(config: RunConfig, gpus: list[int], tokens: int, rate: float, cluster: Cluster) -> list:
    found = []
    for count in gpus:
        f = forecast(with_tokens_per_gpu(config, count, tokens), count, rate, cluster)
        found.append(
            f"| {config.name} | {count:,} | {f.tokens / 1e6:,.1f} M | {f.compute_s:.3f} "
            f"| {sum(f.sent_s.values()):.3f} | {sum(f.exposed_s.values()):.3f} "
            f"| {f.tokens / f.step_s / 1e6:,.2f} M | {f.efficiency:.1%} |"
        )
    return found


HEAD = (
    "| model | GPUs | tokens a step | computing, s | sending, s | of it exposed, s | tokens/s "
    "| efficiency |\n|---|---|---|---|---|---|---|---|"
)


def main(
    measured: Annotated[list[str], typer.Argument(help="CONFIG=TOKENS_PER_S of one GPU.")],
    gpus: Annotated[list[int] | None, typer.Option(help="Default: 64, 256 and 1024.")] = None,
    tokens_per_gpu: Annotated[int, typer.Option(help="In each step.")] = 65_536,
    network_gbit: float = Cluster.network_gbit,
    network_share: float = Cluster.network_share,
    speed_ratio: Annotated[
        float, typer.Option(help="Of a GPU there to the one measured here.")
    ] = 1.0,
) -> None:
    """Print the forecast as a Markdown table."""
    cluster = Cluster(network_gbit=network_gbit, network_share=network_share)
    print(HEAD)
    for each in measured:
        path, rate = each.rsplit("=", 1)
        config = load_config(Path(path))
        rate = float(rate) * speed_ratio
        print("\n".join(rows(config, gpus or [64, 256, 1024], tokens_per_gpu, rate, cluster)))


if __name__ == "__main__":
    typer.run(main)
