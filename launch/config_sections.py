"""The sections of a run's configuration that are not of a mixer, the model or SLURM."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mixtron.launch.synthetic.task import tasks
from mixtron.megatron_ext.config import Count, Positive, Section

AnyTask = Annotated[reduce(or_, tasks().values()), Field(discriminator="task")]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainSource(Section):
    path: str
    """Shard prefix, without .bin/.idx."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    split: str | None = None
    """One of `data.split`; null takes every document."""


class ValidationSource(Section):
    path: str
    split: str | None = None
    sequences: Positive | None = None
    """Evaluate the first this many samples; null evaluates all."""


class DataConfig(Section):
    sequence_length: Positive
    tokenizer: str
    """A SentencePiece .model or a Hugging Face tokenizer.json (or its folder)."""
    eod_token: str | None = None
    """End-of-document token of a Hugging Face tokenizer that does not name one itself."""
    train: Annotated[list[TrainSource], Field(min_length=1)]
    validation: dict[str, ValidationSource] = {}
    split: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    """Fractions of documents, chosen by a hash of the document's number; they sum to at most 1."""
    seed: Count = 1234
    allow_changed: bool = False
    """Resume although the corpora or their weights differ from those in the checkpoint."""

    @model_validator(mode="after")
    def _splits(self):
        if sum(self.split.values()) > 1 + 1e-9:
            raise ValueError(f"split: the fractions sum to {sum(self.split.values())}, above 1")
        for key, source in [*enumerate(self.train), *self.validation.items()]:
            if source.split is not None and source.split not in self.split:
                raise ValueError(
                    f"source {key}: split {source.split!r} is not one of data.split "
                    f"({', '.join(self.split) or 'which is empty'})"
                )
        return self


class SyntheticValidationSource(Section):
    synthetic: AnyTask
    sequences: Positive = 1000


class SyntheticDataConfig(Section):
    """Data of a synthetic task: no corpus, no tokenizer, samples that never repeat."""

    sequence_length: Positive
    synthetic: AnyTask
    """`task` and its parameters, see launch/synthetic/README.md."""
    validation: dict[str, SyntheticValidationSource] = {}
    seed: Count = 1234
    allow_changed: bool = False
    """Resume although the task differs from the checkpoint's."""


DATA_TAGS = {"corpora": DataConfig, "synthetic data": SyntheticDataConfig}


def _data_tag(data: Any) -> str:
    synthetic = "synthetic" in data if isinstance(data, dict) else hasattr(data, "synthetic")
    return "synthetic data" if synthetic else "corpora"


AnyData = Annotated[
    Annotated[DataConfig, Tag("corpora")] | Annotated[SyntheticDataConfig, Tag("synthetic data")],
    Discriminator(_data_tag),
]


class ScheduleConfig(Section):
    type: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Count = 0
    decay_steps: Positive | None = None
    """wsd: length of the final decay. cosine, linear: the step it ends at, by default the last."""
    min_lr_fraction: Fraction = 0.1

    @model_validator(mode="after")
    def _decay(self):
        if self.type == "wsd" and self.decay_steps is None:
            raise ValueError(
                "schedule.type=wsd needs schedule.decay_steps, the final decay's length"
            )
        if self.type == "constant" and self.decay_steps is not None:
            raise ValueError("schedule.type=constant takes no schedule.decay_steps")
        return self


Part = Literal["norm", "conv", "gate", "mlp_act"]
"""As megatron_ext/recompute.py has it, which needs torch."""
Parts = Annotated[list[Part], Field(min_length=1)]
RECOMPUTE_TAGS = ("layers", "parts")
Recompute = Annotated[
    Annotated[Literal["none", "full"], Tag("layers")] | Annotated[Parts, Tag("parts")],
    Discriminator(lambda value: RECOMPUTE_TAGS[isinstance(value, list)]),
]


