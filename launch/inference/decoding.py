"""Prompts at once, one behind the other, then token by token, all side by side."""

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from mixtron.launch.inference.model import Loaded
from mixtron.launch.inference.sampling import Sampling
from mixtron.launch.inference.source import Source
from mixtron.megatron_ext.batch import decode_batch, prefill_batch
from mixtron.megatron_ext.cache import Cache
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.model import forward

PREFILL_TOKENS = 8192
"""Prompts are packed into streams of at most so many tokens (a longer one has its own), which
bounds the logits that exist at once."""

Step = list[int | None]
"""The next token of every sequence; None: it has ended."""


def check_prompts(source: Source, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Raises ConfigError: an empty prompt, a token outside the vocabulary, or one too long."""
    vocabulary, longest = source.config.model.vocab_size, source.longest
    for number, ids in enumerate(prompts, start=1):
        if not ids:
            raise ConfigError(f"prompt {number} is empty; give at least one token to continue")
        if max(ids) >= vocabulary:
            outside = next(i for i in ids if i >= vocabulary)
            raise ConfigError(
                f"prompt {number}: token {outside} ({source.tokenizer.decode([outside])!r}) is "
                f"outside the model's vocabulary of {vocabulary}"
            )
        if longest is not None and len(ids) + tokens > longest:
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens; with {tokens} new ones it is longer than "
                f"the {longest} that this model's positions reach: shorten it, or lower --tokens"
            )


@torch.no_grad()
def decode(
    loaded: Loaded, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling
) -> Iterator[Step]:
    """Draws up to `tokens` tokens for each prompt, each until its end of document.

    All ranks of a model draw the same: they see the same logits.
    """
    model, ranks, eod = loaded.source.config.model, loaded.ranks, loaded.source.tokenizer.eod_id
    cache, last = _prefill(loaded, prompts)
    generators = [sampling.generator(i) for i in range(len(prompts))]
    ended = [False] * len(prompts)
    for step in range(1, tokens + 1):
        drawn = [sampling.draw(x, g) for x, g in zip(last, generators, strict=True)]
        ended = [was or token == eod for was, token in zip(ended, drawn, strict=True)]
        yield [None if over else token for over, token in zip(ended, drawn, strict=True)]
        if all(ended) or step == tokens:
            return
        stream_BT = torch.tensor([drawn], device=ranks.device)
        logits_BTV = forward(loaded.chunk, model, ranks, stream_BT, decode_batch(cache))
        cache.lengths += 1
        last = list(logits_BTV[0].cpu())


def _prefill(loaded: Loaded, prompts: Sequence[Sequence[int]]) -> tuple[Cache, list[Tensor]]:
    """The prompts' cache, and behind each the next token's logits [V] on the CPU."""
    model, ranks = loaded.source.config.model, loaded.ranks
    caches, last = [], []
    for packed in _packed(prompts):
        batch = prefill_batch([len(ids) for ids in packed], ranks.device)
        stream_BT = torch.tensor([list(chain(*packed))], device=ranks.device)
        logits_BTV = forward(loaded.chunk, model, ranks, stream_BT, batch)
        caches.append(batch.cache)
        ends = torch.tensor(batch.lengths).cumsum(0) - 1
        last += logits_BTV[0, ends.to(ranks.device)].cpu()
    return Cache.stack(caches), last


def _packed(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Prompts that lie in one stream together."""
    taken: list[Sequence[int]] = []
    for ids in prompts:
        if taken and sum(map(len, taken)) + len(ids) > PREFILL_TOKENS:
            yield taken
            taken = []
        taken.append(ids)
    yield taken
