"""Perplexity by length: the same tokens predicted from shorter and longer contexts.

For a length L a window of L tokens slides over each document. Every token but a document's first is
scored once: in the first window from all before it, in later ones from L - stride to L tokens. So
lengths are compared on the same tokens, and a model is asked beyond the length it was trained on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from mixtron.launch.inference.documents import Document
from mixtron.launch.inference.model import Loaded
from mixtron.megatron_ext.batch import EVALUATION_STEP, make_batch
from mixtron.megatron_ext.model import forward


@dataclass(frozen=True)
class Window:
    document: int
    start: int
    stop: int
    """Tokens [start, stop) predict those at [start + 1, stop + 1)."""
    scored: int
    """Of the predicted tokens, the last so many."""


@dataclass(frozen=True)
class Result:
    length: int
    stride: int
    tokens: int
    """Scored."""
    loss: float
    """Nats a token."""
    perplexity: float
    bits_per_byte: float


def windows(lengths: list[int], length: int, stride: int) -> Iterator[Window]:
    """Over documents of these lengths."""
    for number, tokens in enumerate(lengths):
        start, done = 0, 0
        while done < tokens - 1:
            stop = min(start + length, tokens - 1)
            yield Window(number, start, stop, stop - done)
            start, done = start + stride, stop


@torch.no_grad()
def perplexity(
    loaded: Loaded, documents: list[Document], length: int, stride: int, console: Console
) -> Result:
    """Data-parallel ranks share the windows; all ranks call it and get the same."""
    ranks, model = loaded.ranks, loaded.source.config.model
    every = list(windows([len(document.ids) for document in documents], length, stride))
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    with Progress(console=console, transient=True, disable=not ranks.is_first) as progress:
        task = progress.add_task(f"length {length}", total=len(every))
        for window in every[ranks.data_rank :: ranks.data_size]:
            ids = torch.from_numpy(documents[window.document].ids[window.start : window.stop + 1])
            stream_BT = ids[None].to(ranks.device)
            batch = make_batch(
                [window.stop - window.start], step=EVALUATION_STEP, device=ranks.device
            )
            tokens_BT, labels_BT = stream_BT[:, :-1], stream_BT[:, 1:]
            mask_BT = torch.zeros_like(labels_BT, dtype=torch.bool)
            mask_BT[:, -window.scored :] = True
            scored = labels_BT, mask_BT
            total += forward(loaded.chunk, model, ranks, tokens_BT, batch, *scored).double()
            progress.advance(task, ranks.data_size)
    dist.all_reduce(total, group=ranks.groups.dp)
    nats, tokens = float(total), sum(window.scored for window in every)
    size = sum(document.bytes for document in documents)
    loss = nats / tokens
    return Result(length, stride, tokens, loss, math.exp(loss), nats / math.log(2) / size)
