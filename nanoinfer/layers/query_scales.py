"""Queries far from the start are scaled, so that attention over many keys stays sharp (Llama 4, Ministral 3)."""

import torch
from torch import Tensor

from nanoinfer.checkpoint.model_config import ModelConfig


def query_scales(config: ModelConfig, max_positions: int) -> Tensor | None:
    """Return the factor of the queries at each position, (max_positions, 1) float32; None: all are 1.

    It is 1 + beta log(1 + floor(position / original length)).
    """
    beta, original = config.query_scaling_beta, config.rope.parameters.get("original_max_position_embeddings")
    if beta is None or original is None or max_positions <= original:
        return None
    lengths = torch.arange(max_positions, dtype=torch.float32).div(original, rounding_mode="floor")
    return (1 + beta * torch.log1p(lengths)).unsqueeze(1)
