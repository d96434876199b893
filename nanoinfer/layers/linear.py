"""Linear layers that hold one rank's share of a weight, and know how to fill it from the full tensors of a checkpoint.

A layer that packs several of a checkpoint's weights (q, k, v; gate, up) names them in `shards`. `weight_loader`
copies a full tensor, or the part of it that this rank holds, into its place. A layer's `quant_method` knows in how many
bits its weight is, and multiplies by it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.common.symmetric_buffers import SymmetricBuffers
from nanoinfer.quantization.linear_method import (
    MATRIX,
    MIN_UNSPLIT_OUTPUTS,
    PER_OUTPUT,
    LinearMethod,
    ParamSpec,
    stored,
)


class ShardedLinear(nn.Module):
    """Holds what the linear layers have in common.

    is_row_parallel: whether the ranks split the inputs, and not the outputs. rounds_at_load: whether a checkpoint in 16
    bits has its weight rounded to fewer, if the user asks for that. takes_adapters: whether its product is all that is
    made of its weight, so that adapters can add to that. shape: of this rank's weight, (..., outputs, inputs).
    full_shape: outputs and inputs of the whole weight.
    """

    is_row_parallel = False
    rounds_at_load = True
    takes_adapters = True
    weight: nn.Parameter

    def __init__(self, shape: tuple[int, ...], full_shape: tuple[int, int], bias: bool) -> None:
        super().__init__()
        self.full_shape = full_shape
        self.quant_method = LinearMethod()
        self.quant_method.create_weights(self, *shape)
        self.bias = stored(torch.empty(shape[:-1]), PER_OUTPUT) if bias else None

    @property
    def input_format(self) -> RowFormat | None:
        """How the layer wants its inputs: None for the model's dtype."""
        return self.quant_method.input_format

    def num_outputs(self, _shard: str | None) -> int:
        """Return how many outputs the whole weight of a shard has."""
        return self.full_shape[0]

    def check_weight(self, param: Tensor, full: Tensor, shard: str | None = None) -> None:
        shape = ParamSpec.of(param).shape(self.num_outputs(shard), self.full_shape[1])
        self.quant_method.check(self, param, full, shape)


