"""What a person reads at the end."""

from mixtron.kernels.measure import table
from tests.multi_gpu.cases import Outcome, Values

MIB = 2**20
NEGLIGIBLE = 2**14
"""Bytes: losses, norms and flags that ranks agree on."""


def report(outcomes: list[Outcome]) -> str:
    """Measurements as Markdown tables, then every case, then what failed."""
    cases = [
        [o.part, o.case, "passed" if o.passed else "FAILED", o.seconds, summary(o)]
        for o in outcomes
    ]
    parts = [
        *measurements([v for o in outcomes for v in speeds(o)]),
        table(["part", "case", "outcome", "seconds", "found"], cases),
        *(f"--- {o.part}: {o.case}\n{o.error}" for o in outcomes if not o.passed),
        f"{sum(o.passed for o in outcomes)} of {len(outcomes)} cases passed",
    ]
    return "\n\n".join(parts)


def speeds(outcome: Outcome) -> list[Values]:
    """Of a world of all ranks, which are as fast as the slowest; or of each rank's own."""
    found = [values for values in outcome.values if "tokens/s" in values]
    return found if found and found[0]["ranks"] == 1 else found[:1]


def summary(outcome: Outcome) -> str:
    """What rank 0 says of a case that checks something; speeds have tables of their own."""
    values = outcome.values[0] if outcome.values else {}
    if speeds(outcome):
        return ""
    return ", ".join(f"{key}: {value}" for key, value in values.items())


def measurements(measured: list[Values]) -> list[str]:
    if not measured:
        return []
    alone = {m["model"]: m["tokens/s"] for m in measured if m["ranks"] == 1}
    return [
        table(SPEED_HEAD, [speed_row(m, alone) for m in measured]),
        traffic_table(measured),
        *(kernels(m) for m in measured if "kernels s" in m),
    ]


def kernels(m: Values) -> str:
    named = (f"{1e3 * s:.1f} {name}" for name, s in m["kernels s"].items())
    return f"{m['model']}, {m['layout']}, kernels in ms: {'; '.join(named)}"


SPEED_HEAD = (
    *("model", "layout", "GPUs", "step ms", "tokens/s", "of perfect", "MFU", "peak GiB"),
    *("GPU computes ms", "NCCL ms", "of it exposed ms"),
)


def speed_row(m: Values, alone: dict) -> list[object]:
    """Perfect is as many times one GPU's tokens/s; the GPU's times are those of a profiled step."""
    perfect = alone.get(m["model"], 0.0) * m["ranks"]
    return [
        m["model"],
        m["layout"],
        m["ranks"],
        1e3 * m["step s"],
        f"{m['tokens/s']:,.0f}",
        f"{m['tokens/s'] / perfect:.1%}" if perfect else "",
        f"{m['MFU']:.1%}" if m["MFU"] else "",
        m["peak GiB"],
        1e3 * m["computing s"] if "computing s" in m else "",
        milliseconds(m.get("NCCL s")),
        milliseconds(m.get("exposed s")),
    ]


def milliseconds(seconds: dict | None) -> str:
    if seconds is None:
        return ""
    return ", ".join(f"{kind} {1e3 * value:.1f}" for kind, value in sorted(seconds.items()))


def traffic_table(measured: list[Values]) -> str:
    """MiB that rank 0 sends in a step: as `mixtron validate` says, as the calls had it, as the
    profiler saw it."""
    ways = ("predicted bytes", "counted bytes", "profiled bytes")
    rows = []
    for m in measured:
        sizes = [m.get(way, {}) for way in ways]
        for kind in sorted({k for by_kind in sizes for k, v in by_kind.items() if v > NEGLIGIBLE}):
            found = [m[way].get(kind, 0.0) / MIB if way in m else "" for way in ways]
            rows.append(
                [m["model"], m["layout"], kind, *found, m.get("kernels without sizes") or ""]
            )
    heads = ("model", "layout", "kind", "predicted MiB", "calls MiB", "profiler MiB", "unsized")
    return table(heads, rows)
