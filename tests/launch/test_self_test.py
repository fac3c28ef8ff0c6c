"""Which self-tests a run asks for, and how they end it."""

from unittest import mock

import pytest
import torch

from mixtron.kernels.self_test import Report, SelfTestError
from mixtron.kernels.self_test_cases import all_cases, small_cases
from mixtron.launch import self_test
from mixtron.launch.bench.self_test import run_self_tests
from mixtron.launch.config import load_config
from mixtron.launch.self_test import cases_of
from mixtron.megatron_ext.errors import ConfigError

SMALL = [case.name for case in small_cases()]


@pytest.mark.parametrize(
    ("config", "kernel", "expected"),
    [
        ("kla_400m", "mixers.kla.kernel", ["delta_rule (kaczmarz, K 128, V 128)"]),
        ("path_400m", "mixers.path.kernel", ["path_attention (PaTH, K 128)"]),
        ("attention_400m", "mixers.attention.kernel", ["path_attention (softmax, K 128)"]),
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


def answers(*others):
    """all_gather_object of this rank and others."""

    def gather(found, mine):
        found[:] = [mine, *others]

    return mock.patch.multiple(
        torch.distributed, get_world_size=lambda: 1 + len(others), all_gather_object=gather
    )


def test_a_wrong_form_on_any_node_ends_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(self_test, "where", lambda device: "a GPU")
    monkeypatch.setattr(self_test, "run_cases", lambda *_: Report(["a"], ["b", "c"], 1.0))
    config = load_config("configs/debug_kla.yaml")
    first, second = (torch.device("cuda", index) for index in range(2))
    with answers("", ""):
        said = self_test.check_kernels(config, first)
    assert said.startswith("self-test on a GPU: 1 forms run, 2 known to be right")
    for device in (first, second):
        with answers("", "norms (unit) is wrong"), pytest.raises(SelfTestError) as error:
            self_test.check_kernels(config, device)
        assert (str(error.value), error.value.exit_code) == ("norms (unit) is wrong", 2)
    assert self_test.check_kernels(config, torch.device("cpu")) == ""


def test_the_command_names_what_it_cannot_test():
    with pytest.raises(ConfigError, match="no self-test for op 'rope'; ops: delta_rule, gated_"):
        run_self_tests(["rope"])
    with (
        pytest.raises(ConfigError, match="needs a GPU"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
    ):
        run_self_tests([])
