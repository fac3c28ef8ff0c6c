"""As `scaling`, with the mixers that are slower: gated SA+SWA and PaTH."""

from tests.multi_gpu import scaling
from tests.multi_gpu.cases import Case, Options

MODELS = ("sa_swa_400m", "path_400m")


def cases(options: Options) -> list[Case]:
    if options.device == "cpu":
        return []
    return [case for model in MODELS for case in scaling.cases_of(model, options, micro_batch=2)]
