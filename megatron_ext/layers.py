"""Pieces that mixers share: norms, the fused input projection, the short convolution."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from mixtron.kernels.factor import Factor
from mixtron.kernels.norms import (
    add_rms_norm,
    add_rms_norm_factor,
    by_token,
    gated_norm_factor,
    rms_norm,
)
from mixtron.kernels.short_convolution import short_convolution_parts
from mixtron.kernels.split import split, viewed
from mixtron.kernels.swiglu import swiglu, swiglu_factor
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.context_parallel import rows_before
from mixtron.megatron_ext.layer_graphs import LayerGraphs
from mixtron.megatron_ext.parameters import (
    Draw,
    constant,
    declare,
    normal,
    residual_std,
    uniform,
)
from mixtron.megatron_ext.recompute import computed_again
from mixtron.megatron_ext.state_relay import Neighbours


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside. Works under sequence parallelism.

    There each rank sees its share of the tokens, so the weight's gradient is partial; its mark
    makes Megatron sum it at the end of the step.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = _of_channels(config, hidden_size, 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class ResidualNorm(RMSNorm):
    """Of the residual stream, to which a branch's output may be added in the same kernel."""

    def forward(self, hidden: Tensor, added: Tensor | None = None, *, factor: bool = False) -> Any:  # type: ignore[override]
        """(hidden + added, its norm); or its norm as a factor, beside which is the sum."""
        compute = add_rms_norm_factor if factor else add_rms_norm
        return compute(hidden, added, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias. Under sequence parallelism as RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = _of_channels(config, hidden_size, 1.0)
        self.bias = _of_channels(config, hidden_size, 0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


def gated_norm(
    o_BTJV: Tensor, weight_V: Tensor, eps: float, gate_TBE: Tensor, *, factor: bool = False
) -> Any:
    """RMSNorm of each value head times SiLU(gate), [T, B, J V]; or a product's factor of it."""
    heads = o_BTJV.shape[2:]
    gate_BTJV, place = viewed(gate_TBE, lambda x: x.transpose(0, 1).unflatten(-1, heads))
    if factor:
        return gated_norm_factor(o_BTJV, weight_V, gate_BTJV, eps, gate_place=place)
    return by_token(rms_norm(o_BTJV, weight_V, eps, gate=gate_BTJV, gate_place=place))


class Column(ColumnParallelLinear):
    """Megatron's, which also takes a factor where it is not split."""

    def forward(self, input_: Any, *options, **more):  # type: ignore[override]
        if isinstance(input_, Factor):
            return _product(self, input_)
        return super().forward(input_, *options, **more)


class Row(RowParallelLinear):
    """Megatron's, which also takes a factor where it is not split."""

    def forward(self, input_: Any):
        return _product(self, input_) if isinstance(input_, Factor) else super().forward(input_)


def _product(linear: Any, factor: Factor) -> tuple[Tensor, Tensor | None]:
    """What Megatron's layers give: the output, and the bias if others add it."""
    assert linear.tp_group.size() == 1
    output = factor.times(linear.weight, adds=linear.gradient_accumulation_fusion)
    if linear.skip_bias_add or linear.bias is None:
        return output, linear.bias
    return output + linear.bias, None


def _of_channels(config: TransformerConfig, hidden_size: int, start: float) -> nn.Parameter:
    """A norm's parameter, with the mark that makes Megatron sum it under sequence parallelism."""
    empty = torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
    parameter = declare(nn.Parameter(empty), constant(start))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


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


class FusedColumnParallel(Column):
    """One projection for all of a mixer's inputs; each tensor-parallel rank holds a slice of each.

    One matrix, so that the sequence is gathered once; one checkpoint key a component, so that the
    number of tensor-parallel ranks can change.
    """

    def __init__(
        self,
        config: TransformerConfig,
        input_size: int,
        components: dict[str, int],
        tp_group,
        *,
        bias: bool = False,
    ):
        super().__init__(
            input_size,
            sum(components.values()),
            config=config,
            init_method=_drawn_later,
            bias=bias,
            gather_output=False,
            skip_bias_add=False,
            tp_group=tp_group,
        )
        assert self.weight is not None
        self.components = components
        self.local_sizes = [size // tp_group.size() for size in components.values()]
        declare(
            self.weight,
            normal(config.init_method_std),
            tensor_dim=0,
            components=components,
        )
        if bias:
            assert self.bias is not None
            declare(self.bias, constant(0.0), tensor_dim=0, components=components)

    def forward(self, hidden_TBD: Tensor, joined: int = 1) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The local slice of every component, in order, the first `joined` of them as one tensor.

        Gathers the sequence under SP.
        """
        output, _ = super().forward(hidden_TBD)
        sizes = self.local_sizes
        return split(output, [sum(sizes[:joined]), *sizes[joined:]])

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return {
            f"{prefix}{name}": component_factory(
                *(f"{prefix}{name}", parameter, self.components),
                *(self.tp_group, sharded_offsets, metadata),
            )
            for name, parameter in self.named_parameters(recurse=False)
        }


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


def _drawn_later(weight: Tensor) -> None:
    """Megatron asks for a way to fill a weight; ours are drawn once the model stands."""


class OutputProjection(Row):
    """Back into the residual stream; scatters the sequence under SP."""

    def __init__(self, config: TransformerConfig, input_size: int, tp_group, *, bias: bool = False):
        super().__init__(
            input_size,
            config.hidden_size,
            config=config,
            init_method=_drawn_later,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp_group,
        )
        std = residual_std(config.init_method_std, config.num_layers)
        declare(self.weight, normal(std), tensor_dim=1)
        if bias:
            assert self.bias is not None
            declare(self.bias, constant(0.0))


class _ReplaceFirst(torch.autograd.Function):
    """A tensor with other first rows, in place unless it is a view of one that others share."""

    @staticmethod
    def forward(ctx, x, first):
        ctx.rows = len(first)
        if x._is_view():
            return torch.cat([first, x[ctx.rows :]])
        ctx.mark_dirty(x)
        x[: ctx.rows] = first
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        rest = grad.clone()
        rest[: ctx.rows] = 0
        return rest, grad[: ctx.rows]


class _Ends(torch.autograd.Function):
    """A tensor, its first and its last rows. Backward adds their gradients to the tensor's, in
    place: a convolution makes that anew, and slices would fill and add whole tensors."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return x.view_as(x), x[:rows].clone(), x[-rows:].clone()

    @staticmethod
    def backward(ctx, grad, first, last):  # type: ignore[override]
        grad[: ctx.rows] += first
        grad[-ctx.rows :] += last
        return grad, None


class ShortConvolution(ShardedModule):
    """Causal depthwise convolution that starts anew at every document, then SiLU (by default).

    Under context parallelism a rank takes the last width - 1 tokens of the one before it: gathered
    from all, or by `relayed` from that one alone (see state_relay.py).

    One weight [channels/tp, width] over all components, one checkpoint key a component. Drawn
    uniformly in +-1/sqrt(width), the bound of a convolution with that fan-in.
    """

    def __init__(
        self,
        config: TransformerConfig,
        components: dict[str, int],
        width: int,
        tp_group,
        cp_group,
        *,
        silu: bool = True,
        relayed: bool = False,
    ):
        super().__init__(config, tp_group)
        self.cp_group = cp_group
        self.beside = Neighbours(cp_group) if relayed else None
        self.silu = silu
        self.widths = tuple(size // tp_group.size() for size in components.values())
        bound = width**-0.5
        self.weight = self.new_parameter(
            (sum(components.values()) // tp_group.size(), width),
            uniform(-bound, bound),
            tensor_dim=0,
            components=components,
        )

    def components(
        self, x_TBE: Tensor, batch: Batch, count: int | None = None
    ) -> tuple[Tensor, ...]:
        """`forward`, each component, or the first `count`, a tensor of its own."""
        widths = self.widths[:count]
        # As a module: with overlap its call waits for the weights.
        return self(x_TBE[..., : sum(widths)] if count else x_TBE, batch, widths)

    def forward(self, x_TBE: Tensor, batch: Batch, widths: tuple[int, ...] = ()) -> Any:
        """One tensor, or parts of these widths; of x's channels, all or the first."""
        parts = self._parts(x_TBE, batch, widths or (x_TBE.shape[-1],))
        return parts if widths else parts[0]

    def _parts(self, x_TBE: Tensor, batch: Batch, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        halo, position_T = self.weight.shape[1] - 1, batch.position_ids
        weight_EW = (
            self.weight if x_TBE.shape[-1] == len(self.weight) else self.weight[: sum(widths)]
        )
        convolve = partial(
            short_convolution_parts, weight_EW=weight_EW, widths=widths, silu=self.silu
        )
        if batch.context_size == 1 or halo == 0:
            return convolve(x_TBE, position_T=position_T)
        # As if the share began a document; then its first tokens anew, with those before them.
        own_T = torch.arange(len(position_T), device=position_T.device).minimum(position_T)
        first_T = F.pad(position_T[:halo], (halo, 0))
        x_TBE, own_TBE, last_TBE = _Ends.apply(x_TBE, min(halo, len(x_TBE)))  # type: ignore[misc]
        first_TBE = torch.cat([self._rows_before(last_TBE, halo), own_TBE])
        firsts = convolve(first_TBE, position_T=first_T)
        return tuple(
            _ReplaceFirst.apply(y_TBE, first[halo:])
            for y_TBE, first in zip(convolve(x_TBE, position_T=own_T), firsts, strict=True)
        )

    def _rows_before(self, last_TBE: Tensor, halo: int) -> Tensor:
        if self.beside is not None:
            return self.beside.rows_before(last_TBE, halo)
        return rows_before(last_TBE, halo, self.cp_group)

    def tails(self, x_TBE: Tensor, lengths: list[int]) -> Tensor:
        """Each document's inputs [N, width - 1, E] that its next tokens still reach; zeros before
        its first."""
        rows = self.weight.shape[1] - 1
        parts = x_TBE[:, 0].split(lengths)
        return torch.stack([F.pad(x_TE, (0, 0, rows, 0))[len(x_TE) :] for x_TE in parts])

    def step(self, x_BE: Tensor, tail_BWE: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each sequence: its output [B, E] and the new tail."""
        window_BWE = torch.cat([tail_BWE, x_BE[:, None]], dim=1)
        y_BE = (window_BWE.float() * self.weight.float().t().flip(0)).sum(1)
        y_BE = y_BE.to(x_BE.dtype)
        return F.silu(y_BE) if self.silu else y_BE, window_BWE[:, 1:]
