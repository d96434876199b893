"""Heads that score texts or tokens: a few logits of a hidden state."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.pooling_config import HeadConfig


class ScoreHead(nn.Module):
    """A linear layer of a few outputs, computed in float32. Each rank holds all of it."""

    def __init__(self, hidden_size: int, num_labels: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_labels), requires_grad=False) if has_bias else None

    def forward(self, states: Tensor) -> Tensor:
        """(num_states, hidden_size) -> logits (num_states, num_labels) float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(states.float(), self.weight.float(), bias)


def score_head(head: HeadConfig | None, hidden_size: int, has_bias: bool) -> ScoreHead | None:
    """Return the head that a config describes, or None. has_bias: whether a classifier of texts has a bias."""
    if head is None or head.kind not in ("sequence", "tokens"):
        return None
    return ScoreHead(hidden_size, len(head.labels), has_bias or head.kind == "tokens")
