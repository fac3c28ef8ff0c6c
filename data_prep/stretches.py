"""Long documents encoded a stretch at a time, so that the libraries' memory stays bounded."""

import re
from collections.abc import Callable, Iterator
from itertools import islice

STRETCH = 1 << 20
"""Characters that are encoded together."""
BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")
CONTEXT = 256
"""Characters on both sides with which a cut is tried."""
TRIES = 64


def stretches(text: str, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Parts of a text whose ids, one after another, are those of the text.

    A cut between words is made where the ids around it are the same with and without it. This
    decides where all else is local: `encode` must never join what stands before a blank with it.
    The blank itself stays out of the next part when `encode` puts one before every text.
    """
    start = 0
    while cut := _find_cut(text, start, encode):
        stop, following = cut
        yield text[start:stop]
        start = following
    yield text[start:]


def _find_cut(text: str, start: int, encode: Callable[[str], list[int]]) -> tuple[int, int] | None:
    """Where a part that begins at `start` ends, and where the next begins."""
    for blank in islice(BETWEEN_WORDS.finditer(text, start + STRETCH), TRIES):
        stop = blank.start()
        left = text[max(start, stop - CONTEXT) : stop]
        for following in (stop + 1, stop):
            right = text[following : stop + CONTEXT]
            whole = encode(left + text[stop : stop + CONTEXT])
            if whole == encode(left) + encode(right):
                return stop, following
    return None
