"""The draw of a token by the Gumbel-max trick, with noise from the Philox random number generator.

argmax(logits + temperature * Gumbel noise) is a draw from softmax(logits / temperature) (Gumbel 1954). It is found
hierarchically: first the group of ids, then the id in it (Maddison et al. 2014, "A* sampling"). A random number depends
on its key, the request's seed, and its counters, the token's position and the group or the id. So the order of draws
and the batch do not matter.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.dispatch import op
from nanoinfer.token_ids import NOT_COUNTED

GROUP_SIZE = 16  # neighbouring ids that compete as one before they compete with each other
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


class LineTables(NamedTuple):
    """Holds what `sample_at` reads where several tokens of a row are drawn: tables with a row for each line.

    Line i * num_tokens + j is token j of row i. rows: (num_lines,) int64, the lines themselves; -1 for those that are
    not drawn. temperatures, seeds, positions: (num_lines,) float32, int64 and int32.
    """

    rows: Tensor
    temperatures: Tensor
    seeds: Tensor
    positions: Tensor


@op
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

    logits: (num_rows, vocab_size), rows contiguous. thresholds: (num_rows,) float32, the lowest logit that each row may
    draw, or None. rows: (num_rows,) int64, rows of the tables; one of -1 is skipped and yields -1 (it indexes the last
    row, which must be a spare one). Tables: temperatures (table_rows,) float32, seeds (table_rows,) int64, token_ids
    (table_rows, max_tokens) int32 and context_lens (table_rows,) int32, the number of known tokens: the column of the
    new one.
    """
    ids = sample(_at_least(thresholds, logits), temperatures[rows], seeds[rows], context_lens[rows])
    ids = torch.where(rows >= 0, ids, -1)
    enter_tokens(ids, rows, token_ids, context_lens)
    return ids


