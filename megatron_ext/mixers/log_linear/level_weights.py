"""The lambdas: how much a token takes of each level of its past (arXiv 2605.06946)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.megatron_ext.mixers.log_linear.config import Config
from mixtron.megatron_ext.parameters import constant, replicated, uniform
from mixtron.megatron_ext.sharded_module import ShardedModule

ONE = 0.54
"""softplus(0.54) = 0.9992: every level starts with about the weight that it has without lambda."""


class LevelWeights(ShardedModule):
    """lambda [B, T, J, L] in fp32 from d [B, T, J L], L numbers a token and head.

        fixed         softplus(Lambda)                      Lambda [J, L], starts at 0.54
        linear        softplus(Lambda d)                    elementwise; Lambda starts at 1
        mlp_softplus  softplus(f(d W_1) W_2 + b)            W_1 [L, 2L], W_2 [2L, L], b [L]
        mlp_softmax   softmax over levels of the same

    f is the identity or GELU. The network is one for all heads, so every tensor-parallel rank holds
    it whole. W_2 starts at 0 and b at 0.54, so that lambda starts at 0.9992 (or 1/L); W_1 is
    uniform in +-1/sqrt(L).
    """

    def __init__(self, config, mixer: Config, tp_group):
        super().__init__(config, tp_group)
        self.kind, self.activation, L = mixer.level_weights, mixer.mlp_activation, mixer.L
        self.levels = L
        if self.kind in ("fixed", "linear"):
            start = ONE if self.kind == "fixed" else 1.0
            # One-dimensional, so that it is not weight-decayed: head after head.
            self.table = self.new_parameter(
                (mixer.value_heads * L // tp_group.size(),),
                constant(start),
                dtype=torch.float32,
                tensor_dim=0,
            )
            return
        bound, fp32 = L**-0.5, {"dtype": torch.float32}
        self.hidden_weight = self.new_parameter((L, 2 * L), uniform(-bound, bound), **fp32)
        self.output_weight = self.new_parameter((2 * L, L), constant(0.0), **fp32)
        self.output_bias = self.new_parameter((L,), constant(ONE), **fp32)

    def forward(self, d_BTE: Tensor | None, rows: torch.Size) -> Tensor:
        """Args: d, None when fixed; rows: B and T."""
        if d_BTE is None:
            lambda_JL = F.softplus(self.table).view(-1, self.levels)
            return lambda_JL.expand(*rows, *lambda_JL.shape)
        d_BTE = d_BTE.float()
        if self.kind == "linear":
            return F.softplus(self.table * d_BTE).unflatten(-1, (-1, self.levels))
        hidden_weight, output_weight, output_bias = replicated(
            self.tp_group, self.hidden_weight, self.output_weight, self.output_bias
        )
        h_BTJE = d_BTE.unflatten(-1, (-1, self.levels)) @ hidden_weight
        if self.activation == "gelu":
            h_BTJE = F.gelu(h_BTJE)
        logits_BTJL = h_BTJE @ output_weight + output_bias
        if self.kind == "mlp_softmax":
            return logits_BTJL.softmax(-1)
        return F.softplus(logits_BTJL)
