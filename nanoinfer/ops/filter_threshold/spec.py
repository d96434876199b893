"""min-p, top-k and top-p filtering, as one threshold on the logits of each row."""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op

SORTED_ROWS = 32  # at once
FILTERS = ("top_k", "top_p", "min_p")  # the options of a row, in the order of the limits


@op
def thresholds(logits: Tensor, limits: Tensor) -> Tensor:
    """Return the lowest logit that each row may draw, (num_rows,) float32; -inf where all are allowed.

    min_p, top_k and top_p all keep the likeliest tokens, so each is a threshold, and the highest one counts. min_p
    keeps the tokens with this share of the likeliest one's probability, at the row's temperature (Nguyen et al. 2024).
    top_k keeps the k largest logits. top_p keeps the fewest tokens that have this share of what both have left
    (Holtzman et al. 2020). Ties with the last one kept are kept.

    logits: (num_rows, vocab_size), rows contiguous. limits: (num_rows, 4) float32, contiguous, each row's temperature
    (0 is greedy and needs no threshold), then its FILTERS: top_k (0: off), top_p (1: off) and min_p (0: off).
    """
    lowest = torch.full((len(logits),), -torch.inf, dtype=torch.float32, device=logits.device)
    for some in limits[:, 0].nonzero().squeeze(1).split(SORTED_ROWS):
        temperature, top_k, top_p, min_p = limits[some].unsqueeze(2).unbind(1)
        ordered = logits[some].float().sort(dim=1, descending=True).values
        last = ordered.gather(1, (top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
        by_k = torch.where((top_k > 0) & (top_k < ordered.shape[1]), last, -torch.inf)
        by_share = ordered[:, :1] + temperature * min_p.log()
        is_out = ordered < torch.maximum(by_k, by_share)
        scores = (ordered - ordered[:, :1]).masked_fill_(is_out, -torch.inf) / temperature
        probabilities = scores.double().softmax(dim=1)
        more_likely = probabilities.cumsum(dim=1) - probabilities  # the share of the tokens before each
        num_kept = (more_likely < top_p).sum(dim=1, keepdim=True).clamp(min=1)
        by_p = torch.where(top_p < 1, ordered.gather(1, num_kept - 1), -torch.inf)
        lowest[some] = torch.cat((by_k, by_p, by_share), dim=1).amax(dim=1)
    return lowest