@op
def sample_at(
    logits: Tensor, thresholds: Tensor | None, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Draw a token for each row at its position, as `sample_and_append` does, and return the ids (num_rows,) int32.

    Nothing is entered in the tables: `enter_counted` finds out which of several tokens of a sequence count.

    rows: (num_rows,) int64, rows of the tables; one of -1 is skipped and yields -1. Tables: temperatures, seeds and
    positions, as in `sample`. The others: as in `sample_and_append`.
    """
    ids = sample(_at_least(thresholds, logits), temperatures[rows], seeds[rows], positions[rows])
    return torch.where(rows >= 0, ids, -1)


@op
def line_tables(
    rows: Tensor, num_row_tokens: Tensor, num_tokens: int, temperatures: Tensor, seeds: Tensor, context_lens: Tensor
) -> LineTables:
    """Return the tables of the lines of a step that draws `num_tokens` tokens of each row, if they are its own.

    rows: (num_rows,) int64. num_row_tokens: (num_rows,) int32, how many lines are a row's own; the rest are not drawn.
    temperatures, seeds, context_lens: the tables of `sample_and_append`.
    """
    token = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
    lines = torch.arange(len(rows) * num_tokens, device=rows.device).view(-1, num_tokens)
    return LineTables(
        torch.where(token < num_row_tokens.unsqueeze(1), lines, -1).flatten(),
        temperatures[rows].repeat_interleave(num_tokens),
        seeds[rows].repeat_interleave(num_tokens),
        (context_lens[rows].unsqueeze(1) + token).flatten(),
    )


@op
def best_candidates(
    logits: Tensor, first_id: int, rows: Tensor, temperatures: Tensor, seeds: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the noisy score, float32, and the id, int32, of the winner in a vocabulary shard: (num_rows,) each.

    The shard begins with id `first_id`. Its rows are contiguous. The score is infinite where the shard has NaN or
    infinity. Rows of -1 may yield anything.
    """
    scores, ids = _noisy_best(logits, first_id, temperatures[rows], seeds[rows], context_lens[rows])
    return scores, ids.int()


@op
def enter_counted(
    ids: Tensor,
    proposals: Tensor,
    num_row_tokens: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
    num_counted: Tensor | None,
) -> Tensor:
    """Find out which of several tokens drawn for each row count, enter them, and return the ids (num_rows, num_tokens).

    Token 0 counts. Token j was drawn as if proposals 0 to j - 1 were the tokens before it, so it counts if tokens 0 to
    j - 1 are equal to them. What does not count, and padding, is NOT_COUNTED in the result. A row whose logits were NaN
    or infinite at a token that counts has -1 there, and enters 0; no token after that counts.

    ids: (num_rows, num_tokens) int32, contiguous. proposals: (num_rows, num_tokens - 1) int32, contiguous, at least 0,
    and anything beyond a row's own. num_row_tokens: (num_rows,) int32, at least 1; the rest of a row is padding. rows:
    (num_rows,) int64, no row twice. token_ids and context_lens: the tables of `sample_and_append`. The proposals follow
    a row's known tokens there, so that only the last token that counts is new. num_counted: (table_rows,) int32 or
    None, which gets how many tokens of each of these rows count.
    """
    token = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    is_right = (ids[:, :-1] == proposals) & (token[1:] < num_row_tokens.unsqueeze(1))
    counts = 1 + is_right.int().cumprod(1).sum(1, dtype=torch.int32)
    lens = context_lens[rows] + counts
    last = ids.gather(1, counts.unsqueeze(1).long() - 1).squeeze(1)
    token_ids[rows, lens.long() - 1] = last.clamp(min=0)
    context_lens[rows] = lens
    if num_counted is not None:
        num_counted[rows] = counts
    return torch.where(token < counts.unsqueeze(1), ids, NOT_COUNTED)


def enter_tokens(ids: Tensor, rows: Tensor, token_ids: Tensor, context_lens: Tensor) -> None:
    """Enter the drawn ids, (num_rows,), in the tables, which are those of `sample_and_append`; -1 is entered as 0."""
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


def _at_least(thresholds: Tensor | None, logits: Tensor) -> Tensor:
    """Forbid logits below their row's threshold."""
    if thresholds is None:
        return logits
    logits = logits.float()
    return torch.where(logits < thresholds.unsqueeze(1), -torch.inf, logits)  # NaN stays NaN


def _noisy_best(
    logits: Tensor, first_id: int, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return score and id of the winner, (num_rows,) each; `first_id` is a multiple of 4 * GROUP_SIZE."""
    scores, num_missing = logits.float(), -logits.shape[1] % GROUP_SIZE
    if num_missing:
        scores = F.pad(scores, (0, num_missing), value=-torch.inf)
    scores = scores.unflatten(1, (-1, GROUP_SIZE))
    peaks = scores.amax(dim=(1, 2), keepdim=True)  # NaN if one of them is
    seeds, positions, temperatures = seeds.unsqueeze(1), positions.long().unsqueeze(1), temperatures.unsqueeze(1)
    zero = torch.zeros_like(positions)
    # Groups race: exp(noisy score / temperature) is weights over an exponential. One Philox call serves four groups.
    # In place where it can be: to a CPU, new memory costs more than the arithmetic.
    weights = (scores - peaks).div_(temperatures.unsqueeze(2)).exp_().sum(2)  # (num_rows, num_groups)
    counters = first_id // (4 * GROUP_SIZE) + torch.arange(ceil_div(weights.shape[1], 4), device=logits.device)
    bits = torch.stack(philox(seeds, counters, positions, zero), dim=-1).flatten(1)[:, : weights.shape[1]]
    race = torch.where(temperatures > 0, weights / exponential(bits), scores.amax(2))
    fastest, group = race.max(1, keepdim=True)
    peaks = peaks.squeeze(2)
    noisy = torch.where(temperatures > 0, peaks + temperatures * fastest.log(), fastest)
    best_score = torch.where(peaks.isfinite(), noisy, torch.where(peaks.isnan(), torch.inf, peaks))
    ids = group * GROUP_SIZE + torch.arange(GROUP_SIZE, device=logits.device)  # (num_rows, GROUP_SIZE)
    noise = -exponential(philox(seeds, first_id + ids, positions, zero + 1)[0]).log()
    scores = scores.take_along_dim(group.unsqueeze(2), dim=1).squeeze(1) + temperatures * noise
    best = first_id + ids.gather(1, scores.argmax(1, keepdim=True))
    return best_score.squeeze(1), best.squeeze(1)


def exponential(bits: Tensor) -> Tensor:
    """Turn 32 random bits into a standard exponential number, float32; its -log is standard Gumbel noise."""
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)  # log(1 - u) is coarse where u is small, which is where the winners are


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox-4x32-10 (Salmon et al. 2011) of the counters (c0, c1, c2, 0): four 32-bit numbers, as int64."""
    key0, key1 = seed & MASK32, (seed >> 32) & MASK32
    c3 = torch.zeros_like(c2)
    for _ in range(10):
        # The products may pass 2^63: int64 wraps round, and the masked shift reads the right bits all the same.
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & MASK32) ^ c1 ^ key0, ((product0 >> 32) & MASK32) ^ c3 ^ key1
        c1, c3 = product1 & MASK32, product0 & MASK32
        key0, key1 = (key0 + PHILOX_KEY_STEPS[0]) & MASK32, (key1 + PHILOX_KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3
