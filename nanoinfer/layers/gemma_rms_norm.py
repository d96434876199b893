"""RMSNorm of 1 + w, where checkpoints hold w: of Gemma 2 and 3, Qwen3-Next and Qwen3.5."""

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.layers.layernorm import RMSNorm


class GemmaRMSNorm(RMSNorm):
    """RMSNorm whose checkpoint holds the weight less 1. The product is in float32, and so is the weight."""

    only_scales = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        check_shape(full, tuple(param.shape))
        param.copy_(1 + full.float())
