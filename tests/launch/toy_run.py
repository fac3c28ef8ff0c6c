"""A small model that ranks train on real text, and what is compared of it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from mixtron.launch.config import RunConfig, load_config
from mixtron.megatron_ext.batch import make_batch
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.mixers.kla.config import Config as KLA
from mixtron.megatron_ext.model import build_model, forward
from mixtron.megatron_ext.optimizer import build_optimizer, clip_and_step, wrap_model
from mixtron.megatron_ext.optimizer_state import optimizer_shards, weight_shards
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel

ROOT = Path(__file__).parents[2]
SEQUENCE = 32
SEQUENCES_PER_STEP = 2


@dataclass
class ToyRun:
    config: RunConfig
    ranks: Ranks
    wrapped: list
    optimizer: MegatronOptimizer
    step: int = 0

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        return [self._train_step() for _ in range(steps)]

    def _train_step(self) -> tuple[float, float]:
        for chunk in self.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        first = self.step * SEQUENCES_PER_STEP
        own = range(self.ranks.data_rank, SEQUENCES_PER_STEP, self.ranks.data_size)
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[iter([first + i for i in own]) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(own),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        total = torch.tensor(float(sum(losses)), dtype=torch.float64)
        dist.all_reduce(total)
        norm, applied = clip_and_step(self.optimizer, 1.0)
        assert applied
        self.step += 1
        tokens = SEQUENCES_PER_STEP * SEQUENCE * self.ranks.tensor_size
        return float(total) / tokens, norm

    def _forward_step(self, indices, chunk):
        index = next(indices)
        ranks = self.ranks
        ids = text_ids(index)
        cut = 5 + index % 20
        batch = make_batch(
            [cut, SEQUENCE - cut],
            step=self.step,
            device=ranks.device,
            context_rank=ranks.context_rank,
            context_size=ranks.context_size,
        )
        share = SEQUENCE // ranks.context_size
        mine = slice(ranks.context_rank * share, (ranks.context_rank + 1) * share)
        tokens_BT, labels_BT = ids[None, :-1][:, mine], ids[None, 1:][:, mine]
        scored = labels_BT, torch.ones_like(labels_BT, dtype=torch.bool)
        output = forward(chunk, self.config.model, ranks, tokens_BT, batch, *scored)
        count = torch.tensor(share, dtype=torch.int)
        return output, lambda loss: (loss, count, loss.detach().double())

    def sha256(self) -> str:
        """Of this rank's parameters and its share of the optimizer's state."""
        digest = hashlib.sha256()
        for chunk in self.wrapped:
            for parameter in chunk.module.parameters():
                digest.update(parameter.detach().float().numpy().tobytes())
        model = {i: weight_shards(c.module, self.ranks) for i, c in enumerate(self.wrapped)}
        for shard in optimizer_shards(self.optimizer, model):
            digest.update(shard.data.numpy().tobytes())  # type: ignore[union-attr]
        return digest.hexdigest()


def text_ids(index: int) -> torch.Tensor:
    """A stretch of this repository's license, one id a character: [SEQUENCE + 1]."""
    text = (ROOT / "LICENSE").read_text()
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    start = index * SEQUENCE % (len(text) - SEQUENCE)
    return torch.tensor([ids[c] for c in text[start : start + SEQUENCE + 1]])


def toy_config(parallel: ParallelConfig, **model) -> RunConfig:
    """Four layers of three different mixers, a vocabulary of 101 padded to 128.

    Adam's epsilon lies above the rounding error of gradients: else layouts drift apart by it.
    """
    config = load_config(ROOT / "configs/debug_softmax_attention.yaml")
    kla = KLA(heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=3)
    model = {"hidden_size": 32, "ffn_hidden_size": 66, "pattern": ["full", "kla", "window"]} | model
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "mixers": config.mixers | {"kla": kla},
            "optimizer": config.optimizer.model_copy(update={"eps": 1e-3, "lr": 1e-2}),
            "parallel": parallel,
        }
    )


def build(parallel: ParallelConfig, *, seed: int = 3, bf16: bool = False, **model) -> ToyRun:
    config = toy_config(parallel, **model)
    ranks = init_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        seed=seed,
        device=init_distributed(),
    )
    chunks = build_model(
        config.model, config.mixers, parallel, ranks, seed=seed, bf16=bf16, max_tokens=SEQUENCE
    )
    wrapped = wrap_model(chunks, parallel, ranks)
    optimizer = build_optimizer(wrapped, config.optimizer, ranks, bf16=bf16)
    return ToyRun(config, ranks, wrapped, optimizer)
