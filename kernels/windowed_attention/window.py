"""Which slots around its own a token sees."""

from typing import Literal

WindowSide = Literal["two", "one"]


def window_reach(window: int, window_side: WindowSide) -> tuple[int, int]:
    """Slots seen before and after a token's own; with it, `window` in all.

    Raises:
        ValueError: a window below 1 or an unknown side.
    """
    if window < 1:
        raise ValueError(f"window is {window}, expected at least 1: a token sees itself")
    if window_side == "two":
        return window // 2, (window - 1) // 2
    if window_side == "one":
        return window - 1, 0
    raise ValueError(f"window_side is {window_side!r}, expected 'two' or 'one'")
