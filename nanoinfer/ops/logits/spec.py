"""Operations on the logits of a step: a soft cap, masks of allowed tokens, and the sums behind log-probabilities."""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op


@op
def cap_logits(logits: Tensor, soft_cap: float) -> Tensor:
    """Replace logits by soft_cap * tanh(logits / soft_cap), computed in float32, and return them.

    They come close to the soft cap (Gemma 2), and never pass it. logits: (num_rows, size), rows contiguous.
    """
    return logits.copy_((logits.float() / soft_cap).tanh_() * soft_cap)


@op
def forbid_tokens(logits: Tensor, rows: Tensor, bits: Tensor, first_id: int = 0) -> None:
    """Set the logits of forbidden tokens to -inf, in place; all others keep their bits.

    logits: (num_rows, vocab shard), from token `first_id` on, which is divisible by 32. rows: (num_masks,) int64, the
    row that each mask is for, all different. bits: (num_masks, words) int32: token i is bit i % 32 of word i // 32, 1
    if it is allowed. Rows of logits and of bits are contiguous.
    """
    ids = first_id + torch.arange(logits.shape[1], device=logits.device)
    is_forbidden = ((bits[:, ids // 32] >> (ids % 32).int()) & 1) == 0
    logits[rows] = logits[rows].masked_fill(is_forbidden, -torch.inf)


@op
def logit_statistics(
    logits: Tensor, chosen_logits: Tensor, chosen_ids: Tensor, first_id: int, num_best: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the log-probabilities of rows follow from, where each has chosen a token.

    logits: (num_rows, vocab shard) from id `first_id` on, rows contiguous. chosen_logits: (num_rows,) float32.
    chosen_ids: (num_rows,) int32, perhaps of another shard. num_best: at most the size of the shard.

    The result: the largest logit and the sum of exp(logit - largest), (num_rows,) float32; how many tokens come before
    the chosen one, (num_rows,) int32; the ids and logits of the `num_best` likeliest, (num_rows, num_best) int32 and
    float32, in order. Of equal ones the lower id comes first. Of a row with NaN the sum is NaN, and the likeliest are
    any valid ids; of one of -inf alone the sum is 0.
    """
    scores = logits.float()
    ids = first_id + torch.arange(scores.shape[1], dtype=torch.int32, device=logits.device)
    chosen, its_ids = chosen_logits.unsqueeze(1), chosen_ids.unsqueeze(1)
    num_better = ((scores > chosen) | ((scores == chosen) & (ids < its_ids))).sum(dim=1, dtype=torch.int32)
    largest = scores.amax(dim=1)
    shift = largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(1)  # -inf - -inf is NaN
    sums = (scores - shift).exp().sum(dim=1)
    best_columns = _best_columns(scores.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf), num_best)
    return largest, sums, num_better, ids[best_columns], scores.gather(1, best_columns)


def _best_columns(scores: Tensor, num_best: int) -> Tensor:
    """Return the columns of the `num_best` largest of each row in order, (num_rows, num_best); of equal ones the first.

    What `topk` takes of equal ones is not said.
    """
    if num_best == 0:
        return scores.new_zeros(len(scores), 0, dtype=torch.int64)
    least = scores.topk(num_best, dim=1).values[:, -1:]
    is_larger, is_equal = scores > least, scores == least
    num_missing = num_best - is_larger.sum(dim=1, keepdim=True)
    is_best = is_larger | (is_equal & (is_equal.cumsum(dim=1) <= num_missing))
    columns = is_best.nonzero()[:, 1].view(-1, num_best)
    order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)
