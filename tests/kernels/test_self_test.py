"""The self-test finds a wrong form and names it; what is right is noted for one place and form."""

import json
from dataclasses import replace

import pytest
import torch

from mixtron.kernels import self_test
from mixtron.kernels.self_test import Case, SelfTestError, check, fingerprint, run_cases

CPU = torch.device("cpu")


def product(x, y):
    return x @ y


def case(form=product) -> Case:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(32, 32, generator=generator) for name in "xy"}
    return Case("norms", "a product", inputs, (), form, product)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, y = ctx.saved_tensors
        dy = x.T @ grad
        dy[16:, 16:] = 0  # one tile in four is lost
        return grad @ y.T, dy


def test_a_right_form_passes():
    check(case(), CPU)


def test_a_lost_tile_of_a_gradient_is_found():
    wrong = case(WrongBackward.apply)
    with pytest.raises(SelfTestError, match=r"norms \(a product\) is wrong .*gradient of y is off"):
        check(wrong, CPU)


def test_too_large_an_error_and_nan_are_found():
    for spoil in (1.02, float("nan")):
        with pytest.raises(SelfTestError, match="the output is off by"):
            check(case(lambda x, y, spoil=spoil: spoil * (x @ y)), CPU)


def test_a_form_that_differs_from_run_to_run_is_found():
    factors = iter((1.0, 1.001))
    with pytest.raises(SelfTestError, match="differs between two runs"):
        check(case(lambda x, y: next(factors) * (x.float() @ y.float())), CPU)


def test_a_form_that_cannot_run_is_named():
    def broken(x, y):
        raise RuntimeError("an illegal memory access")

    with pytest.raises(SelfTestError, match=r"norms \(a product\) fails on .*illegal memory") as e:
        check(case(broken), CPU)
    assert e.value.exit_code == 2


def test_what_is_right_is_not_run_again(tmp_path):
    assert run_cases([case()], CPU, tmp_path).run == ["norms (a product)"]
    (note,) = tmp_path.glob("*.json")
    assert json.loads(note.read_text())["right"] == "norms (a product)"
    unusable = case(lambda x, y: None)
    report = run_cases([unusable], CPU, tmp_path)
    assert (report.run, report.known) == ([], ["norms (a product)"])
    with pytest.raises(SelfTestError):
        run_cases([unusable], CPU, tmp_path, again=True)


def test_what_is_wrong_is_not_noted(tmp_path):
    with pytest.raises(SelfTestError):
        run_cases([case(lambda x, y: x)], CPU, tmp_path / "notes")
    assert not (tmp_path / "notes").exists()


def test_a_note_holds_for_one_place_form_and_source(monkeypatch):
    keys = {fingerprint(case(), CPU)}
    keys.add(fingerprint(replace(case(), form="another"), CPU))
    keys.add(fingerprint(replace(case(), op="short_convolution"), CPU))
    monkeypatch.setattr(self_test.triton, "__version__", "0.0")
    keys.add(fingerprint(case(), CPU))
    assert len(keys) == 4
