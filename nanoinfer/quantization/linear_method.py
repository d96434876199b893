"""Holds a linear layer's weight and multiplies by it: here in 16 bits (or 32), elsewhere in 8 and in 4.

Each layer has a `quant_method`, as in vLLM, so that the layers themselves know of sharding only. The tensors belong to
the layer, under the names that a checkpoint gives them.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve, few_rows_product

MAX_SPLIT_K_TOKENS = 256  # a product of more tokens fills the GPU by itself
MIN_UNSPLIT_OUTPUTS = 4096  # a product of fewer outputs has far too few tiles


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Says how a tensor of a linear layer is stored. The loader, the checks and the ranks' cuts read it.

    output_dim, input_dim: the dimension of the layer's outputs, and that of its inputs, not counting the dimension of
    experts; None if there is none. outputs_per_entry, inputs_per_entry: how many outputs or inputs one entry stands
    for, such as those that share a scale or are packed in one integer.
    """

    output_dim: int | None = None
    input_dim: int | None = None
    outputs_per_entry: int = 1
    inputs_per_entry: int = 1

    @staticmethod
    def of(tensor: Tensor) -> "ParamSpec":
        """Return how a layer's tensor is stored."""
        spec = getattr(tensor, "spec", None)
        assert isinstance(spec, ParamSpec), "a linear layer's tensors say how they are stored; see `stored`"
        return spec

    def num_entries(self, num_outputs: int) -> int:
        """Return how many entries stand for so many outputs."""
        return ceil_div(num_outputs, self.outputs_per_entry)

    def split(self, by_inputs: bool) -> tuple[int | None, int]:
        """Return the dimension that ranks cut, None for none, and how many values an entry along it stands for."""
        return (self.input_dim, self.inputs_per_entry) if by_inputs else (self.output_dim, self.outputs_per_entry)

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        """Return the shape of a tensor for so many outputs and inputs."""
        entries = {self.output_dim: self.num_entries(num_outputs)}
        entries |= {self.input_dim: ceil_div(num_inputs, self.inputs_per_entry)}
        return tuple(entries[dim] for dim in sorted(dim for dim in entries if dim is not None))


MATRIX = ParamSpec(output_dim=0, input_dim=1)  # (..., num_outputs, num_inputs), as a weight
PER_OUTPUT = ParamSpec(output_dim=0)  # a bias, or a scale for each output


def stored(tensor: Tensor, spec: ParamSpec) -> nn.Parameter:
    """Return a parameter that says how it is stored."""
    param = nn.Parameter(tensor, requires_grad=False)
    param.spec = spec  # type: ignore[attr-defined]
    return param


def hold_scales(layer: nn.Module, name: str, scales: Tensor, spec: ParamSpec, in_checkpoint: bool) -> None:
    """Give a layer its scales: as a parameter if a tensor of the checkpoint fills them, else as a buffer."""
    if in_checkpoint:
        setattr(layer, name, stored(scales, spec))
    else:
        scales.spec = spec  # type: ignore[attr-defined]
        layer.register_buffer(name, scales)


class ProductKind(Enum):
    """Says what a layer multiplies by."""

    PLAIN = auto()  # a weight in the dtype of the model, which other kernels may read too
    WIDENED = auto()  # a weight of fewer bits, of which each product makes a copy in the dtype of the model
    NARROW = auto()  # a weight of fewer bits, which is read as such, and widened in long steps alone
    ROUNDED = auto()  # a weight of fewer bits, to which the inputs are rounded


