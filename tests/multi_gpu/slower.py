"""As `alone` and `scaling`, with PaTH."""

from functools import partial

from tests.multi_gpu import models
from tests.multi_gpu.alone import run_mine
from tests.multi_gpu.cases import Case, Options
from tests.multi_gpu.scaling import dp


def cases(options: Options) -> list[Case]:
    if options.device == "cpu":
        return []
    return [
        Case("path_400m: one GPU", partial(run_mine, [models.PATH]), alone=True),
        dp(models.PATH, options),
    ]
