"""The layers around a mixer: norms, mixer and MLP on the residual stream."""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import apply_module
from torch import Tensor

from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.layer_graphs import LayerGraphs
from mixtron.megatron_ext.recompute import computed_again


class ResidualLayer(TransformerLayer):
    """h = x + mixer(norm(x)), then h + mlp(norm'(h)); the first sum and the second norm are one op.

    For RMSNorm without dropout, as Megatron's layer computes it. In training, with
    `training.layer_graphs`, by CUDA graphs.
    """

    graphs: LayerGraphs | None = None

    def forward(self, hidden_states: Tensor, packed_seq_params: Batch | None = None, **_):  # type: ignore[override]
        assert packed_seq_params is not None
        if self.graphs is not None and self.training and torch.is_grad_enabled():
            return self.graphs.run(self, hidden_states, packed_seq_params), None
        return self.compute(hidden_states, packed_seq_params), None

    def compute(self, hidden_TBD: Tensor, batch: Batch) -> Tensor:
        mixer = partial(self.self_attention, packed_seq_params=batch)
        hidden_TBD, (mixed, bias) = self._branch(self.input_layernorm, mixer, hidden_TBD)
        if bias is not None:
            mixed = mixed + bias
        mlp = apply_module(self.mlp)
        added, fed = self._branch(self.pre_mlp_layernorm, mlp, mixed, hidden_TBD)
        options = (self.training, self.config.bias_dropout_fusion)
        return self.mlp_bda(*options)(fed, added, self.hidden_dropout)

    def _branch(self, norm: Any, branch: Any, hidden: Tensor, added: Tensor | None = None) -> tuple:
        """hidden + added, and what the branch makes of its norm."""
        if "norm" not in self.config.recomputed:  # type: ignore[attr-defined]
            total, normed = norm(hidden, added)
            return total, branch(normed)
        if self.config.tensor_model_parallel_size == 1:
            factor = norm(hidden, added, factor=True)
            output = branch(factor)
            return factor.beside[0], output
        total, normed = norm(hidden, added)
        with computed_again(lambda: (norm(total)[1],), (normed,)):
            return total, branch(normed)


class ParallelResidualLayer(TransformerLayer):
    """x + mixer(norm(x)) + mlp(norm'(x)), as in GPT-NeoX."""

    def forward(self, hidden_states: Tensor, packed_seq_params: Batch | None = None, **_):  # type: ignore[override]
        mixed = self.self_attention(
            apply_module(self.input_layernorm)(hidden_states), packed_seq_params=packed_seq_params
        )
        fed = apply_module(self.mlp)(apply_module(self.pre_mlp_layernorm)(hidden_states))
        options = (self.training, self.config.bias_dropout_fusion)
        added = self.self_attn_bda(*options)(mixed, hidden_states, self.hidden_dropout)
        return self.mlp_bda(*options)(fed, added, self.hidden_dropout), None
