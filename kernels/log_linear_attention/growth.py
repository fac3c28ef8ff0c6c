"""Draws what `bench --growth` prints: time a token over the sequence length, as many tokens in all.

python -m mixtron.kernels.log_linear_attention.bench --growth > growth.md
python -m mixtron.kernels.log_linear_attention.growth growth.md \
    kernels/log_linear_attention/growth.png
"""

import math
import sys
from pathlib import Path


def draw(printed: Path, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.6), layout="constrained")
    for name, points in per_token_ns(printed.read_text()).items():
        lengths, times_ns = zip(*points, strict=True)
        (line,) = axes.plot(lengths, times_ns, marker="o", markersize=3, label=name)
        if name != "one state":
            # T log T in all is log T a token.
            grown_ns = [times_ns[0] * math.log(T) / math.log(lengths[0]) for T in lengths]
            axes.plot(
                lengths, grown_ns, ":", color=line.get_color(), label="T log T from its first"
            )
    axes.set(xscale="log", xlabel="tokens of a sequence", ylabel="forward + backward, ns a token")
    axes.set_ylim(bottom=0)
    axes.set_title("H 16, K 128, V 64", fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def per_token_ns(printed: str) -> dict[str, list[tuple[int, float]]]:
    """Of each op, by the tokens of a sequence."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if " x " not in cells[0] or not cells[0][0].isdigit():
            continue
        B, T, _ = (int(x) for x in cells[0].split(" x "))
        points.setdefault(cells[1], []).append((T, 1e6 * float(cells[3]) / (B * T)))
    return points


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
