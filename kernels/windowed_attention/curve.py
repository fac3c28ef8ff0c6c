"""Draws what `bench --curve` prints: forward time over the sequence length at a constant window.

python -m mixtron.kernels.windowed_attention.bench --curve > curve.md
python -m mixtron.kernels.windowed_attention.curve curve.md kernels/windowed_attention/curve.png
"""

import sys
from pathlib import Path


def draw(printed: Path, path: Path) -> None:
    from matplotlib import pyplot

    lines = [line.strip("| ").split("|") for line in printed.read_text().splitlines()]
    rows = [[float(x) for x in line] for line in lines if line[0].strip().isdigit()]
    _, lengths, ours_ms, full_ms, _ = zip(*rows, strict=True)
    figure, axes = pyplot.subplots(figsize=(5, 3.6), layout="constrained")
    for name, times_ms in (("SA", ours_ms), ("full attention, SDPA FlashAttention-2", full_ms)):
        # Tokens in all are the same for all lengths up to 65,536.
        per_token_ns = [
            1e6 * ms / (count * T) for (count, T, *_), ms in zip(rows, times_ms, strict=True)
        ]
        axes.plot(lengths, per_token_ns, marker="o", markersize=3, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="forward, ns a token"
    )
    axes.set_title("H 16, K 64, window 256", fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
