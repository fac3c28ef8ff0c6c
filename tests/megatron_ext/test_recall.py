"""A delta-rule model learns what it is for: to recall the value that followed a key."""

import torch

from tests.helpers.ranks import run_on_ranks

KEYS, PAIRS, SEQUENCES, STEPS = 16, 4, 32, 600


def recall(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-query associative recall: keys each with a value, then the keys again, shuffled.

    Returns:
        Tokens [SEQUENCES, 4 PAIRS] and a mask of the positions whose next token is to be recalled.
    """
    keys = torch.rand(SEQUENCES, KEYS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(KEYS, 2 * KEYS, (SEQUENCES, PAIRS), generator=generator)
    order = torch.rand(SEQUENCES, PAIRS, generator=generator).argsort(1)
    told = torch.stack([keys, values], dim=2).flatten(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)
    mask = torch.zeros(SEQUENCES, 4 * PAIRS, dtype=torch.bool)
    mask[:, 2 * PAIRS :: 2] = True
    return torch.cat([told, asked], dim=1), mask


def train_on_recall() -> float:
    """Trains two KLA layers; returns the accuracy on sequences never seen."""
    from mixtron.megatron_ext.batch import make_batch
    from mixtron.megatron_ext.config import ModelConfig, ParallelConfig
    from mixtron.megatron_ext.mixers.kla.config import Config
    from mixtron.megatron_ext.model import build_model, forward
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    device = init_distributed()
    ranks = init_model_parallel(seed=1, device=device)
    model = ModelConfig(
        layers=2,
        hidden_size=64,
        ffn_hidden_size=64,
        vocab_size=2 * KEYS,
        vocab_multiple=32,
        pattern=["kla"],
    )
    mixers = {"kla": Config(heads=2, value_heads=2, key_dim=16, value_dim=32)}
    tokens = SEQUENCES * 4 * PAIRS
    (chunk,) = build_model(
        model, mixers, ParallelConfig(), ranks, seed=1, bf16=False, max_tokens=tokens
    )
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(5)
    batch = make_batch([4 * PAIRS] * SEQUENCES, step=0, device=device)
    for _ in range(STEPS):
        stream, mask = recall(generator)
        labels = stream.roll(-1, 1).flatten()[None]
        loss = forward(chunk, model, ranks, stream.flatten()[None], batch, labels)
        (loss * mask.flatten()).sum().div(mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    stream, mask = recall(generator)
    with torch.no_grad():
        logits = forward(chunk, model, ranks, stream.flatten()[None], batch)[0]
    right = logits.argmax(-1).view_as(stream) == stream.roll(-1, 1)
    return float(right[mask].float().mean())


def test_kla_learns_associative_recall():
    (accuracy,) = run_on_ranks(1, train_on_recall)
    # Naming one of the values that were told would give 1 / PAIRS.
    assert accuracy > 0.9, f"found {accuracy:.3f}, guessing gives {1 / PAIRS:.3f}"
