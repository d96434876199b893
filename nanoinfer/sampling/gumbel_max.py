"""The draw of a token by the Gumbel-max trick, in plain PyTorch: the specification of `kernels/gumbel_max.py`.

argmax(logits + temperature * Gumbel noise) is a draw from softmax(logits / temperature) (Gumbel 1954). It is found
hierarchically: first the group of ids, then the id in it (Maddison et al. 2014, "A* sampling").
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer import kernels
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.sampling.philox import exponential, philox

GROUP_SIZE = 16  # neighbouring ids that compete as one before they compete with each other; as in the kernel


@triton_on_cuda(lambda: kernels.gumbel_max.sample_and_append)
def sample_and_append(
    logits: Tensor,
    thresholds: Tensor | None,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Draw the next token of each row of the tables, enter it there, and return the ids (num_rows,) int32.

    A row with NaN or infinity among its logits yields -1, and enters 0 in the table.

    logits: (num_rows, vocab_size). thresholds: (num_rows,) float32, the lowest logit that each row may draw, or None.
    rows: (num_rows,) int64, rows of the tables; one of -1 is skipped and yields -1 (it indexes the last row, which must
    be a spare one). Tables: temperatures (table_rows,) float32, seeds (table_rows,) int64, token_ids (table_rows,
    max_tokens) int32 and context_lens (table_rows,) int32, the number of known tokens: the column of the new one.
    """
    if thresholds is not None:
        logits = logits.float()
        logits = torch.where(logits < thresholds.unsqueeze(1), -torch.inf, logits)  # NaN stays NaN
    ids = torch.where(rows >= 0, sample(logits, temperatures[rows], seeds[rows], context_lens[rows]), -1)
    _append(ids, rows, token_ids, context_lens)
    return ids


def sample_and_append_across_ranks(
    logits: Tensor,
    first_id: int,
    tp: TensorParallel,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Do what `sample_and_append` does where each rank has the logits of its vocabulary shard, from `first_id` on.

    Each rank draws its best candidate, the ranks exchange these, and every rank enters the winner. The result does not
    depend on the number of ranks, except for rounding.
    """
    scores, ids = best_candidates(logits, first_id, rows, temperatures, seeds, context_lens)
    gathered = tp.all_gather(torch.stack((scores.view(torch.int32), ids)))  # (num_ranks, 2, num_rows)
    best, winner = gathered[:, 0].view(torch.float32).max(0)  # ties go to the lower rank, so to lower ids
    ids = gathered[:, 1].gather(0, winner.unsqueeze(0)).squeeze(0)
    ids = torch.where((rows >= 0) & best.isfinite(), ids, -1)
    _append(ids, rows, token_ids, context_lens)
    return ids


@triton_on_cuda(lambda: kernels.gumbel_max.best_candidates)
def best_candidates(
    logits: Tensor, first_id: int, rows: Tensor, temperatures: Tensor, seeds: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the noisy score, float32, and the id, int32, of the winner in a vocabulary shard: (num_rows,) each.

    The shard begins with id `first_id`. The score is infinite where the shard has NaN or infinity. Rows of -1 may
    yield anything.
    """
    scores, ids = _noisy_best(logits, first_id, temperatures[rows], seeds[rows], context_lens[rows])
    return scores, ids.int()


def _append(ids: Tensor, rows: Tensor, token_ids: Tensor, context_lens: Tensor) -> None:
    """Enter the drawn ids in the tables."""
    positions = context_lens[rows]
    token_ids[rows, positions.long()] = ids.clamp(min=0)
    context_lens[rows] = positions + (rows >= 0)


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw an id for each row from softmax(logits / temperature), the best id where that is 0: (num_rows,) int32.

    The noise depends on (seed, position, vocabulary id) and nothing else. A row with NaN or infinity among its logits
    yields -1. A temperature below about 1e-5 is lost in the rounding of the logits: it is greedy in effect, with ties
    to the lower id.

    logits: (num_rows, vocab_size). temperatures: (num_rows,) float32. seeds: (num_rows,) int64.
    positions: (num_rows,) int32, the drawn token's place in its sequence.
    """
    scores, ids = _noisy_best(logits, 0, temperatures, seeds, positions)
    return torch.where(scores.isfinite(), ids, -1).int()


def _noisy_best(
    logits: Tensor, first_id: int, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return score and id of the winner, (num_rows,) each; `first_id` is a multiple of 4 * GROUP_SIZE."""
    scores = logits.float()
    scores = torch.where(scores.isnan(), torch.inf, scores)
    if not temperatures.is_cuda and not temperatures.any():  # the noise takes most of the time, and counts for nothing
        best_score, best = scores.max(1)
        return best_score, first_id + best
    scores = F.pad(scores, (0, -scores.shape[1] % GROUP_SIZE), value=-torch.inf).unflatten(1, (-1, GROUP_SIZE))
    peaks = scores.amax(dim=(1, 2), keepdim=True)
    seeds, positions, temperatures = (column.unsqueeze(1) for column in (seeds, positions.long(), temperatures))
    zero = torch.zeros_like(positions)
    # Groups race: exp(noisy score / temperature) is weights over an exponential. One Philox call serves four groups.
    weights = ((scores - peaks) / temperatures.unsqueeze(2)).exp().sum(2)  # (num_rows, num_groups)
    counters = first_id // (4 * GROUP_SIZE) + torch.arange(-(-weights.shape[1] // 4), device=logits.device)
    bits = torch.stack(philox(seeds, counters, positions, zero), dim=-1).flatten(1)[:, : weights.shape[1]]
    race = torch.where(temperatures > 0, weights / exponential(bits), scores.amax(2))
    fastest, group = race.max(1, keepdim=True)
    peaks = peaks.squeeze(2)
    noisy = torch.where(temperatures > 0, peaks + temperatures * fastest.log(), fastest)
    best_score = torch.where(peaks.isfinite(), noisy, peaks)
    ids = group * GROUP_SIZE + torch.arange(GROUP_SIZE, device=logits.device)  # (num_rows, GROUP_SIZE)
    noise = -exponential(philox(seeds, first_id + ids, positions, zero + 1)[0]).log()
    scores = scores.take_along_dim(group.unsqueeze(2), dim=1).squeeze(1) + temperatures * noise
    best = first_id + ids.gather(1, scores.argmax(1, keepdim=True))
    return best_score.squeeze(1), best.squeeze(1)