class ColumnParallelLinear(ShardedLinear):
    """Computes y = x W^T + b with the outputs split over the ranks.

    output_sizes: the full sizes of the weights packed in this layer, by the name of their shard, in order.
    splits: how a shard is split, if not by `tp`.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: dict[str, int],
        bias: bool,
        tp: TensorParallel,
        splits: dict[str, TensorParallel] | None = None,
    ) -> None:
        splits = dict.fromkeys(output_sizes, tp) | (splits or {})
        local_sizes = {
            name: splits[name].shard_size(size, f"{name} output size") for name, size in output_sizes.items()
        }
        full_shape = sum(output_sizes.values()), input_size
        super().__init__((sum(local_sizes.values()), input_size), full_shape, bias)
        self.full_sizes, self.local_sizes, self.splits = output_sizes, local_sizes, splits

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self.local_sizes)

    def num_outputs(self, shard: str | None) -> int:
        assert shard is not None, "a packed weight is filled shard by shard"
        return self.full_sizes[shard]

    def unpack(self, full: Tensor, param: Tensor | None) -> dict[str, Tensor]:
        """Cut a tensor that the checkpoint also packs into full shards."""
        spec = MATRIX if param is None else ParamSpec.of(param)
        if full.numel() == 1 or spec.output_dim is None:  # a scale of all, or the order of inputs
            return dict.fromkeys(self.full_sizes, full)
        sizes, dim = [spec.num_entries(size) for size in self.full_sizes.values()], spec.output_dim
        check_shape(full, (*full.shape[:dim], sum(sizes), *full.shape[dim + 1 :]))
        return dict(zip(self.full_sizes, full.split(sizes, dim), strict=True))

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        before = [*self.local_sizes.values()][: self.shards.index(shard)]
        for place, part in self.quant_method.prepare(self, param, full, shard):
            spec = ParamSpec.of(place)
            assert spec.output_dim is not None, "what has no outputs is not packed"
            share = self.share_of(part, shard, spec.output_dim, spec.outputs_per_entry)
            offset = sum(map(spec.num_entries, before))
            place.narrow(spec.output_dim, offset, share.shape[spec.output_dim]).copy_(share)

    def share_of(self, full: Tensor, shard: str, dim: int, outputs_per_entry: int) -> Tensor:
        """Return this rank's part of a shard, in the order in which the layer holds it. dim: of the outputs."""
        return self.splits[shard].shard(full, dim, outputs_per_entry)

    def forward(self, x: Activations) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Computes the gate and up projections of an MLP in one product."""

    def __init__(self, input_size: int, intermediate_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(input_size, {"gate": intermediate_size, "up": intermediate_size}, bias=bias, tp=tp)


class QKVParallelLinear(ColumnParallelLinear):
    """Computes the query, key and value projections in one product, split by heads; ranks may share a KV head.

    Where there are few heads, as on a rank of several, split-K pays here, too.
    has_gates: whether each query head has a gate, which checkpoints hold behind it. Here all gates come first.
    parts: which of the three there are.
    """

    def __init__(
        self,
        input_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        tp: TensorParallel,
        has_gates: bool = False,
        parts: tuple[str, ...] = ("q", "k", "v"),
    ) -> None:
        kv_split = tp.split_of_kv_heads(num_kv_heads)
        kv_size = num_kv_heads * head_dim
        sizes = {"q": (1 + has_gates) * num_heads * head_dim, "k": kv_size, "v": kv_size}
        sizes = {part: sizes[part] for part in parts}
        super().__init__(input_size, sizes, bias=bias, tp=tp, splits={"k": kv_split, "v": kv_split})
        self.has_gates = has_gates
        self.num_heads = tp.shard_size(num_heads, "query heads")

    def share_of(self, full: Tensor, shard: str, dim: int, outputs_per_entry: int) -> Tensor:
        share = super().share_of(full, shard, dim, outputs_per_entry)
        if shard != "q" or not self.has_gates:
            return share
        # (..., num_heads, [query, gate], head_dim) -> (..., [gate, query], num_heads, head_dim)
        return share.unflatten(dim, (self.num_heads, 2, -1)).flip(dim + 1).transpose(dim, dim + 1).flatten(dim, dim + 2)

    def forward(self, x: Activations) -> Tensor:
        """Return the product (num_tokens, num_outputs) of (num_tokens, input_size).

        Or partial sums of it, (num_splits, num_tokens, num_outputs): `norm_rope_store` takes either.
        """
        is_large = len(self.weight) >= MIN_UNSPLIT_OUTPUTS and not self.quant_method.splits_large_products
        if is_large or self.input_format is not None:  # in 8 bits it was not measured
            return super().forward(x)
        sums = self.quant_method.apply_split(self, x, self.bias)
        return sums if len(sums) > 1 else sums[0]


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Holds the output of a row-parallel product, in terms that the next RMSNorm adds up.

    terms: (num_terms, num_tokens, hidden_size): one term that is the output, or several, such as the parts of split-K.
    buffers: where the ranks exchange their terms, if the kernel of the norm does the all-reduce.
    sum_weight: (hidden_size,), of a norm of the sum before it is added to the residual stream; None for no such norm.
    tp: the ranks that must still all-reduce the terms, one on each; None if there is no need, or the norm does it.
    other_terms: further terms in a tensor of their own, contiguous, in any dtype; None for none. With one rank only.
    total_scale: (1,), by which the residual stream is multiplied when the terms are added to it; None for 1. Then there
        are no buffers, and other terms only with part_weights.
    part_weights: (hidden_size,) each, of a norm of the terms' sum and of one of the other terms' sum, by which both are
        normalised before they are added up; None for no such norms.
    """

    terms: Tensor
    buffers: SymmetricBuffers | None = None
    sum_weight: Tensor | None = None
    tp: TensorParallel | None = None
    other_terms: Tensor | None = None
    total_scale: Tensor | None = None
    part_weights: tuple[Tensor, Tensor] | None = None

    def plus(self, other: "PartialSum") -> "PartialSum":
        """Return the sum of both, which the ranks all-reduce once. Neither is to be all-reduced by a norm."""
        assert self.buffers is other.buffers is None, "a norm all-reduces one product alone"
        if self.tp is None:
            others = [part for part in (self.other_terms, other.terms, other.other_terms) if part is not None]
            return replace(self, other_terms=others[0] if len(others) == 1 else torch.cat(others))
        return replace(self, terms=self.terms + other.terms)

    def times(self, multiplier: float) -> "PartialSum":
        """Return the sum times a number."""
        if multiplier == 1:
            return self
        others = None if self.other_terms is None else self.other_terms * multiplier
        return replace(self, terms=self.terms * multiplier, other_terms=others)

    def all_reduced(self) -> Tensor:
        """Return the terms, all-reduced unless the norm does that; to be called once."""
        if self.tp is not None:
            self.tp.all_reduce(self.terms[0])
        return self.terms


