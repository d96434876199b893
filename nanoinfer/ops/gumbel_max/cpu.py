"""The draw on a CPU where all rows are greedy: the noise would take most of the time, and counts for nothing."""

import torch
from torch import Tensor

from nanoinfer.ops.gumbel_max import spec

GROUP_SIZE = 64  # ids whose largest logit is found by vector instructions; the position of one is found without


def sample_and_append(
    logits: Tensor,
    thresholds: Tensor | None,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
) -> Tensor:
    if thresholds is not None or temperatures[rows].any():
        tables = temperatures, seeds, token_ids, context_lens
        return spec.sample_and_append.__wrapped__(logits, thresholds, rows, *tables)  # type: ignore[attr-defined]
    ids = _best(logits, rows)
    spec.enter_tokens(ids, rows, token_ids, context_lens)
    return ids


def sample_at(
    logits: Tensor, thresholds: Tensor | None, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    if thresholds is not None or temperatures[rows].any():
        return spec.sample_at.__wrapped__(logits, thresholds, rows, temperatures, seeds, positions)  # type: ignore[attr-defined]
    return _best(logits, rows)


def best_candidates(
    logits: Tensor, first_id: int, rows: Tensor, temperatures: Tensor, seeds: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    if temperatures[rows].any():
        tables = temperatures, seeds, context_lens
        return spec.best_candidates.__wrapped__(logits, first_id, rows, *tables)  # type: ignore[attr-defined]
    best, ids = _largest(logits)
    return best.nan_to_num(torch.inf, torch.inf, -torch.inf), first_id + ids.int()


def _best(logits: Tensor, rows: Tensor) -> Tensor:
    best, ids = _largest(logits)
    return torch.where(best.isfinite() & (rows >= 0), ids, -1).int()


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, NaN if there is one, and the lowest id that has it."""
    if logits.shape[1] % GROUP_SIZE:
        best, ids = logits.float().max(1)
        return best, ids
    groups = logits.float().unflatten(1, (-1, GROUP_SIZE))  # vectors of float32 are compared faster
    best, group = groups.amax(2).max(1)  # the first of equal ones
    of_rows = groups[torch.arange(groups.shape[0], device=groups.device), group]
    return best, group * GROUP_SIZE + of_rows.argmax(1)
