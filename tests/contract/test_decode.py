"""Packed prompts, then decoding token by token: all logits are those of the full forward pass."""

import pytest
import torch

from tests.contract.cases import MIXERS, ONE_RANK, TP2, Case
from tests.helpers.ranks import run_on_ranks

BATCHES = ((63, 1, 65), (64,))
"""Prompts that are packed, then decoded side by side: the shortest, and around a chunk and a power
of two."""
STEPS = 8
LENGTH = 80
"""Of the full forward, which goes on behind the tokens that are decoded: they cannot see that."""
OF_LENGTH = {"decode_capacity": LENGTH, "levels": 8}
"""Options of mixers that are made for documents of a length: a random order is drawn for it."""


def decode_and_forward(mixer: str, tensor: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each sequence: logits of prefill and decode, and of the full forward. [T, V] each."""
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.model import build_model, forward
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    config = Case(mixer).config(TP2 if tensor == 2 else ONE_RANK)
    # A softmax layer in between, so that caches of two kinds lie in one model.
    attention = Case("softmax_attention").config(ONE_RANK).mixers
    mixers = {name: _of_length(m) for name, m in {**config.mixers, **attention}.items()}
    pattern = [name for pair in zip(config.model.pattern, [*attention] * 4) for name in pair]  # noqa: B905
    model = config.model.model_copy(update={"pattern": pattern, "layers": len(pattern)})
    device = init_distributed()
    ranks = init_model_parallel(tensor, seed=1, device=device)
    (chunk,) = build_model(model, mixers, config.parallel, ranks, seed=1, bf16=False, max_tokens=64)
    chunk.eval()
    generator = torch.Generator().manual_seed(3)
    pairs = []
    with torch.no_grad():
        for prompts in BATCHES:
            shape = (len(prompts), LENGTH)
            texts = torch.randint(0, model.vocab_size, shape, generator=generator)
            decoded = _decoded(chunk, model, ranks, texts, prompts)
            for text, rows in zip(texts, decoded, strict=True):
                whole = make_batch([LENGTH], step=0, device=device)
                full = forward(chunk, model, ranks, text[None], whole)[0]
                pairs.append((rows, full[: len(rows)]))
    return pairs


def _of_length(mixer):
    options = {name: x for name, x in OF_LENGTH.items() if name in type(mixer).model_fields}
    return mixer.model_copy(update=options)


def _decoded(chunk, model, ranks, texts, prompts) -> list[torch.Tensor]:
    """Logits [prompt + STEPS, V] of each text."""
    from mixtron.megatron_ext.batch import decode_batch, prefill_batch
    from mixtron.megatron_ext.model import forward

    batch = prefill_batch(list(prompts), ranks.device)
    stream = torch.cat([text[:n] for text, n in zip(texts, prompts, strict=True)])
    logits = forward(chunk, model, ranks, stream[None], batch)[0]
    found, cache = [[rows] for rows in logits.split(prompts)], batch.cache
    text_B = torch.arange(len(texts))
    for _ in range(STEPS):
        tokens = texts[text_B, cache.lengths]
        logits = forward(chunk, model, ranks, tokens[None], decode_batch(cache))[0]
        cache.lengths += 1
        for rows, row in zip(found, logits, strict=True):
            rows.append(row[None])
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("tensor", [1, 2], ids=["one rank", "tp2"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_decode_equals_the_full_forward(mixer, tensor):
    for pairs in run_on_ranks(tensor, decode_and_forward, mixer, tensor):
        assert [len(rows) for rows, _ in pairs] == [71, 9, 73, 72]
        for decoded, whole in pairs:
            # fp32 sums in another order, through at most eight layers.
            error = (decoded - whole).abs().max() / whole.abs().max()
            assert error < 2e-5, error
