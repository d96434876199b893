"""Log-probabilities of tokens, read off the logits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.ops.logits.spec import logit_statistics

MAX_SCANNED = 20  # the kernel reads all logits once for each of the likeliest; to find more than so many, sorting wins


class PositionLogprobs(NamedTuple):
    """The log-probabilities of one position: of its token, and of the likeliest ones in about their order."""

    rank: int  # of its token; 1 is the likeliest
    token_ids: list[int]  # its token comes first
    logprobs: list[float]


class LogprobsTensors(NamedTuple):
    """Holds, for each of some positions, the log-probability of one chosen token and of the likeliest tokens."""

    ranks: Tensor  # (num_positions,): rank of the chosen token; 1 is the likeliest
    token_ids: Tensor  # (num_positions, 1 + num_best): the chosen token, then the likeliest, in order
    logprobs: Tensor  # (num_positions, 1 + num_best) float32

    def to_host(self) -> "LogprobsTensors":
        """Start a copy to pinned memory; it is complete when the device has come to it."""
        return LogprobsTensors(*(part.to("cpu", non_blocking=True) for part in self))

    def to_positions(self) -> list[PositionLogprobs]:
        """Return what is known of each position; on a host copy that is complete."""
        return list(map(PositionLogprobs, *(part.tolist() for part in self)))


def compute_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_best: int,
    first_id: int = 0,
    tp: TensorParallel | None = None,
    named: Tensor | None = None,
    normalises: bool = True,
) -> LogprobsTensors:
    """Return the log-probabilities of these tokens and of the `num_best` likeliest, by softmax(logits) in float32.

    Of equally likely tokens the lower id comes first, as in greedy decoding.

    logits: (num_positions, vocab shard) of this rank, from id `first_id` on. token_ids: (num_positions,) int, the
    chosen tokens, of any rank. named: (num_positions, num_named) int64, tokens in place of the likeliest; `logits` must
    then be of the whole vocabulary. normalises: False returns logits in place of log-probabilities.
    """
    tp = tp or TensorParallel()
    columns = token_ids.long() - first_id
    is_here = (columns >= 0) & (columns < logits.shape[1])
    chosen = logits.gather(1, columns.clamp(0, logits.shape[1] - 1).unsqueeze(1))[:, 0].float()
    chosen = tp.all_gather(chosen.masked_fill(~is_here, -torch.inf)).amax(dim=0)
    statistics = logit_statistics if num_best <= MAX_SCANNED else logit_statistics.__wrapped__  # type: ignore[attr-defined]
    of_shard = statistics(logits, chosen, token_ids.int(), first_id, min(num_best, logits.shape[1]))
    largest, sums, num_better, best_ids, best_logits = (
        tp.all_gather(part) if part.numel() else part.unsqueeze(0) for part in of_shard
    )
    total_largest = largest.amax(dim=0)
    total = (sums * (largest - total_largest).exp()).sum(dim=0)
    # All ranks' likeliest side by side; a stable sort keeps equal ones in the order of their ids.
    best_ids, best_logits = (part.transpose(0, 1).flatten(1) for part in (best_ids, best_logits))
    best_logits, order = best_logits.sort(dim=1, descending=True, stable=True)
    found_logits = torch.cat((chosen.unsqueeze(1), best_logits[:, :num_best]), dim=1)
    found_ids = torch.cat((token_ids.int().unsqueeze(1), best_ids.gather(1, order)[:, :num_best]), dim=1)
    if named is not None:
        found_logits = torch.cat((chosen.unsqueeze(1), logits.gather(1, named).float()), dim=1)
        found_ids = torch.cat((token_ids.int().unsqueeze(1), named.int()), dim=1)
    logprobs = found_logits
    if normalises:
        logprobs = found_logits - total_largest.unsqueeze(1) - total.log().unsqueeze(1)
    return LogprobsTensors(1 + num_better.sum(dim=0), found_ids, logprobs)


def gather_logits(logits: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Return all ranks' logits (num_rows, vocab_size), given those of this rank's shard."""
    if tp.size == 1:
        return logits
    padding = tp.vocab_shard_size(vocab_size) - logits.shape[1]
    shards = tp.all_gather(F.pad(logits, (0, padding)))  # (num_ranks, num_rows, shard_size)
    return shards.transpose(0, 1).flatten(1)[:, :vocab_size]
