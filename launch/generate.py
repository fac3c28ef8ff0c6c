"""Continues a text from a checkpoint, on one rank: the prompt at once, then token by token."""

from pathlib import Path

import torch

from mixtron.data_prep.tokenizer import load_tokenizer
from mixtron.launch.checkpoint import find_checkpoint, load_weights
from mixtron.launch.config import DataConfig, load_config
from mixtron.megatron_ext.batch import decode_batch, prefill_batch
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.model import build_model, forward
from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel


@torch.no_grad()
def generate(run_dir: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """The prompt and up to `tokens` more tokens, drawn at `temperature` (0 takes the likeliest)."""
    config = load_config(run_dir / "config.yaml")
    if not isinstance(config.data, DataConfig):
        raise ConfigError(f"{run_dir}: trained on a synthetic task, which has no text to continue")
    device = init_distributed()
    ranks = init_model_parallel(seed=seed, device=device)
    path = find_checkpoint(run_dir / "checkpoints", "auto", ranks)
    if path is None:
        raise ConfigError(f"{run_dir}: no complete checkpoint under checkpoints/")
    chunks = build_model(
        config.model,
        config.mixers,
        ParallelConfig(),
        ranks,
        seed=seed,
        bf16=config.training.precision == "bf16",
        max_tokens=config.data.sequence_length,
    )
    load_weights(path, chunks, ranks)
    chunks[0].eval()
    tokenizer = load_tokenizer(config.data.tokenizer, eod_token=config.data.eod_token)
    ids = tokenizer.encode_batch([prompt])[0].tolist()
    generator = torch.Generator().manual_seed(seed)
    batch = prefill_batch(len(ids), device)
    cache, new = batch.cache, ids
    assert cache is not None
    for _ in range(tokens):
        stream = torch.tensor([new], device=device)
        logits_V = forward(chunks[0], config.model, ranks, stream, batch)[0, -1].cpu()
        cache.lengths += len(new)
        if temperature == 0:
            next_id = int(logits_V.argmax())
        else:
            probabilities = (logits_V / temperature).softmax(-1)
            next_id = int(torch.multinomial(probabilities, 1, generator=generator))
        if next_id == tokenizer.eod_id:
            break
        ids.append(next_id)
        new, batch = [next_id], decode_batch(cache)
    torch.distributed.destroy_process_group()
    return tokenizer.decode(ids)
