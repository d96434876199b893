"""Computes the two ends of a model: token ids to vectors, and vectors to logits or scores.

What has a row for each token id is split by vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.pooling_config import HeadConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Holds the embeddings of this rank's shard of the vocabulary; other ids contribute zero to the sum over ranks."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.full_shape = (vocab_size, hidden_size)
        self.vocab = tp.vocab_shard(vocab_size)
        self.weight = nn.Parameter(torch.empty(self.vocab.size, hidden_size), requires_grad=False)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        param.copy_(full.narrow(0, *self.vocab))

    def holds(self, full: Tensor) -> bool:
        """Return whether the weight is this rank's share of a checkpoint's tensor already."""
        return torch.equal(self.weight, full.narrow(0, *self.vocab).to(self.weight))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of token ids (num_tokens,), (num_tokens, hidden_size)."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.vocab.start
        mine = (local >= 0) & (local < self.vocab.size)
        vectors = F.embedding(local.clamp(0, self.vocab.size - 1), self.weight)
        return self.tp.all_reduce(vectors.masked_fill_(~mine.unsqueeze(1), 0))  # not `* mine`: 0 x NaN is NaN


class ParallelLMHead(VocabParallelEmbedding):
    """Turns hidden states into the logits of this rank's shard of the vocabulary."""

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's logits (num_rows, vocab.size) of (num_rows, hidden_size), in `out` if it is given."""
        return torch.mm(hidden, self.weight.t(), out=out)


class NoHead(ParallelLMHead):
    """Stands for the language-model head of a model without one: it has logits of no token."""

    def __init__(self, _vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(0, hidden_size, TensorParallel())
        del self.weight
        self.register_buffer("weight", torch.empty(0, hidden_size), persistent=False)


class ScoreHead(nn.Module):
    """Computes a linear layer of a few outputs, in float32. Each rank holds all of it."""

    def __init__(self, hidden_size: int, num_labels: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_labels, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_labels), requires_grad=False) if has_bias else None

    def forward(self, states: Tensor) -> Tensor:
        """Return logits (num_states, num_labels) float32 of (num_states, hidden_size)."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(states.float(), self.weight.float(), bias)


def score_head(head: HeadConfig | None, hidden_size: int) -> ScoreHead | None:
    """Return the classifier of a decoder's texts or tokens that a config describes, or None."""
    if head is None or head.kind not in ("sequence", "tokens"):
        return None
    return ScoreHead(hidden_size, len(head.labels), has_bias=head.kind == "tokens")
