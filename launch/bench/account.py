"""An account of a step: what keeps it from the GPU's peak, part by part."""

from mixtron.kernels.measure import table
from mixtron.launch.config import RunConfig
from mixtron.launch.estimate import forward_flops_per_token

PRODUCTS, MIXERS, IDLE = "matrix products", "mixers' sequence part", "no kernel runs"
MIXER_KINDS = {"attention"} | {
    f"own: {op}"
    for op in (
        "delta_rule",
        "gated_linear_attention",
        "linear_attention",
        "log_linear_attention",
        "path_attention",
        "sd_attention",
        "softmax_attention",
        "windowed_attention",
    )
}


def account(
    config: RunConfig, kinds_ms: dict[str, float], step_ms: float, ranks: int, peak_flops: float
) -> str:
    """Each part's share of a step, less what its share of the model's FLOPs takes at the peak.

    What is lost adds up to 100 % less the MFU.

    Args:
        kinds_ms: of a rank's kernels, ms a step by kind (`profile.kind_of`).
        step_ms: without the profiler.
        peak_flops: of one GPU, FLOP/s.
    """
    parts = {PRODUCTS: kinds_ms.get("matrix product", 0.0), MIXERS: 0.0}
    for kind, kernel_ms in kinds_ms.items():
        if kind in MIXER_KINDS:
            parts[MIXERS] += kernel_ms
        elif kind != "matrix product":
            parts[kind] = kernel_ms
    parts[IDLE] = step_ms - sum(parts.values())
    at_peak_ms = {
        part: 3 * flops * config.training.global_batch_tokens / ranks / peak_flops * 1000
        for part, flops in zip((PRODUCTS, MIXERS), products_and_mixers(config), strict=True)
    }
    rows = [
        (part, f"{part_ms:,.2f}", *shares(part_ms, at_peak_ms.get(part, 0.0), step_ms))
        for part, part_ms in sorted(parts.items(), key=lambda item: -item[1])
    ]
    rows.append(("all", f"{step_ms:,.2f}", *shares(step_ms, sum(at_peak_ms.values()), step_ms)))
    return table(("part of the step", "ms", "share", "its FLOPs at the peak", "lost"), rows)


def products_and_mixers(config: RunConfig) -> tuple[float, float]:
    """Forward FLOPs a token: of products with weights, and of what mixes along the sequence."""
    flops = forward_flops_per_token(config)
    width = config.model.hidden_size
    projections = sum(
        2.0 * sum(config.mixers[name].parameters(width).values())
        for name in config.model.layer_mixers
    )
    products = flops["mlp"] + flops["output"] + projections
    return products, sum(flops.values()) - products


def shares(part_ms: float, at_peak_ms: float, step_ms: float) -> tuple[str, str, str]:
    part, at_peak = part_ms / step_ms, at_peak_ms / step_ms
    return f"{part:.1%}", f"{at_peak:.1%}" if at_peak else "", f"{part - at_peak:.1%}"
