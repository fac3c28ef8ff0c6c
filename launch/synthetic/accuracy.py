"""How many answers of a synthetic task a model gets right, by length and by load."""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn

from mixtron.launch.synthetic.data import BLOCK
from mixtron.launch.synthetic.grid import Setting
from mixtron.launch.synthetic.task import Examples
from mixtron.megatron_ext.batch import make_batch
from mixtron.megatron_ext.config import ModelConfig
from mixtron.megatron_ext.model import forward
from mixtron.megatron_ext.parallel import Ranks

TOKENS_AT_ONCE = 1 << 14
"""Of a forward pass, if a sequence is not longer itself."""


@dataclass(frozen=True)
class Score:
    sequences: int
    answers: int
    accuracy: float
    """Of the answers."""
    sequence_accuracy: float
    """Sequences with every answer right."""
    chance: float


@torch.no_grad()
def score(
    chunk: nn.Module,
    model: ModelConfig,
    ranks: Ranks,
    setting: Setting,
    *,
    sequences: int,
    seed: int,
) -> Score:
    """Greedy answers to sequences that are no training or validation samples.

    Args:
        chunk: the whole model on this rank.
    """
    chunk.eval()
    right_N, answers = [], 0
    right_answers = 0
    at_once = max(1, min(BLOCK, TOKENS_AT_ONCE // setting.length))
    for first in range(0, sequences, at_once):
        indices = np.arange(first, min(first + at_once, sequences))
        examples = setting.task.examples(seed, "evaluation", indices, setting.length)
        right_NT = answered_right(chunk, model, ranks, examples)
        right_answers += int((right_NT & examples.mask_NT).sum())
        answers += int(examples.mask_NT.sum())
        right_N.append((right_NT | ~examples.mask_NT).all(1))
    return Score(
        sequences=sequences,
        answers=answers,
        accuracy=right_answers / answers,
        sequence_accuracy=float(np.concatenate(right_N).mean()),
        chance=setting.task.chance(),
    )


def answered_right(
    chunk: nn.Module, model: ModelConfig, ranks: Ranks, examples: Examples
) -> np.ndarray:
    """bool [N, T]: whether the likeliest token is the label."""
    count, length = examples.inputs_NT.shape
    batch = make_batch([length] * count, step=0, device=ranks.device)
    stream = torch.from_numpy(examples.inputs_NT).reshape(1, -1).to(ranks.device)
    logits_BTV = forward(chunk, model, ranks, stream, batch)
    said = logits_BTV.argmax(-1).view(count, length).cpu().numpy()
    return said == examples.labels_NT


def evaluate_settings(
    chunk: nn.Module,
    model: ModelConfig,
    ranks: Ranks,
    settings: list[Setting],
    *,
    sequences: int,
    seed: int,
) -> list[dict]:
    """A row for each setting, of JSON types."""
    rows = []
    for setting in settings:
        result = score(chunk, model, ranks, setting, sequences=sequences, seed=seed)
        rows.append({"setting": setting.parameters, **asdict(result)})
    return rows
