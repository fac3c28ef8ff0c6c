"""The delta rule: one op for KLA, Gated DeltaNet, DeltaNet and Longhorn."""

from mixtron.kernels.delta_rule.decode import (
    StepSize,
    delta_rule_decode,
    delta_rule_step,
)
from mixtron.kernels.delta_rule.gates import decay_and_step_size
from mixtron.kernels.delta_rule.op import delta_rule, delta_rule_segment_map
from mixtron.kernels.delta_rule.reference import delta_rule_reference

__all__ = [
    "StepSize",
    "decay_and_step_size",
    "delta_rule",
    "delta_rule_decode",
    "delta_rule_reference",
    "delta_rule_segment_map",
    "delta_rule_step",
]
