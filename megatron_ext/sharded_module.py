"""What a mixer is built on: declared parameters, and how a checkpoint holds them."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from mixtron.megatron_ext.parameters import Draw, declare


class ShardedModule(MegatronModule):
    """A module whose checkpoint layout follows from its parameters' declarations."""

    def __init__(self, config: TransformerConfig, tp_group):
        super().__init__(config=config)
        self.tp_group = tp_group

    def new_parameter(self, shape: tuple[int, ...], draw: Draw, dtype=None, **declaration):
        """A declared parameter on the current device, in the model's dtype unless said."""
        tensor = torch.empty(
            shape, dtype=dtype or self.config.params_dtype, device=torch.cuda.current_device()
        )
        return declare(nn.Parameter(tensor), draw, **declaration)

    def sharded_state_dict(self, prefix="", sharded_offsets: Any = (), metadata=None):
        assert metadata is not None, "the checkpoint code passes its metadata"
        own = dict(self.named_parameters(recurse=False))
        fused = {n: p for n, p in own.items() if p.declaration.components}  # type: ignore[attr-defined]
        plain = {n: p for n, p in own.items() if n not in fused}
        axes = {
            n: p.declaration.tensor_dim  # type: ignore[attr-defined]
            for n, p in plain.items()
            if p.declaration.tensor_dim is not None  # type: ignore[attr-defined]
        }
        result = make_sharded_tensors_for_checkpoint(
            plain,
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, parameter in fused.items():
            key = f"{prefix}{name}"
            components = parameter.declaration.components  # type: ignore[attr-defined]
            result[key] = component_factory(
                key, parameter, components, self.tp_group, sharded_offsets, metadata
            )
        for name, module in self.named_children():
            result.update(
                sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        return result


def component_factory(
    key: str, parameter: Tensor, components: dict[str, int], tp_group, sharded_offsets, metadata
) -> ShardedTensorFactory:
    """Stores each part of a parameter that is fused along dimension 0 under `<key>.<part>`."""
    sizes = [size // tp_group.size() for size in components.values()]

    def build(key, tensor, replica_id, flattened_range):
        return {
            name: make_tp_sharded_tensor_for_checkpoint(
                part,
                f"{key}.{name}",
                tp_axis=0,
                prepend_offsets=sharded_offsets,
                tp_group=tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for name, part in zip(components, tensor.split(sizes), strict=True)
        }

    def merge(parts):
        return torch.cat([parts[name] for name in components])

    return ShardedTensorFactory(key, parameter, build, merge)
