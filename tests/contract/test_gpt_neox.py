"""GPT-NeoX's form of a layer trains the same model under every layout: parallel branches, GELU,
biases on every projection, RoPE on a part of each head."""

from dataclasses import dataclass

import pytest

from mixtron.launch.config import RunConfig
from tests.contract.cases import PP2, TP2, TP2_SP, Case, Layout
from tests.contract.checks import check_agrees, check_parameter_count, check_reshard


@dataclass(frozen=True)
class GptNeoxCase(Case):
    mixer: str = "softmax_attention"

    def config(self, layout: Layout) -> RunConfig:
        config = super().config(layout)
        model = {"mlp": "gelu", "mlp_bias": True, "parallel_residual": True, "norm": "layernorm"}
        options = {"qkv_bias": True, "output_bias": True, "rotary_dim": 4}
        mixers = {name: mixer.model_copy(update=options) for name, mixer in config.mixers.items()}
        model = config.model.model_copy(update=model)
        return config.model_copy(update={"model": model, "mixers": mixers})


@pytest.mark.parametrize("layout", [TP2_SP, PP2], ids=["tp2 sp", "pp2"])
def test_layouts_agree(layout):
    check_agrees(GptNeoxCase(), layout)


def test_predicted_parameter_count_is_the_models():
    check_parameter_count(GptNeoxCase())


def test_checkpoint_changes_tensor_ranks_and_back(tmp_path):
    check_reshard(GptNeoxCase(), TP2, tmp_path)
