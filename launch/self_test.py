"""Runs the self-tests of the Triton forms that a run uses, before its model is built."""

import time

import torch
import torch.distributed as dist

from mixtron.kernels import self_test_cases
from mixtron.kernels.self_test import Case, SelfTestError, cache_folder, run_cases, where
from mixtron.launch.config import RunConfig


def check_kernels(config: RunConfig, device: torch.device) -> str:
    """One rank of each node runs what the node's cache does not know to be right; the others wait.

    All ranks call it. Returns a line to say; empty without a GPU.

    Raises:
        SelfTestError: on all ranks the same: which form is wrong on which GPU, and how far off.
    """
    if device.type != "cuda":
        return ""
    started, problem, text = time.monotonic(), "", ""
    if device.index == 0:
        try:
            report = run_cases(cases_of(config), device, cache_folder())
            text = f"{len(report.run)} forms run, {len(report.known)} known to be right"
        except SelfTestError as error:
            problem = str(error)
    problems: list = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    wrong = [x for x in problems if x]
    if wrong:
        raise SelfTestError(wrong[0])
    return f"self-test on {where(device)}: {text}, {time.monotonic() - started:.0f} s"


def cases_of(config: RunConfig) -> list[Case]:
    """Of the forms that this run launches: those of its mixers, and the small ops."""
    used = dict.fromkeys(config.model.pattern)
    found = [case for name in used for case in mixer_cases(config.mixers[name])]
    return found + self_test_cases.small_cases()


def mixer_cases(mixer) -> list[Case]:
    """None for a form in torch."""
    if getattr(mixer, "kernel", None) != "triton":
        return []
    cases = self_test_cases
    match mixer.type:
        case "kla":
            options = {"step_size": mixer.step_size, "decay": mixer.decay == "gated"}
            return [cases.delta_rule_case(mixer.key_dim, mixer.value_dim, **options)]
        case "gla":
            return [cases.gated_linear_case(mixer.key_dim, mixer.value_dim, channel=True)]
        case "mamba2":
            widths = mixer.key_dim, mixer.value_dim
            heads = (2, cases.MANY)
            return [cases.gated_linear_case(*widths, channel=False, value_heads=J) for J in heads]
        case "linear_attention":
            widths = mixer.key_dim, mixer.value_dim
            return [cases.linear_case(*widths, heads) for heads in (2, cases.MANY)]
        case "log_linear":
            delta = mixer.base == "gated_delta"
            return [cases.log_linear_case(mixer.key_dim, mixer.value_dim, delta=delta)]
        case "path" | "fox":
            maps = mixer.type == "path"
            return [cases.path_case(mixer.head_dim, maps=maps, gate=mixer.gated)]
        case "softmax_attention":
            return [cases.path_case(mixer.head_dim, maps=False, gate=False)]
        case "stochastic":
            sides = {"swa": {"one"}, "sa": {mixer.window_side}}
            sides["sa+swa"] = sides["sa"] | sides["swa"]
            return [
                cases.windowed_case(mixer.head_dim, window_side=side)
                for side in sorted(sides[mixer.paths])
            ]
        case "sd_attention":
            return [cases.sd_case(mixer.head_dim)]
    raise AssertionError(f"no self-test for mixer type {mixer.type!r}")
