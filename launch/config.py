"""The run's configuration: strict models, one YAML file, dotted overrides, JSON Schema."""

import json
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mixtron.launch.config_errors import describe, nearest
from mixtron.launch.config_sections import (
    AnyData,
    CheckpointConfig,
    LoggingConfig,
    ScheduleConfig,
    TrainingConfig,
    WatchdogConfig,
)
from mixtron.launch.slurm.config import SlurmConfig
from mixtron.launch.whole_files import replaced
from mixtron.megatron_ext.config import (
    DeepSpeedConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Section,
)
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers import mixer_configs

AnyMixer = Annotated[reduce(or_, mixer_configs().values()), Field(discriminator="type")]


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
                    f"{nearest(name, self.mixers)}"
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
        lines = [describe(fault, section) for fault in error.errors()]
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
