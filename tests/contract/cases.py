"""What the contract runs: models by mixer, streams of documents, parallel layouts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.data import Sample
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.mixers import mixer_configs

CONFIGS = Path(__file__).parents[2] / "configs"
MIXERS = list(mixer_configs())

RAGGED = ((20, 1, 30, 13), (1, 1, 40, 22))
DENSE = ((64,), (64,))
ALIGNED = ((32, 1, 31), (31, 1, 32))
"""A document begins exactly where a context rank of two does; and a short one ends there."""
FOUR = (*RAGGED, (64,), (7, 57))
"""As many micro-batches as an interleaved pipeline of two needs to run into itself."""


PLAIN = ParallelConfig()


@dataclass(frozen=True)
class Layout:
    """How one step is spread over ranks and micro-batches."""

    name: str
    parallel: ParallelConfig = PLAIN
    data: int = 1
    recompute: bool = False
    recomputed: tuple[str, ...] = ()
    sequences_per_micro_batch: int = 1

    @property
    def world_size(self) -> int:
        return self.parallel.model_ranks * self.data


ONE_RANK = Layout("one rank")
TP2 = Layout("tp2", ParallelConfig(tensor=2))
TP2_SP = Layout("tp2 sp", ParallelConfig(tensor=2, sequence=True))
PP2 = Layout("pp2", ParallelConfig(pipeline=2))
PP2_VPP2 = Layout("pp2 vpp2", ParallelConfig(pipeline=2, virtual_pipeline=2))
DP2 = Layout("dp2", data=2)
TP2_DP2 = Layout("tp2 dp2", ParallelConfig(tensor=2), data=2)
CP2 = Layout("cp2", ParallelConfig(context=2))
CP4 = Layout("cp4", ParallelConfig(context=4))
TP2_CP2 = Layout("tp2 cp2", ParallelConfig(tensor=2, context=2))
TP2_SP_PP2 = Layout("tp2 sp pp2", ParallelConfig(tensor=2, sequence=True, pipeline=2))
LAYOUTS = [
    TP2,
    TP2_SP,
    PP2,
    PP2_VPP2,
    DP2,
    TP2_DP2,
    TP2_SP_PP2,
    Layout("recompute", recompute=True),
    Layout("tp2 sp recompute", ParallelConfig(tensor=2, sequence=True), recompute=True),
    Layout("one micro-batch of two sequences", sequences_per_micro_batch=2),
]
CP2_DP2 = Layout("cp2 dp2", ParallelConfig(context=2), data=2)
CONTEXT_LAYOUTS = [CP2, CP4, TP2_CP2, CP2_DP2]
MIXER_INDEPENDENT = ["softmax_attention", "kla"]
"""What a mixer has no part in is checked with these two: the whole suite must stay short."""
WITHOUT_MIXERS_PART = [PP2_VPP2, TP2_DP2, CP2_DP2, TP2_SP_PP2]


def layouts_of(mixer: str) -> list[Layout]:
    """The layouts under which this mixer must compute what one rank computes."""
    splits_sequence = mixer_configs()[mixer].context_parallel
    layouts = LAYOUTS + (CONTEXT_LAYOUTS if splits_sequence else [])
    if mixer in MIXER_INDEPENDENT:
        return layouts
    return [layout for layout in layouts if layout not in WITHOUT_MIXERS_PART]


@dataclass(frozen=True)
class Case:
    """One model and the two sequences of one optimizer step."""

    mixer: str
    documents: tuple[tuple[int, ...], ...] = RAGGED
    """The lengths of each sequence's documents."""
    tied: bool = False
    vocab_multiple: int = 32
    norm: str = "rmsnorm"
    fault: str | None = None
    """A fault of `faults.py` that is put into the code under test."""
    name: str = ""
    """Of the file in configs/ when it is not the mixer's debug configuration."""
    overrides: tuple[str, ...] = ()

    def config(self, layout: Layout) -> RunConfig:
        """The mixer's configuration under a layout.

        Its matrices are drawn wider (0.5/sqrt(width) rather than 0.02), so that every nonlinearity
        bends. Adam's epsilon lies above the rounding error of gradients, because m/(sqrt(v)+eps)
        otherwise makes full steps out of noise and no two layouts stay together; the learning rate
        is small enough for rounding errors to stay small over the steps.
        """
        name = self.name or f"debug_{self.mixer}"
        config = load_config(CONFIGS / f"{name}.yaml", list(self.overrides))
        model = {
            "init_std": 0.5 * config.model.hidden_size**-0.5,
            "tied_embeddings": self.tied,
            "vocab_multiple": self.vocab_multiple,
            "norm": self.norm,
        }
        training = {
            "recompute": "full" if layout.recompute else "none",
            "micro_batch_sequences": layout.sequences_per_micro_batch,
            "global_batch_tokens": sum(map(sum, self.documents)),
        }
        return config.model_copy(
            update={
                "model": config.model.model_copy(update=model),
                "training": config.training.model_copy(update=training),
                "optimizer": config.optimizer.model_copy(
                    update={"lr": 1e-5, "eps": 1e-3, "clip_grad_norm": 0.1}
                ),
                "parallel": layout.parallel,
            }
        )

    def samples(self, vocab_size: int) -> list[Sample]:
        """The sequences. Of the last one only three labels count, unless it is one document."""
        generator = np.random.default_rng(7)
        samples = []
        for i, lengths in enumerate(self.documents):
            tokens = sum(lengths)
            mask = generator.random(tokens) < 0.9
            if i == len(self.documents) - 1 and len(lengths) > 1:
                mask[:] = False
                mask[[5, 30, tokens - 1]] = True
            starts = np.cumsum([0, *lengths[:-1]])
            samples.append(Sample(generator.integers(0, vocab_size, tokens + 1), starts, mask))
        return samples
