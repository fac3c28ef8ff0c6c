"""The learning rate at the points where its phases meet, by hand."""

import math
from itertools import pairwise

import pytest

from mixtron.launch.config_sections import ScheduleConfig
from mixtron.launch.schedule import learning_rate

PEAK, STEPS = 2.0, 110


def rates(at: list[int], **schedule) -> list[float]:
    config = ScheduleConfig(**{"warmup_steps": 10, **schedule})
    return [learning_rate(step, STEPS, PEAK, config) for step in at]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_is_linear_and_reaches_the_peak(kind):
    options = {"decay_steps": 40} if kind == "wsd" else {}
    assert rates([1, 5, 10], type=kind, **options) == pytest.approx([0.2, 1.0, 2.0])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_without_warm_up_the_first_step_is_near_the_peak(kind):
    options = {"decay_steps": 40} if kind == "wsd" else {}
    [first] = rates([1], type=kind, warmup_steps=0, **options)
    assert 0.97 * PEAK < first <= PEAK


def test_cosine():
    quarter = 0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4))
    found = rates([35, 60, 85, 110], type="cosine")
    assert found == pytest.approx([quarter, 1.1, 2.2 - quarter, 0.2])


def test_linear():
    found = rates([35, 60, 85, 110], type="linear", min_lr_fraction=0.0)
    assert found == pytest.approx([1.5, 1.0, 0.5, 0.0])


def test_constant():
    assert rates([11, 60, 110], type="constant") == [PEAK] * 3


def test_wsd_stays_and_falls_at_the_end():
    found = rates([11, 70, 90, 110], type="wsd", decay_steps=40)
    assert found == pytest.approx([2.0, 2.0, 1.1, 0.2])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_may_end_early_and_then_stays_at_the_floor(kind):
    found = rates([35, 60, 61, 110], type=kind, decay_steps=60)
    assert found == pytest.approx([1.1, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("cosine", {}), ("linear", {}), ("wsd", {"decay_steps": 40}), ("constant", {})],
)
def test_it_never_rises_after_the_warm_up(kind, options):
    found = rates(list(range(10, STEPS + 1)), type=kind, **options)
    assert all(after <= before for before, after in pairwise(found))
    assert min(found) >= 0.1 * PEAK - 1e-12
