"""Log-probabilities of tokens, read off the logits."""

from typing import NamedTuple

import torch
from torch import Tensor


class BestTokens(NamedTuple):
    """Of a token at each of some places, and of the likeliest ones there."""

    ranks: Tensor  # (num_places,): 1 is the likeliest
    token_ids: Tensor  # (num_places, 1 + num_best) int64: the token, and the likeliest in about their order
    logprobs: Tensor  # (num_places, 1 + num_best) float32

    def to_host(self) -> "BestTokens":
        """Copies in pinned memory, complete when the device has come to them."""
        return BestTokens(*(part.to("cpu", non_blocking=True) for part in self))

    def tolist(self) -> list[tuple[int, list[int], list[float]]]:
        """Rank, token ids and log-probabilities of each place."""
        return list(zip(*(part.tolist() for part in self), strict=True))


def best_tokens(logits: Tensor, token_ids: Tensor, num_best: int) -> BestTokens:
    """Log-probabilities of these tokens and of the `num_best` likeliest, by softmax(logits) in float32.

    logits: (num_places, vocab_size). token_ids: (num_places,) int.
    """
    scores, token_ids = logits.float(), token_ids.long().unsqueeze(1)
    chosen = scores.gather(1, token_ids)
    ids = torch.arange(scores.shape[1], device=logits.device)
    ranks = 1 + ((scores > chosen) | ((scores == chosen) & (ids < token_ids))).sum(dim=1)
    found = torch.cat((token_ids, scores.topk(num_best, dim=1).indices), dim=1)
    return BestTokens(ranks, found, scores.log_softmax(dim=1).gather(1, found))
