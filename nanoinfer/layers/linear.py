"""Linear layers that hold one rank's share of a weight, and know how to fill it from the full tensors of a checkpoint.

A layer that packs several of a checkpoint's weights (q, k, v; gate, up) names them in `shards`. `weight_loader`
copies a full tensor, or the part of it that this rank holds, into its place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.distributed.symmetric_memory import SymmetricBuffers
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError

MAX_SPLIT_K_TOKENS = 256  # a product of more tokens fills the GPU by itself


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs split over the ranks.

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
        super().__init__()
        self.full_sizes = output_sizes
        self.splits = dict.fromkeys(output_sizes, tp) | (splits or {})
        self.local_sizes = {
            name: self.splits[name].shard_size(size, f"{name} output size") for name, size in output_sizes.items()
        }
        local_size = sum(self.local_sizes.values())
        self.weight = nn.Parameter(torch.empty(local_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(local_size), requires_grad=False) if bias else None

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(self.local_sizes)

    def unpack(self, full: Tensor) -> dict[str, Tensor]:
        """Cut a tensor that the checkpoint also packs into full shards."""
        check_shape(full, (sum(self.full_sizes.values()), *full.shape[1:]))
        return dict(zip(self.full_sizes, full.split(list(self.full_sizes.values())), strict=True))

    def weight_loader(self, param: Tensor, full: Tensor, shard: str) -> None:
        expected = (self.full_sizes[shard], *param.shape[1:])
        check_shape(full, expected)
        offset = 0
        for name, size in self.local_sizes.items():
            if name == shard:
                param.narrow(0, offset, size).copy_(self.splits[shard].shard(full, dim=0))
            offset += size

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Computes the gate and up projections of an MLP in one product."""

    def __init__(self, input_size: int, intermediate_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(input_size, {"gate": intermediate_size, "up": intermediate_size}, bias=bias, tp=tp)


class QKVParallelLinear(ColumnParallelLinear):
    """Computes the query, key and value projections in one product, split by heads; ranks may share a KV head."""

    def __init__(
        self, input_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, tp: TensorParallel
    ) -> None:
        kv_split = tp.split_of_kv_heads(num_kv_heads)
        kv_size = num_kv_heads * head_dim
        sizes = {"q": num_heads * head_dim, "k": kv_size, "v": kv_size}
        super().__init__(input_size, sizes, bias=bias, tp=tp, splits={"k": kv_split, "v": kv_split})


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The output of a row-parallel product while it is not added up yet; the next RMSNorm does that.

    terms: (num_terms, num_tokens, hidden_size) to be added: one complete sum, or the partial sums of split-K.
    all_ranks: the buffers with the terms of all ranks, if the kernel of the norm does the all-reduce too.
    sum_weight: (hidden_size,), of a norm of the sum by itself before it is added to the residual stream; None for none.
    """

    terms: Tensor
    all_ranks: SymmetricBuffers | None = None
    sum_weight: Tensor | None = None


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs split over the ranks.

    A product of few rows and few columns has too few tiles to fill a GPU. So on one GPU a small step is computed by
    split-K: several partial sums at the same time. On several GPUs a small step leaves the all-reduce to the kernel of
    the next norm, where the GPUs reach each other's memory.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.full_shape = (output_size, input_size)
        self.weight = nn.Parameter(
            torch.empty(output_size, tp.shard_size(input_size, "row-parallel input size")), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        check_shape(full, self.full_shape if param.dim() == 2 else self.full_shape[:1])
        param.copy_(self.tp.shard(full, dim=1) if param.dim() == 2 else full)

    def forward(self, x: Tensor) -> PartialSum:
        """(num_tokens, input_size) -> (num_tokens, output_size), to be added up by the next norm."""
        if self.tp.size > 1:
            return self._across_ranks(x)
        num_splits = self._num_splits(x)
        if num_splits == 1:
            return PartialSum(F.linear(x, self.weight, self.bias).unsqueeze(0))
        x = x.unflatten(1, (num_splits, -1)).transpose(0, 1)  # (num_splits, num_tokens, input_size / num_splits)
        weight = self.weight.unflatten(1, (num_splits, -1)).permute(1, 2, 0)
        return PartialSum(torch.bmm(x, weight))

    def _across_ranks(self, x: Tensor) -> PartialSum:
        bias = self.bias if self.tp.rank == 0 else None  # one rank adds it, so that the sum has it once
        buffers = sum_buffers(self.tp, len(x))
        if buffers is None:
            return PartialSum(self.tp.all_reduced_product(x, self.weight, bias).unsqueeze(0))
        if bias is None:
            torch.mm(x, self.weight.t(), out=buffers.input)
        else:
            torch.addmm(bias, x, self.weight.t(), out=buffers.input)
        return PartialSum(buffers.input.unsqueeze(0), buffers)

    def _num_splits(self, x: Tensor) -> int:
        """Return how far to split K; docs/performance.md has the times that this is based on."""
        # In float16 a partial sum could overflow where the whole does not.
        if not x.is_cuda or x.dtype != torch.bfloat16 or self.bias is not None or len(x) > MAX_SPLIT_K_TOKENS:
            return 1
        num_splits = 4 if len(self.weight) < 4096 else 2
        return num_splits if x.shape[1] % (8 * num_splits) == 0 else 1


def sum_buffers(tp: TensorParallel, num_tokens: int) -> SymmetricBuffers | None:
    """Return where the ranks leave their partial sums if the next norm is to all-reduce them; None if NCCL is to.

    The number of tokens alone decides: in two shots a rank updates only its own rows of the residual, so all sums of a
    forward pass must be of the same kind.
    """
    if tp.memory is None or num_tokens > tp.memory.max_tokens:
        return None
    return tp.memory.next_buffers(num_tokens)


def check_shape(full: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ModelError where a checkpoint's tensor does not have the shape that config.json implies."""
    if tuple(full.shape) != expected:
        raise ModelError(f"the checkpoint has shape {tuple(full.shape)}, config.json implies {expected}")
