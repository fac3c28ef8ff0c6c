"""`mixtron bench self-test`: every Triton form against its reference, whatever is known already."""

import torch

from mixtron.kernels.self_test import SelfTestError, cache_folder, run_cases, where
from mixtron.kernels.self_test_cases import all_cases
from mixtron.megatron_ext.errors import ConfigError


def run_self_tests(ops: list[str]) -> None:
    """Prints a line a form; those that are right are noted for the runs to come.

    Raises:
        ConfigError: an op without a case, no GPU, or forms that are wrong.
    """
    cases = all_cases()
    known = sorted({case.op for case in cases})
    for op in ops:
        if op not in known:
            raise ConfigError(f"no self-test for op {op!r}; ops: {', '.join(known)}")
    if not torch.cuda.is_available():
        raise ConfigError("mixtron bench self-test needs a GPU, and there is none")
    device = torch.device("cuda", 0)
    print(where(device), flush=True)
    wrong = []
    for case in cases:
        if ops and case.op not in ops:
            continue
        try:
            report = run_cases([case], device, cache_folder(), again=True)
            print(f"right  {case.name}, {report.seconds:.1f} s", flush=True)
        except SelfTestError as error:
            wrong.append(case.name)
            print(f"wrong  {error}", flush=True)
    if wrong:
        raise ConfigError(f"self-test: {len(wrong)} forms are wrong here: {'; '.join(wrong)}")
