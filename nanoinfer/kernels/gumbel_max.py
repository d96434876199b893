"""Draw one token for each row straight from the logits, and enter it in the tables. Twin: `sample_and_append` on a CPU.

argmax(logits + temperature * Gumbel noise) is a draw from softmax(logits / temperature) (Gumbel 1954), so nothing is
normalised, sorted or copied. The largest noisy logit of a group of ids is itself the group's logsumexp plus Gumbel
noise, whichever id it belongs to (Maddison et al. 2014, "A* sampling"). So the draw is made from the top down: first a
group of neighbouring ids, with one noise for each group, then an id of that group. That saves nearly all of the random
numbers and logarithms, and what is left is close to the time of reading the logits.

The noise is Philox-4x32-10 (Salmon et al. 2011) of (the request's seed, the token's position, the group or the id), so
that a request's random stream is its own, whatever else is in the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_SIZE = tl.constexpr(16)  # ids; part of the specification, since it decides what is drawn
INF = tl.constexpr(float("inf"))
TILE_GROUPS = 128  # groups for each program, which is one warp: no barriers


@triton.jit
def _exponential(bits):
    """32 random bits to a standard exponential number, -log(1 - u); its -log is standard Gumbel noise."""
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    uniform = tl.minimum(uniform, 0.99999994)  # the float32 below 1
    # log(1 - u) is coarse where u is small, which is where the winners are: two terms more of the series there.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333333))
    return tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform))


@triton.jit
def _best_in_tile_kernel(
    logits_ptr,
    rows_ptr,
    temperatures_ptr,
    seeds_ptr,
    context_lens_ptr,
    thresholds_ptr,
    best_scores_ptr,
    best_groups_ptr,
    first_id,
    vocab_size,
    logits_stride,
    num_tiles,
    GROUPS: tl.constexpr,
):
    """The group with the best noisy score in one tile of a row's logits, which begin with id `first_id`."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + line)
    if row >= 0:
        # Half a group is 16 bytes, one load of one thread: its sums need no exchange between threads.
        half: tl.constexpr = GROUP_SIZE // 2
        ids = (tile * GROUPS + tl.arange(0, GROUPS)[:, None]) * GROUP_SIZE + tl.arange(0, half)[None, :]
        logits_ptr += line * logits_stride
        left = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-INF).to(tl.float32)
        right = tl.load(logits_ptr + ids + half, mask=ids + half < vocab_size, other=-INF).to(tl.float32)
        position = tl.load(context_lens_ptr + row)
        if thresholds_ptr is not None:
            threshold = tl.load(thresholds_ptr + line)
            left = tl.where(left < threshold, -INF, left)  # which leaves NaN where it is
            right = tl.where(right < threshold, -INF, right)
            position -= 1
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0:
            # A race: group's weight / exponential is exp(noisy score / temperature), and one logarithm is for all.
            peak = tl.max(tl.max(tl.maximum(left, right), axis=1), axis=0)
            reference = tl.where(tl.abs(peak) < INF, peak, 0.0)
            scale = tl.minimum(1.44269504 / temperature, 3e38)  # exp(x / temperature) = 2 ** (x * scale)
            weights = tl.exp2((left - reference) * scale) + tl.exp2((right - reference) * scale)
            # One Philox call serves four groups.
            counter = first_id // (4 * GROUP_SIZE) + tile * (GROUPS // 4) + tl.arange(0, GROUPS // 4)
            zero = counter * 0
            r0, r1, r2, r3 = tl.philox(tl.load(seeds_ptr + row), counter, zero + position, zero, zero)
            bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
            race = tl.sum(weights, axis=1) / _exponential(bits)
            race = tl.where(race == race, race, INF)  # NaN and infinity win, so that they are seen
            fastest, best = tl.max(race, axis=0, return_indices=True)
            best_score = tl.where(fastest < INF, peak, INF)
            if tl.abs(best_score) < INF:
                best_score += temperature * tl.log(fastest)
        else:
            scores = tl.maximum(tl.where(left == left, left, INF), tl.where(right == right, right, INF))
            best_score, best = tl.max(tl.max(scores, axis=1), axis=0, return_indices=True)
        tl.store(best_scores_ptr + line * num_tiles + tile, best_score)
        tl.store(best_groups_ptr + line * num_tiles + tile, tile * GROUPS + best)


