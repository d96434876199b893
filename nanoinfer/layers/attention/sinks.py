"""The sinks of a layer's query heads, see `AttentionSpec`."""

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel


class AttentionSinks(nn.Module):
    """Holds the sinks of this rank's heads, (num_heads,)."""

    def __init__(self, num_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.num_heads, self.tp = num_heads, tp
        self.weight = nn.Parameter(torch.empty(tp.shard_size(num_heads, "query heads")), requires_grad=False)

    def check_weight(self, _param: Tensor, full: Tensor) -> None:
        check_shape(full, (self.num_heads,))

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        self.check_weight(param, full)
        param.copy_(self.tp.shard(full, 0))
