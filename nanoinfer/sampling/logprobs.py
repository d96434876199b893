"""What is done to logits, and read off them, for rows that ask for more than a temperature."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.dispatch import triton_on_cuda

SORTED_ROWS = 32  # at once


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


@triton_on_cuda("nanoinfer.kernels.top_k_top_p")
def thresholds(logits: Tensor, limits: Tensor) -> Tensor:
    """The lowest logit that each row may draw, (num_rows,) float32; -inf where all are allowed.

    top_k, top_p and min_p all keep the likeliest tokens, so each is a threshold, and the highest one counts. top_k
    keeps the k largest logits. top_p keeps the fewest tokens that have this share of what top_k has left, at the
    row's temperature (Holtzman et al. 2020). min_p keeps those of this share of the likeliest one's probability
    (Nguyen et al. 2024). Ties with the last one kept are kept.

    logits: (num_rows, vocab_size). limits: (num_rows, 4) float32, each row's temperature (0 is greedy and needs no
    threshold), top_k (0: off), top_p (1: off) and min_p (0: off).
    """
    lowest = torch.full((len(logits),), -torch.inf, device=logits.device)
    for lines in limits[:, 0].nonzero().squeeze(1).split(SORTED_ROWS):
        temperature, top_k, top_p, min_p = limits[lines].unsqueeze(2).unbind(1)
        ordered = logits[lines].float().sort(dim=1, descending=True).values
        last = ordered.gather(1, (top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
        by_k = torch.where((top_k > 0) & (top_k < ordered.shape[1]), last, -torch.inf)
        scores = (ordered - ordered[:, :1]).masked_fill_(ordered < by_k, -torch.inf) / temperature
        probabilities = scores.double().softmax(dim=1)
        more_likely = probabilities.cumsum(dim=1) - probabilities  # the share of the tokens before each
        num_kept = (more_likely < top_p).sum(dim=1, keepdim=True).clamp(min=1)
        by_p = torch.where(top_p < 1, ordered.gather(1, num_kept - 1), -torch.inf)
        by_share = ordered[:, :1] + temperature * min_p.log()
        lowest[lines] = torch.cat((by_k, by_p, by_share), dim=1).amax(dim=1)
    return lowest


def penalise(logits: Tensor, token_ids: Tensor, context_lens: Tensor, penalties: Tensor) -> Tensor:
    """Logits (num_rows, vocab_size) less the penalties for the tokens that came before, in float32.

    The repetition penalty (Keskar et al. 2019) is for tokens of the prompt and the completion, the others for those of
    the completion: presence once, frequency for each time.

    token_ids: (num_rows, max_tokens) int, the first `context_lens` of them known. penalties: (num_rows, 4) float32,
    each row's number of prompt tokens, presence, frequency and repetition penalty.
    """
    prompt_lens, presence, frequency, repetition = penalties.unsqueeze(2).unbind(1)
    num_rows, vocab_size = logits.shape
    places = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = places < context_lens[:, None]
    is_generated = is_known & (places >= prompt_lens)
    # What is not to be counted goes to a column of its own.
    counts = torch.zeros(num_rows, vocab_size + 1, device=logits.device)
    counts.scatter_add_(1, torch.where(is_generated, token_ids, vocab_size).long(), is_generated.float())
    seen = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=logits.device)
    seen.scatter_(1, torch.where(is_known, token_ids, vocab_size).long(), True)
    counts, seen = counts[:, :vocab_size], seen[:, :vocab_size]
    repetition = torch.where(seen, repetition, 1.0)
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    return penalised - counts * frequency - (counts > 0) * presence


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
