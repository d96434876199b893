"""Layer normalisation (Ba et al. 2016), and the functions between the products of an encoder's MLP."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.ops.norms.spec import add_layer_norm

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
HEAD_ACTIVATIONS = {**ACTIVATIONS, "tanh": torch.tanh}


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension; the bias may be absent."""

    def __init__(self, size: int, eps: float, has_bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor, total: Tensor | None = None) -> Tensor:
        """Return the norm of x + residual. total: see `add_layer_norm`."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, total)


class Table(nn.Module):
    """Holds a vector for each position, or for each kind of segment. Each rank has all of them."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, indices: Tensor) -> Tensor:
        """(num_tokens,) -> (num_tokens, size)."""
        return F.embedding(indices, self.weight)
