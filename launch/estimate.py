"""What a config costs, computed without building anything: parameters and FLOPs."""

from mixtron.launch.config import RunConfig

PEAK_BF16_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
"""Dense bf16 FLOP/s by the vendor's data sheets, for MFU. Matched inside the device's name."""


NORM_PARAMETERS = {"rmsnorm": 1, "layernorm": 2, "none": 0}
"""Of one norm, a channel."""


def parameters(config: RunConfig) -> dict[str, int]:
    """Trainable parameters by part over all ranks, vocabulary padding included."""
    model = config.model
    width = model.hidden_size
    parts = {"embedding": model.padded_vocab_size * width}
    for name in model.layer_mixers:
        for part, count in config.mixers[name].parameters(width).items():
            key = f"{name}.{part}"
            parts[key] = parts.get(key, 0) + count
    parts["mlp"] = model.layers * model.mlp_parameters
    parts["norms"] = NORM_PARAMETERS[model.norm] * (2 * model.layers + 1) * width
    if not model.tied_embeddings:
        parts["output"] = model.padded_vocab_size * width
    return {part: count for part, count in parts.items() if count}


def forward_flops_per_token(config: RunConfig) -> dict[str, float]:
    """Forward FLOPs a token by part (a multiply-add is 2), for documents of `sequence_length`."""
    model, length = config.model, config.data.sequence_length
    flops = {
        "mlp": 2.0 * model.mlp_matrices * model.hidden_size * model.ffn_hidden_size * model.layers,
        "output": 2.0 * model.hidden_size * model.padded_vocab_size,
    }
    for name in model.layer_mixers:
        layer = config.mixers[name].flops_per_token(model.hidden_size, length)
        flops[name] = flops.get(name, 0.0) + layer
    return flops


def training_flops_per_token(config: RunConfig) -> float:
    """Forward and backward, without recomputation: what MFU counts."""
    return 3 * sum(forward_flops_per_token(config).values())


def peak_flops(device_name: str) -> float | None:
    """The device's dense bf16 peak, or None when the device is not known."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)
