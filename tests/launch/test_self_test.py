"""Which self-tests a run asks for."""

import pytest

from mixtron.kernels.self_test_cases import all_cases, small_cases
from mixtron.launch.config import load_config
from mixtron.launch.self_test import cases_of

SMALL = [case.name for case in small_cases()]


@pytest.mark.parametrize(
    ("config", "kernel", "expected"),
    [
        ("kla_400m", "mixers.kla.kernel", ["delta_rule (kaczmarz, K 128, V 128)"]),
        ("path_400m", "mixers.path.kernel", ["path_attention (PaTH, K 128)"]),
        (
            "sa_swa_400m",
            "mixers.sa_swa.kernel",
            ["windowed_attention (one-sided, K 128)", "windowed_attention (two-sided, K 128)"],
        ),
    ],
)
def test_a_run_tests_the_forms_that_it_uses(config, kernel, expected):
    used = load_config(f"configs/{config}.yaml", [f"{kernel}=triton"])
    assert [case.name for case in cases_of(used)] == expected + SMALL
    assert set(expected) <= {case.name for case in all_cases()}


def test_forms_in_torch_need_none():
    used = load_config("configs/debug_kla.yaml", ["mixers.kla.kernel=chunk"])
    assert [case.name for case in cases_of(used)] == SMALL
