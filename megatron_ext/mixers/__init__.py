"""Discovery of mixers: a folder here is a mixer, and its name is its `type:` in a config file.

`<folder>/config.py` defines `Config` (light: no torch) and `<folder>/module.py` defines `Mixer`.
Nothing lists the mixers by hand.
"""

import importlib
import pkgutil
from functools import cache

from mixtron.megatron_ext.mixers.base import MixerConfig


@cache
def mixer_configs() -> dict[str, type[MixerConfig]]:
    """Every mixer's config class by type name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)
    return {name: importlib.import_module(f"{__name__}.{name}.config").Config for name in names}


def mixer_module(type_name: str):
    """The `Mixer` class of one type. Imports torch and Megatron-core."""
    return importlib.import_module(f"{__name__}.{type_name}.module").Mixer
