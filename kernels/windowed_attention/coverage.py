"""How far a token sees through some layers, measured on the masks; draws coverage.png.

python -m mixtron.kernels.windowed_attention.coverage kernels/windowed_attention/coverage.png
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.windowed_attention.permutation import document_permutation
from mixtron.kernels.windowed_attention.window import WindowSide, window_reach


def random_order(tokens: int, layer: int, seed: int = 0) -> Tensor:
    """The order that one document gets in a layer."""
    return document_permutation(torch.tensor([0, tokens]), tokens, seed=seed, step=0, layer=layer)


def receptive_field(
    orders: Sequence[Tensor],
    token: int,
    *,
    window: int,
    window_side: WindowSide,
    causal: bool,
    plain_window: bool = False,
) -> Tensor:
    """[L, T] bool: the tokens that reach `token`'s output through 1, 2, ... L layers.

    Args:
        orders: each layer's permutation [T], from the last layer on.
        plain_window: every layer also has the one-sided window of the plain order (SA+SWA).
    """
    reached_T = torch.zeros(len(orders[0]), dtype=torch.bool)
    reached_T[token] = True
    layers = []
    for order_T in orders:
        seen_T = _attended(reached_T, order_T, window, window_side, causal)
        if plain_window:
            plain_T = torch.arange(len(order_T))
            seen_T = seen_T | _attended(reached_T, plain_T, window, "one", causal)
        reached_T = seen_T
        layers.append(reached_T)
    return torch.stack(layers)


def _attended(
    by_T: Tensor, order_T: Tensor, window: int, window_side: WindowSide, causal: bool
) -> Tensor:
    """[T] bool: the tokens that any of the tokens in `by_T` attends."""
    before, after = window_reach(window, window_side)
    # The latest attending token among the slots that see a slot; fp32 holds 2^24 tokens exactly.
    latest_S = torch.where(by_T[order_T], order_T, -1).float()
    padded_1S = F.pad(latest_S[None], (after, before), value=-1.0)
    latest_S = F.max_pool1d(padded_1S, before + after + 1, stride=1)[0]
    attended_T = torch.empty_like(by_T)
    attended_T[order_T] = latest_S >= (order_T if causal else 0)
    return attended_T


def expected_coverage(tokens: int, window: int, layers: int) -> list[float]:
    """Of independent random windows without a mask: c' = 1 - (1 - c)^w from c = 1/n."""
    covered, result = 1 / tokens, []
    for _ in range(layers):
        covered = 1 - (1 - covered) ** window
        result.append(covered)
    return result


def draw(path: Path, tokens: int = 65536, window: int = 256, layers: int = 10) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    plain = [torch.arange(tokens)] * layers
    random = [random_order(tokens, layer) for layer in range(1, layers + 1)]
    two = {"window": window, "window_side": "two"}
    last = tokens - 1
    lines = {
        "SA, no mask": receptive_field(random, last, **two, causal=False),
        "SA, causal": receptive_field(random, last, **two, causal=True),
        "SA+SWA, causal": receptive_field(random, last, **two, causal=True, plain_window=True),
        "SWA": receptive_field(plain, last, window=window, window_side="one", causal=True),
    }
    depth = range(1, layers + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, reached_LT in lines.items():
        coverage_L = reached_LT.float().mean(1)
        left.plot(depth, coverage_L, marker="o", markersize=3, label=name)
        print(name, [f"{x:.3f}" for x in coverage_L.tolist()])
    left.plot(depth, expected_coverage(tokens, window, layers), "k:", label="1 - (1 - c)^w")
    left.set(xlabel="layers", ylabel="share of the tokens that reach the last", ylim=(0, 1.05))
    edges = [2**i for i in range(17)]
    for name in ("SA, causal", "SA+SWA, causal"):
        for count in (2, 3, layers):
            near_T = lines[name][count - 1].flip(0).float()
            shares = [float(near_T[a:b].mean()) for a, b in pairwise(edges)]
            dashed = ":" if name == "SA, causal" else "-"
            label = f"{name}, {count} layers"
            right.plot(edges[:-1], shares, dashed, marker=".", color=f"C{count}", label=label)
        nearest = float(lines[name][-1].flip(0)[1:257].float().mean())
        print(f"{name}: of the nearest 256, after {layers} layers {nearest:.3f}")
    right.set(xscale="log", xlabel="distance from the last token", ylabel="share that reaches it")
    for axes in (left, right):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.suptitle(f"n = {tokens}, w = {window}")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
