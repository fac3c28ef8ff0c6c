"""As `scaling`, with models of 1.3B: twice as wide."""

from tests.multi_gpu import scaling
from tests.multi_gpu.cases import Case, Options

WIDER = ("model.hidden_size=2048", "model.ffn_hidden_size=5632")
HEADS = {
    "attention_400m": ("mixers.attention.heads=16", "mixers.attention.kv_heads=16"),
    "kla_400m": ("mixers.kla.heads=16", "mixers.kla.value_heads=16"),
}


def cases(options: Options) -> list[Case]:
    if options.device == "cpu":
        return []
    return [
        case
        for model, heads in HEADS.items()
        for case in scaling.cases_of(
            model, options, 2, (*WIDER, *heads), model.replace("400m", "1300m")
        )
    ]
