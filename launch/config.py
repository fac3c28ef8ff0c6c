"""The run's configuration: strict models, one YAML file, dotted overrides, JSON Schema."""

import difflib
import json
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mixtron.launch.slurm.config import SlurmConfig
from mixtron.launch.synthetic.task import Task, tasks
from mixtron.launch.whole_files import replaced
from mixtron.megatron_ext.config import (
    Count,
    DeepSpeedConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Positive,
    Section,
)
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers import mixer_configs

AnyMixer = Annotated[reduce(or_, mixer_configs().values()), Field(discriminator="type")]
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


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    run_dir: str
    """Everything the run writes: resolved config, checkpoints, metrics, TensorBoard."""
    model: ModelConfig
    mixers: Annotated[dict[str, AnyMixer], Field(min_length=1)]
    parallel: ParallelConfig = ParallelConfig()
    engine: Literal["megatron", "deepspeed"] = "megatron"
    """What holds gradients and optimizer: Megatron-core's distributed optimizer, or ZeRO."""
    deepspeed: DeepSpeedConfig | None = None
    """Options of engine=deepspeed; null takes their defaults."""
    data: AnyData
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig = LoggingConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    slurm: SlurmConfig | None = None

    @model_validator(mode="after")
    def _pattern(self):
        for name in self.model.pattern:
            if name not in self.mixers:
                raise ValueError(
                    f"model.pattern: {name!r} is not defined under mixers"
                    f"{_nearest(name, self.mixers)}"
                )
        return self

    @model_validator(mode="after")
    def _engine(self):
        if self.deepspeed is not None and self.engine != "deepspeed":
            raise ValueError(f"deepspeed: is for engine=deepspeed, and engine={self.engine}")
        return self

    @model_validator(mode="after")
    def _mixers_of_this_length(self):
        for name, mixer in self.mixers.items():
            self.mixers[name] = mixer.for_sequence_length(name, self.data.sequence_length)
        return self

    @property
    def zero(self) -> DeepSpeedConfig | None:
        """DeepSpeed's options where it is the engine."""
        return None if self.engine == "megatron" else self.deepspeed or DeepSpeedConfig()

    @property
    def global_batch_sequences(self) -> int:
        return self.training.global_batch_tokens // self.data.sequence_length


def load_config(
    path: str | Path,
    overrides: list[str] | None = None,
    slurm_profile: dict[str, Any] | None = None,
) -> RunConfig:
    """Reads one YAML 1.2 file, applies `key.path=value` overrides and validates strictly.

    Args:
        slurm_profile: keys of `slurm:` that the file may replace.
    Raises:
        ConfigError: one line a fault, each with its path and the nearest valid key or values.
    """
    raw = load_mapping(path)
    if slurm_profile is not None:
        _put_below(raw, slurm_profile)
    for override in overrides or []:
        _apply_override(raw, override)
    return parse_config(raw)


def load_mapping(path: str | Path) -> dict:
    """A YAML 1.2 file that holds a mapping. Raises ConfigError, naming the file."""
    try:
        raw = YAML(typ="safe", pure=True).load(Path(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(raw).__name__}")
    return raw


def parse_config(raw: dict) -> RunConfig:
    """Validates what a config file holds. Raises ConfigError as `load_config` does."""
    return parse(RunConfig, raw)


def parse[S: Section](section: type[S], raw: dict) -> S:
    """Validates a file's content. Raises ConfigError: one line a fault, with its path."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        lines = [_describe(fault, section) for fault in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def dump_config(config: RunConfig, path: str | Path) -> None:
    """Writes every resolved value, the file whole; `load_config` reads it back unchanged."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    with replaced(Path(path)) as file:
        yaml.dump(config.model_dump(mode="json"), file)


def json_schema() -> str:
    """JSON Schema of a config file, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"


def _put_below(raw: dict, profile: dict[str, Any]) -> None:
    """Gives `raw["slurm"]` the profile's keys that it has not itself; variables one by one."""
    own = raw.get("slurm") or {}
    if not isinstance(own, dict):
        return  # refused with the rest
    merged = profile | own
    if isinstance(profile.get("environment"), dict) and isinstance(own.get("environment"), dict):
        merged["environment"] = profile["environment"] | own["environment"]
    raw["slurm"] = merged


def _apply_override(raw: dict, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key.path=value")
    try:
        value = YAML(typ="safe", pure=True).load(text) if text else None
    except YAMLError as error:
        raise ConfigError(f"override {override!r}: {' '.join(str(error).split())}") from None
    node: Any = raw
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        if isinstance(node, list):
            node = node[_index(node, part, override)]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(f"override {override!r}: {path} holds a value, not a section")
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _index(node: list, part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} is not an index below {len(node)}")
    return int(part)


def _describe(error: Any, root: type[Section]) -> str:
    """One line for one pydantic error: path, what is wrong, the nearest valid key or values."""
    loc, model = _follow(error["loc"], root)
    path = ".".join(map(str, loc))
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_nearest(str(loc[-1]), _keys(model))}{_choices(model)}"
    if kind == "missing":
        return f"{path}: required key is missing"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = context["discriminator"].strip("'")
        noun, known = ("mixer", mixer_configs()) if key == "type" else ("task", tasks())
        choices = f"{noun}s: {', '.join(known)}"
        if kind == "union_tag_not_found":
            return f"{path}.{key}: required key is missing; {choices}"
        tag = context["tag"]
        return f"{path}.{key}: no {noun} {tag!r}{_nearest(tag, known)}; {choices}"
    if kind == "value_error":
        message = str(context["error"])
        return f"{path}: {message}" if path else message
    return f"{path}: {error['msg'].lower()}, found {error['input']!r}"


def _follow(loc: tuple, root: type[Section]) -> tuple[list, Any]:
    """An error's path as it stands in the file, and the model of the section that it ends in.

    Pydantic puts the tag of a union into the path, which is no key of the file.
    """
    path, model, tags = [], root, {}
    for part in loc:
        if part in tags:
            model, tags = tags[part], {}
        else:
            path.append(part)
            model, tags = _section_under(model, part), _tags_at(path)
    return path, model


def _tags_at(path: list) -> dict[str, Any]:
    """The models that a section may have, by tag."""
    if path == ["data"]:
        return DATA_TAGS
    if path == ["training", "recompute"]:
        return dict.fromkeys(RECOMPUTE_TAGS, TrainingConfig)
    if path[0] == "mixers" and len(path) == 2:
        return mixer_configs()
    return tasks() if path[-1] == "synthetic" else {}


def _section_under(model: Any, key: Any) -> Any:
    """The model of a section's value, or of its entries; the section's own when it has none."""
    if not isinstance(key, str) or key not in model.model_fields:
        return model
    annotation = model.model_fields[key].annotation
    nested = [annotation, *getattr(annotation, "__args__", ())]
    return next((a for a in nested if isinstance(a, type) and issubclass(a, BaseModel)), model)


def _keys(model: Any) -> list[str]:
    """The keys that a section takes, as they stand in a file."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _choices(model: Any) -> str:
    """All parameters, for a task: they are few and in no other list."""
    if not issubclass(model, Task):
        return ""
    parameters = [name for name in model.model_fields if name != "task"]
    return f"; {model.model_fields['task'].default} takes: {', '.join(parameters)}"


def _nearest(word: str, choices) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
