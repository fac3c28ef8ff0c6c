"""Products with weights that tensor-parallel ranks share: a mixer's fused input, its output."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mixtron.kernels.factor import Factor
from mixtron.kernels.split import split
from mixtron.megatron_ext.parameters import constant, declare, normal, residual_std
from mixtron.megatron_ext.sequence_products import gathered_product, scattered_product
from mixtron.megatron_ext.sharded_module import component_factory


class Column(ColumnParallelLinear):
    """Megatron's, which gathers the sequence beside its product, and takes a factor where it is not
    split."""

    def forward(self, input_: Any, *options, **more):  # type: ignore[override]
        if isinstance(input_, Factor):
            return _product(self, input_)
        return super().forward(input_, *options, **more)

    def _forward_impl(self, input, weight, **options):
        if not _exchanges(self, weight):
            return super()._forward_impl(input, weight, **options)
        adds = self.gradient_accumulation_fusion
        return gathered_product(input, weight, options["bias"], self.tp_group, adds=adds)


class Row(RowParallelLinear):
    """Megatron's, which scatters the sequence beside its product, and takes a factor where it is
    not split."""

    def forward(self, input_: Any):
        if isinstance(input_, Factor):
            return _product(self, input_)
        if not _exchanges(self, self.weight):
            return super().forward(input_)
        adds = self.gradient_accumulation_fusion
        output = scattered_product(input_.contiguous(), self.weight, self.tp_group, adds=adds)
        return _with_bias(self, output)


def _exchanges(linear: Any, weight: Tensor) -> bool:
    """Whether ranks hold parts of the sequence; frozen weights are left to Megatron."""
    return linear.sequence_parallel and linear.tp_group.size() > 1 and weight.requires_grad


def _product(linear: Any, factor: Factor) -> tuple[Tensor, Tensor | None]:
    """What Megatron's layers give: the output, and the bias if others add it."""
    assert linear.tp_group.size() == 1
    output = factor.times(linear.weight, adds=linear.gradient_accumulation_fusion)
    return _with_bias(linear, output)


def _with_bias(linear: Any, output: Tensor) -> tuple[Tensor, Tensor | None]:
    if linear.skip_bias_add or linear.bias is None:
        return output, linear.bias
    return output + linear.bias, None


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


def _drawn_later(weight: Tensor) -> None:
    """Megatron asks for a way to fill a weight; ours are drawn once the model stands."""