class TrainingConfig(Section):
    steps: Positive
    global_batch_tokens: Positive
    """Tokens an optimizer step sees over all ranks and micro-batches."""
    micro_batch_sequences: Positive = 1
    precision: Literal["bf16", "fp32"] = "bf16"
    recompute: Recompute = "none"
    """full: keep only each layer's input and run the layer again in backward. A list of parts, of
    which nothing is kept that is cheap to compute: norm, KLA's conv and gate, mlp_act (SwiGLU)."""
    layer_graphs: bool = False
    """Record each layer's forward and backward as CUDA graphs, which cost the host next to nothing:
    for small micro-batches, on which a GPU waits for the host."""
    seed: Count = 1234
    eval_every_steps: Count = 0
    """0 evaluates only at the end (when there are validation sets)."""
    max_skipped_steps: Count = 10
    """Steps in a row with a non-finite loss or gradient that are skipped before the run stops."""
    deterministic: bool = False
    """The same bits from run to run on the same GPUs and layout, at some cost in speed."""
    debug: bool = False
    """Compare over ranks, at every step, the permutations that stochastic mixers draw."""
    max_duration_s: PositiveFloat | None = None
    """Saves and stops, as at a signal, this long after the ranks began; null: never."""
    skip_steps: list[Annotated[list[Positive], Field(min_length=2, max_length=2)]] = []
    """Ranges [first, last] of steps whose batches are passed over, as after a loss spike."""

    @model_validator(mode="after")
    def _skip_steps(self):
        for first, last in self.skip_steps:
            if first > last:
                raise ValueError(f"skip_steps: [{first}, {last}] ends before it begins")
        return self

    @property
    def recomputed(self) -> list[Part]:
        """The parts of layers that are computed again where not whole layers are."""
        return self.recompute if isinstance(self.recompute, list) else []

    def skips(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.skip_steps)


class CheckpointConfig(Section):
    save_every_steps: Positive
    keep: Annotated[int, Field(ge=2)] | None = 3
    """Newest complete checkpoints that are kept; null keeps all."""
    keep_every_steps: Positive | None = None
    """Checkpoints of the steps that this divides are kept for ever."""
    asynchronous: bool = True
    """Copy to host memory and write while training goes on; false waits for the disk."""
    resume: str = "auto"
    """auto: the newest complete checkpoint of the run folder, or a new start; none; or a path."""
    branch_from: str | None = None
    """Another run's checkpoint that a new run folder continues, with optimizer and step. Data,
    optimizer, schedule and length may differ."""
    init_from: str | None = None
    """A checkpoint that a new run folder takes its first weights from, at step 0."""
    init_allow: list[str] = []
    """Patterns of parameters that `init_from` may lack, have beyond the model or in another shape:
    they start as drawn."""
    allow_changes: list[str] = []
    """Keys (or sections) of this file that may differ from those in the resumed checkpoint."""

    @model_validator(mode="after")
    def _one_start(self):
        if self.branch_from is not None and self.init_from is not None:
            raise ValueError("branch_from and init_from both name a start; give one of them")
        if self.init_allow and self.init_from is None:
            raise ValueError("init_allow is for init_from, which is not set")
        return self


class LoggingConfig(Section):
    every_steps: Positive = 1
    ranks_every_steps: Count = 100
    """How often the ranks' speeds are compared, so that a slow node is seen; 0: never."""
    tensorboard: bool = True


class WatchdogConfig(Section):
    """How long a rank may go without a sign of life, by what it is doing, before it hangs."""

    start_s: PositiveFloat = 1800.0
    """Imports, process groups, building the model."""
    load_s: PositiveFloat = 1800.0
    first_step_s: PositiveFloat = 1800.0
    """Kernels are compiled in it."""
    step_s: PositiveFloat = 300.0
    evaluate_s: PositiveFloat = 300.0
    """One round of micro-batches."""
    save_s: PositiveFloat = 1800.0

    def limits_s(self) -> dict[str, float]:
        """By phase."""
        return {name.removesuffix("_s"): limit for name, limit in self}
