"""Builds the model: Megatron's GPTModel with a mixer of our own in every layer.

The only file that knows the model class and Megatron's names for its options.
"""

import copy
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.config import ModelConfig, ParallelConfig
from mixtron.megatron_ext.mixers import mixer_module
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.mlp import SwiGLUMLP
from mixtron.megatron_ext.norms import LayerNorm, ResidualNorm, RMSNorm
from mixtron.megatron_ext.output_layer import OutputLayer, used_entries
from mixtron.megatron_ext.parallel import Ranks
from mixtron.megatron_ext.parameters import constant, declare, initialise, normal, residual_std
from mixtron.megatron_ext.projections import Column, Row
from mixtron.megatron_ext.recompute import Part
from mixtron.megatron_ext.residual_layers import ParallelResidualLayer, ResidualLayer

logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # deprecation note

EMBEDDING = "embedding.word_embeddings.weight"
NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm, "none": IdentityOp}


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    bf16: bool,
    recompute: bool,
    recomputed: Collection[Part] = (),
    num_attention_heads: int = 1,
) -> TransformerConfig:
    """Megatron's options for this model. Attention heads belong to the mixers, not to it."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=parallel.tensor * num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.mlp == "swiglu",
        activation_func=F.silu if model.mlp == "swiglu" else F.gelu,
        add_bias_linear=model.mlp_bias,
        hidden_dropout=model.dropout,
        attention_dropout=0.0,
        init_method_std=model.init_std,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        deallocate_pipeline_outputs=True,
        # With two stages the ranks before and after are one: batched sends would meet the wrong
        # receives of the interleaved schedule, and the losses would be silently wrong.
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
    )
    config.variable_seq_lengths = False
    config.recomputed = frozenset(recomputed)  # type: ignore[attr-defined]
    config.layer_mixers = tuple(model.layer_mixers)  # type: ignore[attr-defined]
    return config


def build_model(
    model: ModelConfig,
    mixers: Mapping[str, MixerConfig],
    parallel: ParallelConfig,
    ranks: Ranks,
    *,
    seed: int,
    bf16: bool,
    recompute: bool = False,
    recomputed: Collection[Part] = (),
    max_tokens: int,
) -> list[GPTModel]:
    """This rank's model chunks (one, or `virtual_pipeline` of them), initialised.

    Args:
        recompute: every layer in backward, of which its input alone is kept.
        recomputed: parts of layers instead.
        max_tokens: tokens in a flattened micro-batch.
    """
    config = transformer_config(
        model, parallel, bf16=bf16, recompute=recompute, recomputed=recomputed
    )
    chunks: list[GPTModel] = []
    for stage in range(parallel.virtual_pipeline):
        vp_stage: Any = stage if parallel.virtual_pipeline > 1 else None
        vp_size = config.virtual_pipeline_model_parallel_size
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_layer_specs(model, mixers, config, ranks, vp_stage),
            vocab_size=model.padded_vocab_size,
            max_sequence_length=max_tokens,
            pre_process=ranks.pipeline_rank == 0 and is_vp_first_stage(vp_stage, vp_size),
            post_process=(
                ranks.pipeline_rank == ranks.pipeline_size - 1
                and is_vp_last_stage(vp_stage, vp_size)
            ),
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="none",
            pg_collection=ranks.groups,
            vp_stage=vp_stage,
        )
        # Megatron makes these itself; ours have the same parameters and other operations.
        layers: Any = chunk.decoder.layers
        for layer in layers:
            layer.mlp.linear_fc1.__class__ = Column
            layer.mlp.linear_fc2.__class__ = Row
            if model.mlp == "swiglu":
                layer.mlp.__class__ = SwiGLUMLP
        if chunk.post_process:
            chunk.output_layer.__class__ = OutputLayer  # type: ignore[assignment]
        _declare_library_parameters(chunk, model)
        if model.norm == "none":
            _scale_instead_of_norms(chunk, model)
        chunk.to(ranks.device)
        initialise(global_parameters(chunk), seed, ranks.tensor_rank, ranks.tensor_size)
        chunks.append(chunk)
    return chunks


def _layer_specs(
    model: ModelConfig,
    mixers: Mapping[str, MixerConfig],
    config: TransformerConfig,
    ranks: Ranks,
    vp_stage: int | None,
) -> Any:
    """The specs of this stage's layers: the library's own, with norm and mixer replaced."""
    base = get_gpt_layer_local_spec(normalization="RMSNorm")
    first = get_transformer_layer_offset(config, vp_stage, ranks.pipeline_rank)
    count = get_num_layers_to_build(config, vp_stage, ranks.pipeline_rank)
    specs = []
    for name in model.layer_mixers[first : first + count]:
        mixer = mixers[name]
        spec: Any = copy.deepcopy(base)
        norm = NORMS[model.norm]
        if model.parallel_residual:
            spec.module = ParallelResidualLayer
        elif model.norm == "rmsnorm" and model.dropout == 0:
            spec.module, norm = ResidualLayer, ResidualNorm
        spec.submodules.self_attention = ModuleSpec(
            module=mixer_module(mixer.type),
            params={"mixer": mixer},
        )
        spec.submodules.input_layernorm = norm
        spec.submodules.pre_mlp_layernorm = norm
        # The library renames its norms for Transformer Engine's sake; ours keep their names.
        spec.submodules.sharded_state_dict_keys_map = {}
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=NORMS[model.norm])


def _scale_instead_of_norms(chunk: GPTModel, model: ModelConfig) -> None:
    """Fixed factors where norms would be: the residual stream begins at unit size, as behind a
    norm, and each of the 2 layers' branches adds its output divided by sqrt(2 layers).

    Tied output weights stay as they are.
    """
    if chunk.pre_process:
        unit: Any = lambda module, inputs, output: output / model.init_std  # noqa: E731
        chunk.embedding.register_forward_hook(unit)
    factor = residual_std(1.0, model.layers)
    layers: Any = chunk.decoder.layers
    for layer in layers:
        for branch in (layer.self_attention, layer.mlp):
            branch.register_forward_hook(
                lambda module, inputs, output: tuple(x if x is None else factor * x for x in output)
            )


def _declare_library_parameters(chunk: GPTModel, model: ModelConfig) -> None:
    """Declares the parameters that Megatron made: embedding, output layer, MLPs."""
    draw = normal(model.init_std)
    if chunk.pre_process:
        declare(
            chunk.embedding.word_embeddings.weight, draw, tensor_dim=0, used_rows=model.vocab_size
        )
    if chunk.post_process and chunk.output_layer.weight is not None:
        declare(chunk.output_layer.weight, draw, tensor_dim=0, used_rows=model.vocab_size)
    ffn = model.ffn_hidden_size
    layers: Any = chunk.decoder.layers
    for layer in layers:
        parts = {"gate": ffn, "up": ffn} if model.mlp == "swiglu" else None
        declare(layer.mlp.linear_fc1.weight, draw, tensor_dim=0, components=parts)
        if model.mlp_bias:
            declare(layer.mlp.linear_fc1.bias, constant(0.0), tensor_dim=0, components=parts)
            declare(layer.mlp.linear_fc2.bias, constant(0.0))
        declare(
            layer.mlp.linear_fc2.weight,
            normal(residual_std(model.init_std, model.layers)),
            tensor_dim=1,
        )


def global_parameters(chunk: GPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under names that do not depend on the pipeline: layers are counted from the first.

    The last stage's copy of tied embeddings goes by the embedding's name.
    """
    layers: Any = chunk.decoder.layers
    numbers = [layer.layer_number - 1 for layer in layers]
    for name, parameter in chunk.named_parameters():
        name = re.sub(
            r"^decoder\.layers\.(\d+)\.",
            lambda m: f"decoder.layers.{numbers[int(m[1])]}.",
            name,
        )
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            name = EMBEDDING
        yield name, parameter


