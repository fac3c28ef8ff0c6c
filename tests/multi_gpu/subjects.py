"""What parity compares: every mixer's debug model, and three at the widths of their kernels."""

from tests.contract.cases import FOUR, MIXERS, Case
from tests.multi_gpu.cases import Options

NARROW = ("model.layers=2", "model.hidden_size=256", "model.ffn_hidden_size=512")
SHORT = (*NARROW, "model.vocab_size=500", "data.sequence_length=1024")
WITH_KERNELS = {
    "kla": ("kla_400m", "kla", "kernel=triton", "heads=4", "value_heads=4"),
    "stochastic": ("sa_swa_400m", "sa_swa", "kernel=triton", "heads=4", "kv_heads=4"),
    "sd_attention": ("sd_125m", "sd", "kernel=triton", "heads=4"),
}
"""A configuration, its mixer's name in it, and what is overridden of that."""
LONG = ((400, 1, 367, 256), (1024,), (256, 1, 255, 512), (7, 1017))


def subjects(options: Options) -> dict[str, Case]:
    """By name."""
    times = max(1, options.gpus // 2)
    found = {mixer: Case(mixer, FOUR * times) for mixer in MIXERS}
    if options.device == "cuda":
        for mixer, (name, key, *overrides) in WITH_KERNELS.items():
            own = tuple(f"mixers.{key}.{override}" for override in overrides)
            found[f"{mixer} triton"] = Case(
                mixer, LONG * times, name=name, overrides=(*SHORT, *own)
            )
    return found
