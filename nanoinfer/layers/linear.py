"""Linear layers that hold one rank's share of a weight, and know how to fill it from the full tensors of a checkpoint.

A layer that packs several of a checkpoint's weights (q, k, v; gate, up) names them in `shards`. `weight_loader`
copies a full tensor, or the part of it that this rank holds, into its place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.distributed.symmetric_memory import SymmetricBuffers
from nanoinfer.distributed.tensor_parallel import PendingSum, TensorParallel
from nanoinfer.errors import ModelError

MAX_TOKENS_IN_PARTS = 256  # beyond, a product fills the GPU by itself
# Over the ranks; the last two are still to be added up, or exchanged.
Sum = Tensor | SymmetricBuffers | list[PendingSum]


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs split over the ranks.

    output_sizes: the full sizes of the weights packed in this layer, by the name of their shard, in order.
    splits: how a shard is split, where not by `tp`.
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
    """The gate and up projections of an MLP in one product."""

    def __init__(self, input_size: int, intermediate_size: int, tp: TensorParallel) -> None:
        super().__init__(input_size, {"gate": intermediate_size, "up": intermediate_size}, bias=False, tp=tp)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections in one product, split by heads; ranks may share a KV head."""

    def __init__(
        self, input_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, tp: TensorParallel
    ) -> None:
        tp.shard_size(num_heads, "num_attention_heads")
        kv_split = tp.split_of_kv_heads(num_kv_heads)
        kv_size = num_kv_heads * head_dim
        sizes = {"q": num_heads * head_dim, "k": kv_size, "v": kv_size}
        super().__init__(input_size, sizes, bias=bias, tp=tp, splits={"k": kv_split, "v": kv_split})


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs split over the ranks; every rank gets the whole sum.

    A product of few rows and few columns cannot fill a GPU, unless its sums are computed in parts, at the same time.
    So on one GPU a step of few tokens gets partial sums, which `RMSNorm.add` adds up together with the residual. On
    several, it adds up the ranks' sums of such a step where they reach each other's memory. The sum of a step of many
    tokens comes in slices, see `in_slices`.
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

    def forward(self, x: Tensor) -> Sum:
        """(num_tokens, input_size) -> (num_tokens, output_size), or (parts, num_tokens, output_size), or see `Sum`."""
        # One rank adds the bias, so that the sum over the ranks has it once.
        bias = self.bias if self.tp.rank == 0 else None
        memory = self.tp.memory
        # Nothing but the number of tokens decides, so that no residual of such sums, which may lack the rows that other
        # ranks have, comes to a sum of another kind.
        if memory is not None and len(x) <= memory.max_tokens:
            buffers = memory.next_buffers(len(x))
            if bias is None:
                torch.mm(x, self.weight.t(), out=buffers.input)
            else:
                torch.addmm(bias, x, self.weight.t(), out=buffers.input)
            return buffers
        parts = self._num_parts(x)
        if parts > 1:
            x = x.unflatten(1, (parts, -1)).transpose(0, 1)  # (parts, num_tokens, input_size / parts)
            weight = self.weight.unflatten(1, (parts, -1)).permute(1, 2, 0)  # (parts, input_size / parts, output_size)
            return torch.bmm(x, weight)
        return self.tp.sum_of_products(x, self.weight, bias)

    def _num_parts(self, x: Tensor) -> int:
        """Into how many parts to cut the sums (docs/performance.md has the times that this is based on)."""
        # In float16 a part could overflow where the whole does not.
        if not x.is_cuda or x.dtype != torch.bfloat16 or self.bias is not None or self.tp.size > 1:
            return 1
        parts = 4 if len(self.weight) < 4096 else 2
        return parts if len(x) <= MAX_TOKENS_IN_PARTS and x.shape[1] % (8 * parts) == 0 else 1


def check_shape(full: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ModelError where a checkpoint's tensor has not the shape that config.json implies."""
    if tuple(full.shape) != expected:
        raise ModelError(f"the checkpoint has shape {tuple(full.shape)}, config.json implies {expected}")
