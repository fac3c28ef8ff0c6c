"""A mixtron model in transformers:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Needs `mixtron` itself, whose layers compute here what they computed in training, on one rank.
There is no cache: `generate` runs the whole text for every token. `mixtron generate` has one.
"""

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class MixtronConfig(PretrainedConfig):
    model_type = "mixtron"

    def __init__(self, model: dict | None = None, mixers: dict | None = None, **options):
        self.model, self.mixers = model, mixers
        options.setdefault("use_cache", False)
        super().__init__(**options)


class MixtronForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = MixtronConfig
    main_input_name = "input_ids"

    def __init__(self, config: MixtronConfig):
        from mixtron.megatron_ext.config import ModelConfig, ParallelConfig
        from mixtron.megatron_ext.mixers import mixer_configs
        from mixtron.megatron_ext.model import build_model
        from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

        super().__init__(config)
        mixers = {
            name: mixer_configs()[options["type"]].model_validate(options)
            for name, options in (config.mixers or {}).items()
        }
        self.sizes = ModelConfig.model_validate(config.model)
        # Not on transformers' meta device: weights are drawn, then replaced by the stored ones.
        with torch.device("cpu"):
            self.ranks = init_model_parallel(seed=0, device=init_distributed())
            (self.mixtron,) = build_model(
                self.sizes,
                mixers,
                ParallelConfig(),
                self.ranks,
                seed=0,
                bf16=config.dtype == torch.bfloat16,
                max_tokens=config.max_position_embeddings,
            )
        self.post_init()

    def _init_weights(self, module) -> None:
        """They are drawn when the model is built."""

    def state_dict(self, *args, **kwargs):
        """Without the state, always empty, that Megatron's layers list beside their parameters."""
        state = super().state_dict(*args, **kwargs)
        return {name: x for name, x in state.items() if not name.endswith("_extra_state")}

    def get_input_embeddings(self):
        return self.mixtron.embedding.word_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_,
    ) -> CausalLMOutput:
        """Rows [B, T] lie one after another in a stream, padding left out, as in training."""
        from mixtron.megatron_ext.batch import EVALUATION_STEP, make_batch
        from mixtron.megatron_ext.model import forward

        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        kept_BT = attention_mask.bool()
        batch = make_batch(kept_BT.sum(1).tolist(), step=EVALUATION_STEP, device=input_ids.device)
        stream_BT = input_ids[kept_BT][None]
        found = forward(self.mixtron, self.sizes, self.ranks, stream_BT, batch)[0]
        logits = found.new_zeros(*input_ids.shape, found.shape[-1])
        logits[kept_BT] = found
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return CausalLMOutput(loss=loss, logits=logits)
