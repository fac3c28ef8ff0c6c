"""What is asked: a checkpoint, its config with changes, its tokenizer; nothing is loaded yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mixtron.data_prep.tokenizer import Tokenizer, load_tokenizer
from mixtron.launch.checkpoint_files import read_manifest
from mixtron.launch.checks import check_shape
from mixtron.launch.config import RunConfig
from mixtron.launch.config_sections import DataConfig
from mixtron.launch.spectral.runs import config_of, is_run, newest_checkpoint
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers import mixer_configs
from mixtron.megatron_ext.mixers.base import MixerConfig


@dataclass(frozen=True)
class Source:
    """A model that can be loaded on `tensor` ranks, and its tokenizer."""

    checkpoint: Path
    config: RunConfig
    tokenizer: Tokenizer

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that every layer knows what to do with; None: any."""
        limits = [
            self.config.mixers[name].longest_sequence(self.config.data.sequence_length)
            for name in self.config.model.pattern
        ]
        return min((limit for limit in limits if limit is not None), default=None)


def find_source(
    path: Path,
    *,
    tensor: int = 1,
    tokenizer: Path | None = None,
    override_mixers: Sequence[str] = (),
) -> Source:
    """The model of a run's newest complete checkpoint, or of a checkpoint.

    Args:
        tensor: tensor-parallel ranks that it will be loaded on.
        tokenizer: where the run's tokenizer is now; by default its copy in the run folder.
        override_mixers: see `with_mixers`.

    Raises:
        ConfigError, DataError, CheckpointError: one line, exit code 2.
    """
    if not is_run(path):
        raise ConfigError(
            f"{path}: neither a run folder (checkpoints/) nor a checkpoint (manifest.json)"
        )
    checkpoint = newest_checkpoint(path)
    config = with_mixers(config_of(checkpoint), override_mixers)
    config = config.model_copy(update={"parallel": ParallelConfig(tensor=tensor)})
    check_shape(config)
    return Source(checkpoint, config, _tokenizer(path, checkpoint, config, tokenizer))


def _tokenizer(path: Path, checkpoint: Path, config: RunConfig, given: Path | None) -> Tokenizer:
    """Raises ConfigError for another tokenizer than the checkpoint's."""
    if not isinstance(config.data, DataConfig):
        raise ConfigError(f"{path}: trained on a synthetic task, it has no tokenizer")
    if given is None:
        named = Path(config.data.tokenizer)
        copy = checkpoint.parents[1] / "tokenizer" / named.name
        given = next((p for p in (copy, copy.with_name("tokenizer.json")) if p.exists()), named)
    tokenizer = load_tokenizer(given, eod_token=config.data.eod_token)
    trained_with = read_manifest(checkpoint)["state"].get("tokenizer_sha256")
    if trained_with is not None and trained_with != tokenizer.sha256:
        raise ConfigError(
            f"{given}: another tokenizer (sha256 {tokenizer.sha256[:12]}) than the one that "
            f"{checkpoint} was trained with ({trained_with[:12]})"
        )
    return tokenizer


def with_mixers(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with mixers replaced, their weights kept: `NAME={type: TYPE, key: value, ...}`.

    Keys that are not given are those of the mixer that is replaced, as far as the new type has
    them. Whether the weights fit is seen when they are loaded.

    Raises:
        ConfigError: no such mixer, type or key.
    """
    mixers = dict(config.mixers)
    for override in overrides:
        name, _, text = override.partition("=")
        if name not in mixers:
            raise ConfigError(
                f"--override-mixer {override!r}: no mixer {name!r}; "
                f"the model has: {', '.join(mixers)}"
            )
        new = _replaced(mixers[name], text, override)
        mixers[name] = new.for_sequence_length(name, config.data.sequence_length)
    return config.model_copy(update={"mixers": mixers})


def _replaced(mixer: MixerConfig, text: str, override: str) -> MixerConfig:
    try:
        changes = YAML(typ="safe", pure=True).load(text) if text else None
    except YAMLError:
        changes = None
    if not isinstance(changes, dict):
        raise ConfigError(f"--override-mixer {override!r}: expected NAME={{key: value, ...}}")
    known = mixer_configs()
    kind = changes.get("type", mixer.type)
    if kind not in known:
        raise ConfigError(
            f"--override-mixer {override!r}: no mixer {kind!r}; mixers: {', '.join(known)}"
        )
    # Each type of mixer has kernels of its own.
    own = {"type"} if kind == mixer.type else {"type", "kernel"}
    kept = {
        key: value
        for key, value in mixer.model_dump(mode="json").items()
        if key in known[kind].model_fields and key not in own
    }
    try:
        return known[kind].model_validate(kept | changes)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"--override-mixer {override!r}: {key}: {fault['msg'].lower()}") from None
