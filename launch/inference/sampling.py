"""Which token comes next."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8
    """0 takes the likeliest."""
    top_k: int | None = None
    """Only this many of the likeliest."""
    top_p: float = 1.0
    """Only the fewest of the likeliest that together have this probability."""
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature}: at least 0, which takes the best")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: at least 1")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: above 0 and at most 1")

    def generator(self, sequence: int) -> torch.Generator:
        """A sequence's own: what is drawn for it does not depend on the others in the batch."""
        return torch.Generator().manual_seed((self.seed << 20) + sequence)

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """From fp32 logits on the CPU."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probability_V = (logits_V.double() / self.temperature).softmax(-1)
        likeliest_V, id_V = probability_V.sort(descending=True, stable=True)
        before_V = likeliest_V.cumsum(-1) - likeliest_V
        kept_V = before_V < self.top_p
        if self.top_k is not None:
            kept_V[self.top_k :] = False
        return int(id_V[torch.multinomial(likeliest_V * kept_V, 1, generator=generator)])
