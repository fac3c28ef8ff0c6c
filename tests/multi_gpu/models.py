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
PATH = Measured("path_400m", "path_400m", 8)


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
PATH_1300M = wider(PATH, "path", "heads", "kv_heads")
SMALL = (ATTENTION, KLA, SA_SWA)
DATA_PARALLEL = (*map(recorded, (KLA, PATH, SA_SWA)), *SMALL)
LARGE = (ATTENTION_1300M, KLA_1300M, SA_SWA_1300M)
LARGE_RECORDED = tuple(map(recorded, (KLA_1300M, SA_SWA_1300M, PATH_1300M)))
DEBUG = (
    Measured("debug_softmax_attention", "debug_softmax_attention", 1),
    Measured("debug_kla", "debug_kla", 1),
)


def long(model: Measured, tokens: int, gpus: int) -> Measured:
    """One sequence of which each GPU has a share; alone, a GPU gets a sequence as long as that."""
    recompute = "full" if tokens * gpus > RECOMPUTED_FROM else "none"
    overrides = (f"data.sequence_length={tokens}", f"training.recompute={recompute}")
    name = f"{model.config}, {tokens * gpus:,} tokens"
    return Measured(name, model.config, 1, 1, (*model.overrides, *overrides))


def long_kla(tokens: int, gpus: int, debug: bool) -> list[Measured]:
    """Recorded, where it can be, and plain."""
    plain = long(DEBUG[1] if debug else KLA, tokens, gpus)
    # Whole layers computed again are not recorded.
    can_be = not debug and tokens * gpus <= RECOMPUTED_FROM
    return [*([recorded(plain)] if can_be else []), plain]


def long_others(gpus: int, debug: bool) -> list[Measured]:
    return [] if debug else [long(model, LENGTHS[0] // gpus, gpus) for model in (ATTENTION, SA_SWA)]


LENGTHS = (131_072, 32_768, 524_288)
RECOMPUTED_FROM = 131_072
"""Of more tokens on two GPUs not every layer's activations fit."""
DEBUG_LENGTHS = (256,)