@triton.jit
def _append_best_kernel(
    logits_ptr,
    rows_ptr,
    temperatures_ptr,
    seeds_ptr,
    token_ids_ptr,
    context_lens_ptr,
    thresholds_ptr,
    best_scores_ptr,
    best_groups_ptr,
    out_ptr,
    out_scores_ptr,
    first_id,
    vocab_size,
    logits_stride,
    token_ids_stride,
    num_tiles,
    TILES: tl.constexpr,
):
    """The best id of a row's best group, in `out`, and in the tables or, where there are none, with its score."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + line)
    if row >= 0:
        tile = tl.arange(0, TILES)
        scores = tl.load(best_scores_ptr + line * num_tiles + tile, mask=tile < num_tiles, other=-INF)
        best_score, best_tile = tl.max(scores, axis=0, return_indices=True)  # ties go to the lower tile, so lower ids
        group = tl.load(best_groups_ptr + line * num_tiles + best_tile)
        ids = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
        scores = tl.load(logits_ptr + line * logits_stride + ids, mask=ids < vocab_size, other=-INF).to(tl.float32)
        position = tl.load(context_lens_ptr + row)
        if thresholds_ptr is not None:
            scores = tl.where(scores < tl.load(thresholds_ptr + line), -INF, scores)
            position -= 1  # of the newest token, in whose place the new one goes
        zero = ids * 0
        bits, _, _, _ = tl.philox(tl.load(seeds_ptr + row), first_id + ids, zero + position, zero + 1, zero)
        noise = -tl.log(_exponential(bits))
        _, best = tl.max(scores + tl.load(temperatures_ptr + row) * noise, axis=0, return_indices=True)
        token_id = tl.where(tl.abs(best_score) < INF, first_id + group * GROUP_SIZE + best, -1)
        tl.store(out_ptr + line, token_id)
        if token_ids_ptr is None:
            tl.store(out_scores_ptr + line, best_score)
        else:
            tl.store(token_ids_ptr + row * token_ids_stride + position, tl.maximum(token_id, 0))
            tl.store(context_lens_ptr + row, position + 1)
    else:
        tl.store(out_ptr + line, -1)


def sample_and_append(
    logits: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, token_ids: Tensor, context_lens: Tensor
) -> Tensor:
    """As `sample_and_append` in `layers/sampler.py`; the logits of a row must be contiguous."""
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _draw(logits, 0, rows, temperatures, seeds, token_ids, context_lens, None, ids, None)
    return ids


def redraw(
    logits: Tensor,
    thresholds: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """As `redraw` in `layers/sampler.py`; the logits of a row must be contiguous."""
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _draw(logits, 0, rows, temperatures, seeds, token_ids, context_lens, thresholds, ids, None)
    return ids


def best_candidates(
    logits: Tensor, first_id: int, rows: Tensor, temperatures: Tensor, seeds: Tensor, context_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """As `best_candidates` in `layers/sampler.py`; the logits of a row must be contiguous."""
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    scores = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _draw(logits, first_id, rows, temperatures, seeds, None, context_lens, None, ids, scores)
    return scores, ids


def _draw(
    logits: Tensor,
    first_id: int,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_ids: Tensor | None,
    context_lens: Tensor,
    thresholds: Tensor | None,
    out: Tensor,
    out_scores: Tensor | None,
) -> None:
    """Both kernels; either the tables' `token_ids` or `out_scores` are given, and written.

    With thresholds, the newest token is drawn again, and the next one without.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    num_tiles = triton.cdiv(vocab_size, TILE_GROUPS * GROUP_SIZE.value)
    best_scores = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    best_groups = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    if num_rows == 0:
        return
    _best_in_tile_kernel[(num_rows, num_tiles)](
        logits,
        rows,
        temperatures,
        seeds,
        context_lens,
        thresholds,
        best_scores,
        best_groups,
        first_id,
        vocab_size,
        logits.stride(0),
        num_tiles,
        GROUPS=TILE_GROUPS,
        num_warps=1,
    )
    _append_best_kernel[(num_rows,)](
        logits,
        rows,
        temperatures,
        seeds,
        token_ids,
        context_lens,
        thresholds,
        best_scores,
        best_groups,
        out,
        out_scores,
        first_id,
        vocab_size,
        logits.stride(0),
        0 if token_ids is None else token_ids.stride(0),
        num_tiles,
        TILES=triton.next_power_of_2(num_tiles),
        num_warps=1,
    )
