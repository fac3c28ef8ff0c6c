"""Options of the Forgetting Transformer's attention."""

from typing import Literal

from mixtron.megatron_ext.mixers.path.config import PathFamilyConfig


class Config(PathFamilyConfig):
    type: Literal["fox"] = "fox"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def rank(self) -> int:
        return 0

    @property
    def gated(self) -> bool:
        return True
