"""What a mixer must provide.

A mixer is two classes. `Config` (this file's `MixerConfig`) is what a person writes under `mixers:`
and everything that can be known without building a model: parameters, FLOPs, state, memory, and
what the mixer refuses. `Mixer` (a Megatron module, see `module.py` of any mixer) maps hidden states
[T, 1, D] to [T, 1, D] under tensor, sequence and context parallelism.
"""

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from mixtron.megatron_ext.errors import ConfigError


class MixerConfig(BaseModel):
    """Options of one mixer. Subclasses add `type: Literal[<folder name>]` and their own fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: str

    context_parallel: ClassVar[bool] = False
    """Whether the mixer runs with its sequence split over ranks."""

    def for_sequence_length(self, name: str, sequence_length: int) -> Self:
        """The options as they are in a run with samples of this many tokens.

        Raises:
            ValueError: they do not fit, naming the key (`mixers.<name>.<field>`) and the value.
        """
        return self

    def longest_sequence(self, trained_tokens: int) -> int | None:
        """Tokens of the longest sequence whose positions a model trained on samples of
        `trained_tokens` has met, or that its state can hold; None: there is no such limit."""
        return None

    def parameters(self, hidden_size: int) -> dict[str, int]:
        """Trainable parameters of one layer's mixer by part, over all tensor-parallel ranks."""
        raise NotImplementedError

    def flops_per_token(self, hidden_size: int, sequence_length: int) -> float:
        """Forward FLOPs a token (a multiply-add is 2), averaged over a document of this length."""
        raise NotImplementedError

    def state_bytes(self, context_tokens: int, bytes_per_element: int) -> int:
        """Bytes one layer keeps for decoding one sequence after `context_tokens`."""
        raise NotImplementedError

    def activation_bytes_per_token(
        self, hidden_size: int, tensor: int, bytes_per_element: int
    ) -> float:
        """Bytes one rank keeps a token for backward, of what tensor parallelism splits.

        From the input projection's output to the output projection's input, both included.
        """
        raise NotImplementedError

    def convolution_bytes_per_token(self, tensor: int, bytes_per_element: int) -> float:
        """Of `activation_bytes_per_token`, what training.recompute=[conv] computes again: the short
        convolution's output. 0: the mixer has none, or keeps it."""
        return 0.0

    def gated_bytes_per_token(self, bytes_per_element: int) -> float:
        """Of `activation_bytes_per_token`, what training.recompute=[gate] computes again: the gated
        norm of the output. 0: the mixer has none, or keeps it."""
        return 0.0

    def working_bytes(
        self, hidden_size: int, tokens: int, tensor: int, bytes_per_element: int
    ) -> float:
        """Bytes one rank needs in passing in this layer's backward, beyond what it keeps for it.

        At the worst moment, which may be negative: what is kept is freed piece by piece.
        """
        raise NotImplementedError

    def context_bytes_sent(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        """Bytes one rank sends to other context ranks in a forward with `tokens` of its own.

        Backward sends as many: each exchange's transpose moves the same data back.

        Args:
            longest: tokens of the longest document.
        """
        raise NotImplementedError

    @property
    def exchanges_again(self) -> bool:
        """Whether a forward that is computed again in backward sends that again."""
        return True

    def context_bytes_kept(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        """Bytes one of several context ranks keeps for backward beyond what
        `activation_bytes_per_token` says. Arguments of `context_bytes_sent`."""
        return 0.0

    def context_bytes_needed(
        self, tokens: int, tensor: int, context: int, element: int, longest: int
    ) -> float:
        """Bytes one of several context ranks needs in passing in backward beyond what
        `working_bytes` says. Arguments of `context_bytes_sent`."""
        return 0.0

    def check(self, name: str, hidden_size: int, tensor: int, context: int) -> None:
        """Raises ConfigError for what this mixer cannot do, naming the key and the value."""
        if context > 1 and not self.context_parallel:
            raise ConfigError(
                f"parallel.context={context}: mixer {name!r} (type {self.type!r}) has no context "
                "parallelism; use parallel.context=1"
            )

    @property
    def recordable(self) -> bool:
        """Whether a layer launches the same for all batches of a shape (see layer_graphs.py)."""
        return False

    context_recordable: ClassVar[bool] = False
    """Whether that holds as well where its sequence is split over ranks."""

    def reads_lengths(self, precision: str) -> bool:
        """Whether it does so only while the documents' lengths stay the same."""
        return False

    def check_device(self, name: str, device_type: str, precision: str) -> None:
        """Raises ConfigError for a device ("cuda", "cpu") or a precision ("bf16", "fp32") that a
        form chosen in the config cannot run on."""

    def check_deterministic(self, name: str) -> None:
        """Raises ConfigError for a form chosen in the config that adds in no fixed order."""


TRITON_DIMS = (64, 128)


def require_triton_dims(kernel: str, key_dim: int, value_dim: int) -> None:
    """Refuses head widths that kernel=triton of the state mixers is not written for."""
    if kernel == "triton" and not {key_dim, value_dim} <= set(TRITON_DIMS):
        raise ValueError(
            f"kernel=triton takes key_dim and value_dim of 64 or 128, not {key_dim} and "
            f"{value_dim}; or use kernel=chunk"
        )


def require_triton_device(name: str, kernel: str, device_type: str, precision: str) -> None:
    """Refuses kernel=triton anywhere but on a GPU in bf16."""
    if kernel == "triton" and (device_type != "cuda" or precision != "bf16"):
        raise ConfigError(
            f"mixers.{name}.kernel=triton runs on a GPU in bf16, not on {device_type} in "
            f"{precision}; set mixers.{name}.kernel=chunk"
        )


def require_divisible(name: str, field: str, value: int, tensor: int) -> None:
    """Refuses a head count that tensor parallelism cannot split evenly."""
    if value % tensor:
        fits = [t for t in range(1, value + 1) if value % t == 0]
        raise ConfigError(
            f"mixers.{name}.{field}={value} is not divisible by parallel.tensor={tensor}; "
            f"values of parallel.tensor that work: {', '.join(map(str, fits))}"
        )


def require_context_divides(name: str, field: str, local: int, tensor: int, context: int) -> None:
    """Refuses a number of context ranks that cannot exchange a rank's heads for tokens evenly."""
    if local % context:
        fits = [c for c in range(1, local + 1) if local % c == 0]
        raise ConfigError(
            f"parallel.context={context}: mixers.{name}.{field} over parallel.tensor={tensor} "
            f"leaves {local} heads, which context ranks exchange for tokens; values of "
            f"parallel.context that work: {', '.join(map(str, fits))}"
        )


def require_gpu_and_bf16(name: str, otherwise: str, device_type: str, precision: str) -> None:
    """Refuses kernel=triton where it cannot run; `otherwise` is the form that can."""
    if device_type != "cuda" or precision != "bf16":
        raise ConfigError(
            f"mixers.{name}.kernel=triton runs on a GPU in bf16, not on {device_type} in "
            f"{precision}; set mixers.{name}.kernel={otherwise}"
        )
