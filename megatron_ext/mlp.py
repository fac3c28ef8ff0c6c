"""The layers' MLP."""

from megatron.core.transformer.mlp import MLP
from megatron.core.typed_torch import apply_module
from torch import Tensor

from mixtron.kernels.swiglu import swiglu, swiglu_factor
from mixtron.megatron_ext.recompute import computed_again


class SwiGLUMLP(MLP):
    """Megatron's MLP with SwiGLU in one kernel each way; its output may be computed again."""

    def forward(self, hidden_TBD: Tensor, **_):  # type: ignore[override]
        joined_TBF, bias = apply_module(self.linear_fc1)(hidden_TBD)
        if bias is not None:
            joined_TBF = joined_TBF + bias
        if "mlp_act" not in self.config.recomputed:  # type: ignore[attr-defined]
            return apply_module(self.linear_fc2)(swiglu(joined_TBF))
        if self.config.tensor_model_parallel_size == 1:
            return apply_module(self.linear_fc2)(swiglu_factor(joined_TBF))  # type: ignore[arg-type]
        active_TBF = swiglu(joined_TBF)
        with computed_again(lambda: (swiglu(joined_TBF),), (active_TBF,)):
            return apply_module(self.linear_fc2)(active_TBF)