def may_split(x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Return whether a product in `dtype` may be left as partial sums, and is not too large for these to pay."""
    # In float16 a partial sum could overflow where the whole does not.
    return x.is_cuda and dtype == torch.bfloat16 and bias is None and len(x) <= MAX_SPLIT_K_TOKENS


def split_k_product(x: Tensor, weight: Tensor, num_splits: int, **options: Any) -> Tensor:
    """Return x W^T as partial sums over equal parts of the inputs, (num_splits, num_tokens, num_outputs).

    options: those of torch.bmm.
    """
    parts = x.unflatten(1, (num_splits, -1)).transpose(0, 1)  # (num_splits, num_tokens, input_size / num_splits)
    return torch.bmm(parts, weight.unflatten(1, (num_splits, -1)).permute(1, 2, 0), **options)


class LinearMethod:
    """Holds a weight in the dtype of the model.

    kind: how the layer multiplies. input_format: how it wants its inputs; None: in the dtype of the model. Whatever
    makes them may round them, in the kernel that it runs anyway. splits_large_products: whether partial sums pay for
    more outputs than MIN_UNSPLIT_OUTPUTS, too.
    """

    kind = ProductKind.PLAIN
    input_format: RowFormat | None = None
    splits_large_products = False

    def create_weights(self, layer: Any, *shape: int) -> None:
        """Give the layer its parameters. shape: of this rank's weight, (..., num_outputs, num_inputs)."""
        layer.weight = stored(torch.empty(*shape), MATRIX)

    def read(self, kind: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the name of the parameter that a checkpoint's tensor fills, such as "weight", and what fills it.

        None: the tensor is not needed. Raises ModelError for one that the format does not have so.
        """
        return kind, tensor

    def check(self, layer: Any, param: Tensor, full: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless `full` is what a checkpoint has for `param`. shape: of the unsharded parameter."""
        check_shape(full, shape)

    def prepare(self, layer: Any, param: Tensor, full: Tensor, shard: str | None) -> list[tuple[Tensor, Tensor]]:
        """Convert a checkpoint tensor into (parameter, unsharded tensor) pairs; the layer places its shard of each."""
        return [(param, full)]

    def pack_share(self, param: Tensor, share: Tensor) -> Tensor:
        """Return this rank's share of an expert's tensor as `param` holds it."""
        return share

    def fill_with_random_weights(self, layer: Any, std: float, generator: torch.Generator) -> None:
        """Draw the weight from N(0, std^2)."""
        layer.weight.normal_(0.0, std, generator=generator)

    def wide_weight(self, layer: Any) -> Tensor:
        """Return the weight in the dtype of the model."""
        return layer.weight

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        """Return x W^T + b, (num_tokens, num_outputs)."""
        x, weight = cast(Tensor, x), self.wide_weight(layer)
        if x.is_cuda and self._has_few_rows(x, weight):
            return few_rows_product(x, weight, bias)
        return F.linear(x, weight, bias)

    def apply_split(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        """Return x W^T + b as partial sums of split-K, (num_splits, num_tokens, num_outputs), or as a single sum."""
        x = cast(Tensor, x)
        if x.is_cuda and not self._has_few_rows(x, layer.weight):
            num_splits = self._num_splits(x, len(layer.weight), bias)
            if num_splits > 1:
                return split_k_product(x, self.wide_weight(layer), num_splits)
        return self.apply(layer, x, bias).unsqueeze(0)

    def expert_weights(self, layer: Any) -> ExpertWeights:
        """Return the weights of all experts, for `expert_mlp`."""
        return ExpertWeights(self.wide_weight(layer), bias=layer.bias)

    def expert_mlp(self, experts: Any, x: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return what `expert_mlp` of ops/experts does. experts: the layer that has the weights of all experts."""
        gate_up, down = experts.gate_up_proj, experts.down_proj
        first, second = (layer.quant_method.expert_weights(layer) for layer in (gate_up, down))
        return expert_mlp(cast(Tensor, x), first, second, expert_ids, weights, experts.clamps, experts.is_geglu)

    def _has_few_rows(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether the kernel for few rows, which begins to read the weight early, computes the product."""
        return self.kind is ProductKind.PLAIN and few_rows_kernels_serve(len(x), weight)

    def _num_splits(self, x: Tensor, num_outputs: int, bias: Tensor | None) -> int:
        """Return how far to split K; docs/kernels.md has the times that this is based on."""
        if not may_split(x, x.dtype, bias):
            return 1
        is_long = x.shape[1] >= 4096  # enough to sum up in each of four parts
        num_splits = 4 if num_outputs < (MIN_UNSPLIT_OUTPUTS if is_long else MIN_UNSPLIT_OUTPUTS // 2) else 2
        return num_splits if x.shape[1] % (8 * num_splits) == 0 else 1
