"""Learning rate as a pure function of the step."""

import math

from mixtron.launch.config_sections import ScheduleConfig


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The rate of optimizer step `step` (from 1) in a run of `steps`.

    Linear warm-up reaches `peak` at `warmup_steps`. Then cosine and linear fall to
    `min_lr_fraction * peak` at `decay_steps` (default: the end) and stay; wsd stays at the peak and
    falls linearly over the last `decay_steps`; constant stays.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    floor = peak * schedule.min_lr_fraction
    if schedule.type == "constant":
        return peak
    if schedule.type == "wsd":
        assert schedule.decay_steps is not None
        start, end = steps - schedule.decay_steps, steps
    else:
        start, end = schedule.warmup_steps, schedule.decay_steps or steps
    progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    if schedule.type == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak + (floor - peak) * progress
