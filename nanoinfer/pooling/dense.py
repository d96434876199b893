"""The dense layers that sentence-transformers puts after pooling."""

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nanoinfer.checkpoint.pooling_config import DenseConfig
from nanoinfer.errors import ModelError


class DenseLayer:
    """activation(x W^T + b), in float32. weight: (out_features, in_features); bias: (out_features,) or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.weight, self.bias = weight.float(), None if bias is None else bias.float()
        self.activation = nn.Softmax(-1) if activation == "Softmax" else getattr(nn, activation)()

    def __call__(self, vectors: Tensor) -> Tensor:
        return self.activation(F.linear(vectors, self.weight, self.bias))


def load_dense(configs: tuple[DenseConfig, ...], is_random: bool, device: torch.device) -> list[DenseLayer]:
    """Return the layers that a folder describes. Raises ModelError where their weights are missing or do not fit."""
    return [_load(config, is_random, device) for config in configs]


def _load(config: DenseConfig, is_random: bool, device: torch.device) -> DenseLayer:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (config.out_features, config.in_features)}
    shapes |= {"linear.bias": (config.out_features,)} if config.bias else {}
    if is_random:
        weights = {name: torch.full(shape, 0.02) for name, shape in shapes.items()}
    else:
        path = config.path / "model.safetensors"
        try:
            weights = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read ({error}); a dense layer's weights are in safetensors") from None
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
            raise ModelError(f"{path} has weights of other names or shapes than its config.json: it must have {shapes}")
    bias = weights.get("linear.bias")
    return DenseLayer(weights["linear.weight"].to(device), None if bias is None else bias.to(device), config.activation)