class RowParallelLinear(ShardedLinear):
    """Computes y = x W^T + b with the inputs split over the ranks.

    A product of few rows and few columns has too few tiles to fill a GPU. So a small step is computed by split-K:
    several partial sums at the same time. On several GPUs it leaves the all-reduce, too, to the kernel of the next
    norm, where the GPUs reach each other's memory.
    """

    is_row_parallel = True

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        local_size = tp.shard_size(input_size, "row-parallel input size")
        super().__init__((output_size, local_size), (output_size, input_size), bias)
        self.tp = tp

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        for place, part in self.quant_method.prepare(self, param, full, None):
            dim, values_per_entry = ParamSpec.of(place).split(by_inputs=True)
            place.copy_(part if dim is None else self.tp.shard(part, dim, values_per_entry))

    def forward(self, x: Activations) -> PartialSum:
        """Return the product (num_tokens, output_size) of (num_tokens, input_size), to be added up by the next norm."""
        bias = self.bias if self.tp.rank == 0 else None  # one rank adds it, so that the sum has it once
        buffers = sum_buffers(self.tp, len(x))
        if self.tp.size == 1 or buffers is not None:
            return PartialSum(self.quant_method.apply_split(self, x, bias), buffers)
        return PartialSum(self.quant_method.apply(self, x, bias).unsqueeze(0), tp=self.tp)


class ShardedVector(nn.Module):
    """Holds this rank's share of a vector, such as the attention sinks of its query heads. split: over which ranks."""

    def __init__(self, size: int, split: TensorParallel) -> None:
        super().__init__()
        self.full_shape, self.split = (size,), split
        self.weight = nn.Parameter(torch.empty(split.shard_size(size, "vector size")), requires_grad=False)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        param.copy_(self.split.shard(full, 0))


def sum_buffers(tp: TensorParallel, num_tokens: int) -> SymmetricBuffers | None:
    """Return where the ranks exchange their terms if the next norm is to all-reduce them; None if it is not.

    The number of tokens alone decides: in two shots a rank updates only its own rows of the residual, so all sums of a
    forward pass must be of the same kind.
    """
    if tp.symmetric_memory is None or not tp.symmetric_memory.serves(num_tokens):
        return None
    return tp.symmetric_memory.next_buffers(num_tokens)


def wide_rows(hidden: Activations) -> Tensor:
    """Return rows in the dtype of the model."""
    if isinstance(hidden, Tensor):
        return hidden
    assert hidden.wide is not None, "inputs of a product in the dtype of the model are kept in it"
    return hidden.wide
