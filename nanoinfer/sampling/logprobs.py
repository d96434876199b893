"""Log-probabilities of tokens, read off the logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.engine.batch import PositionLogprobs


class LogprobsTensors(NamedTuple):
    """Holds, for each of some positions, the log-probability of one chosen token and of the likeliest tokens."""

    ranks: Tensor  # (num_positions,): rank of the chosen token; 1 is the likeliest
    token_ids: Tensor  # (num_positions, 1 + num_best) int64: the chosen token, then the likeliest, about in order
    logprobs: Tensor  # (num_positions, 1 + num_best) float32

    def to_host(self) -> "LogprobsTensors":
        """Start a copy to pinned memory; it is complete when the device has come to it."""
        return LogprobsTensors(*(part.to("cpu", non_blocking=True) for part in self))

    def to_positions(self) -> list[PositionLogprobs]:
        """Return what is known of each position; on a host copy that is complete."""
        return list(map(PositionLogprobs, *(part.tolist() for part in self)))


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_best: int) -> LogprobsTensors:
    """Return the log-probabilities of these tokens and of the `num_best` likeliest, by softmax(logits) in float32.

    logits: (num_positions, vocab_size). token_ids: (num_positions,) int, the chosen tokens.
    """
    scores, token_ids = logits.float(), token_ids.long().unsqueeze(1)
    chosen = scores.gather(1, token_ids)
    ids = torch.arange(scores.shape[1], device=logits.device)
    # Of equally likely tokens the lower id comes first, as in greedy decoding.
    ranks = 1 + ((scores > chosen) | ((scores == chosen) & (ids < token_ids))).sum(dim=1)
    found = torch.cat((token_ids, scores.topk(num_best, dim=1).indices), dim=1)
    return LogprobsTensors(ranks, found, scores.log_softmax(dim=1).gather(1, found))
