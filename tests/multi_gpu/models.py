"""The models that are measured."""

from dataclasses import dataclass, replace

WIDER = ("model.hidden_size=2048", "model.ffn_hidden_size=5632")


@dataclass(frozen=True)
class Measured:
    """A configuration, and how much of it a rank computes in a step."""

    name: str
    config: str
    micro_batch: int
    """Sequences."""
    micro_batches: int = 2
    overrides: tuple[str, ...] = ()

    @property
    def sequences(self) -> int:
        return self.micro_batch * self.micro_batches


ATTENTION = Measured("attention_400m", "attention_400m", 8)
KLA = Measured("kla_400m", "kla_400m", 8)
SA_SWA = Measured("sa_swa_400m", "sa_swa_400m", 8)
PATH = Measured("path_400m", "path_400m", 8, 1)


def recorded(model: Measured) -> Measured:
    overrides = (*model.overrides, "training.layer_graphs=true")
    return replace(model, name=f"{model.name}, recorded", overrides=overrides)


def wider(model: Measured, mixer: str, *heads: str) -> Measured:
    """1.3B: twice as wide, with twice as many heads."""
    overrides = (*model.overrides, *WIDER, *(f"mixers.{mixer}.{h}=16" for h in heads))
    return Measured(model.name.replace("400m", "1300m"), model.config, 4, 1, overrides)


ATTENTION_1300M = wider(ATTENTION, "attention", "heads", "kv_heads")
KLA_1300M = wider(KLA, "kla", "heads", "value_heads")
SA_SWA_1300M = wider(SA_SWA, "sa_swa", "heads", "kv_heads")
SMALL = (ATTENTION, KLA, SA_SWA)
DATA_PARALLEL = (recorded(KLA), *SMALL)
LARGE = (ATTENTION_1300M, KLA_1300M, SA_SWA_1300M)
LARGE_RECORDED = tuple(map(recorded, LARGE))
DEBUG = (
    Measured("debug_softmax_attention", "debug_softmax_attention", 1),
    Measured("debug_kla", "debug_kla", 1),
)


def long_kla(tokens: int, gpus: int, debug: bool) -> Measured:
    """One sequence of which each GPU has a share; alone, a GPU gets a sequence as long as that."""
    config = "debug_kla" if debug else "kla_400m"
    recompute = "full" if tokens * gpus > RECOMPUTED_FROM else "none"
    overrides = (f"data.sequence_length={tokens}", f"training.recompute={recompute}")
    return Measured(f"{config}, {tokens * gpus:,} tokens", config, 1, 1, overrides)


LENGTHS = (131_072, 32_768, 524_288)
RECOMPUTED_FROM = 131_072
"""Of more tokens on two GPUs not every layer's activations fit."""
DEBUG_LENGTHS = (256,)
