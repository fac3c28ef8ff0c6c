"""What characters are, by the Unicode of this Python; libraries know older and newer ones."""

import unicodedata
from functools import cache

import numpy as np

PLANES = 0x40000
"""Code points of the planes that have letters; the others hold tags and private use."""
STRETCH = 1 << 20
"""Characters looked at together."""
OLD, NEW, UNSEEN = 0, 1, 2
_STATES = np.full(0x110000, UNSEEN, dtype=np.uint8)
"""Of characters; looked up when first met, because all of them take as long as 8 MB of text."""


def has_new_characters(text: str) -> bool:
    """Whether Unicode gave a character of the text no meaning until after this Python's version.

    Libraries of different ages disagree on whether such a character is a letter, and so on where
    words end.
    """
    if text.isascii():
        return False
    for first in range(0, len(text), STRETCH):
        stretch = text[first : first + STRETCH].encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(stretch, "<u4")
        if (states := _STATES.take(codes)).max() == UNSEEN:
            _look_at_blocks(codes[states == UNSEEN])
            states = _STATES.take(codes)
        if states.max() == NEW:
            return True
    return False


def character_class(major: str) -> str:
    """The inside of a bracket of a regular expression: all characters of a category, as `L`."""
    inside = np.array([category[0] == major for category in _categories()], dtype=np.int8)
    edges = np.flatnonzero(np.diff(inside, prepend=0, append=0))
    return "".join(f"\\U{a:08x}-\\U{b - 1:08x}" for a, b in edges.reshape(-1, 2).tolist())


def _look_at_blocks(codes: np.ndarray) -> None:
    """Fills in the states of these characters and of their neighbours."""
    for first in np.unique(codes & ~np.uint32(255)).tolist():
        new = [
            code < PLANES and unicodedata.category(chr(code)) == "Cn"
            for code in range(first, first + 256)
        ]
        _STATES[first : first + 256] = np.where(new, NEW, OLD)


@cache
def _categories() -> list[str]:
    return [unicodedata.category(chr(code)) for code in range(PLANES)]