def masked_logits(model: ModelConfig, ranks: Ranks, logits_TBV: Tensor) -> Tensor:
    """fp32 logits of this rank's share of the vocabulary; padding entries can never be chosen."""
    logits_TBV = logits_TBV.float()
    local = logits_TBV.shape[-1]
    used = used_entries(local, model.vocab_size, ranks.tensor_rank)
    if used < local:
        logits_TBV = logits_TBV.clone()
        logits_TBV[..., used:] = torch.finfo(torch.float32).min
    return logits_TBV


def forward(
    chunk: nn.Module,
    model: ModelConfig,
    ranks: Ranks,
    tokens_BT: Tensor,
    batch: Batch,
    labels_BT: Tensor | None = None,
    mask_BT: Tensor | None = None,
) -> Tensor:
    """Runs one model chunk on this rank's tokens [1, T/cp].

    Returns:
        On the last pipeline stage: with labels, the cross-entropy summed over the tokens where the
        mask is True, 0-dimensional in fp32; else logits [1, T/cp, V] fp32 over the true vocabulary.
        On other stages: hidden states.
    """

    def head(*, hidden_states, output_layer, output_weight, **_):
        if labels_BT is not None:
            return output_layer(
                hidden_states,
                weight=output_weight,
                labels_BT=labels_BT,
                mask_BT=mask_BT,
                vocab_size=model.vocab_size,
            )
        logits_TBV, _ = output_layer(hidden_states, weight=output_weight)
        logits_TBV = masked_logits(model, ranks, logits_TBV)
        gathered = gather_from_tensor_model_parallel_region(logits_TBV, group=ranks.groups.tp)
        return gathered[..., : model.vocab_size].transpose(0, 1)

    return chunk(
        input_ids=tokens_BT,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=batch,
        output_processor=head,
    )
