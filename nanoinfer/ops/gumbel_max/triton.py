"""Draws one token for each row straight from the logits, by the method of the specification, and enters it.

Nothing is normalised, sorted or copied. The largest noisy logit of a group of ids is itself the group's logsumexp plus
Gumbel noise, whichever id it belongs to. So one noise value for each group decides which group wins, and only the ids
of that group get noise of their own. That saves nearly all of the random numbers and logarithms, and the time that is
left is close to that of reading the logits.
"""

import torch
import triton
import triton.language as tl

from nanoinfer import token_ids
from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.triton import INF
from nanoinfer.ops.gumbel_max import spec

GROUP_SIZE = tl.constexpr(spec.GROUP_SIZE)  # ids
NOT_COUNTED = tl.constexpr(token_ids.NOT_COUNTED)
MIN_LINES = 16  # of a row in the kernels about lines: they are compiled once for all smaller numbers
TILE_GROUPS = 128  # groups for each program, which is one warp: no barriers


@triton.jit
def _exponential(bits):
    """Turn 32 random bits into a standard exponential number, -log(1 - u); its -log is standard Gumbel noise."""
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    uniform = tl.minimum(uniform, 0.99999994)  # the float32 below 1
    # log(1 - u) is coarse where u is small, which is where the winners are: two terms more of the series there.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333333))
    return tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform))


@triton.jit
def _best_group_kernel(
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
    """Find the group with the best noisy score in one tile of a row's logits, which begin with id `first_id`."""
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
            left = tl.where(left < threshold, -INF, left)  # NaN stays NaN
            right = tl.where(right < threshold, -INF, right)
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
def _best_id_kernel(
    logits_ptr,
    rows_ptr,
    temperatures_ptr,
    seeds_ptr,
    context_lens_ptr,
    thresholds_ptr,
    best_scores_ptr,
    best_groups_ptr,
    token_ids_ptr,  # the table that the id is entered in, or None
    out_ptr,
    out_scores_ptr,  # None where there is a table
    first_id,
    vocab_size,
    logits_stride,
    num_tiles,
    token_ids_stride,
    TILES: tl.constexpr,
):
    """Find the best id of a row's best group."""
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


@triton.jit(do_not_specialize=["num_tokens"])
def _line_tables_kernel(
    rows_ptr,
    num_row_tokens_ptr,
    temperatures_ptr,
    seeds_ptr,
    context_lens_ptr,
    line_rows_ptr,
    line_temperatures_ptr,
    line_seeds_ptr,
    positions_ptr,
    num_tokens,
    TOKENS: tl.constexpr,
):
    """Write the lines of one row."""
    index, token = tl.program_id(0), tl.arange(0, TOKENS)
    row, line, mask = tl.load(rows_ptr + index), index * num_tokens + token, token < num_tokens
    is_own = token < tl.load(num_row_tokens_ptr + index)
    tl.store(line_rows_ptr + line, tl.where(is_own, line, -1), mask=mask)
    tl.store(line_temperatures_ptr + line, tl.load(temperatures_ptr + row), mask=mask)
    tl.store(line_seeds_ptr + line, tl.load(seeds_ptr + row), mask=mask)
    tl.store(positions_ptr + line, tl.load(context_lens_ptr + row) + token, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _enter_counted_kernel(
    ids_ptr,
    proposals_ptr,
    num_row_tokens_ptr,
    rows_ptr,
    token_ids_ptr,
    context_lens_ptr,
    num_counted_ptr,  # None where nobody reads it
    out_ptr,
    num_tokens,
    token_ids_stride,
    TOKENS: tl.constexpr,
):
    """Count and enter the tokens of one row."""
    line = tl.program_id(0).to(tl.int64)
    row, token = tl.load(rows_ptr + line), tl.arange(0, TOKENS)
    ids = tl.load(ids_ptr + line * num_tokens + token, mask=token < num_tokens, other=-1)
    is_proposed = token < tl.load(num_row_tokens_ptr + line) - 1
    proposals = tl.load(proposals_ptr + line * (num_tokens - 1) + token, mask=is_proposed, other=0)
    is_right = is_proposed & (ids == proposals)
    count = tl.min(tl.where(is_right, TOKENS, token), axis=0) + 1  # the first that is wrong is drawn all the same
    context_len = tl.load(context_lens_ptr + row) + count
    last = tl.maximum(ids, 0)
    tl.store(token_ids_ptr + row * token_ids_stride + context_len - 1 + token * 0, last, mask=token == count - 1)
    tl.store(context_lens_ptr + row, context_len)
    if num_counted_ptr is not None:
        tl.store(num_counted_ptr + row, count)
    ids = tl.where(token < count, ids, NOT_COUNTED)
    tl.store(out_ptr + line * num_tokens + token, ids, mask=token < num_tokens)


def sample_and_append(logits, thresholds, rows, temperatures, seeds, token_ids, context_lens):
    ids = logits.new_empty(len(logits), dtype=torch.int32)
    _launch(logits, 0, thresholds, (rows, temperatures, seeds, context_lens), ids, token_ids=token_ids)
    return ids


def sample_at(logits, thresholds, rows, temperatures, seeds, positions):
    return _candidates(logits, 0, thresholds, (rows, temperatures, seeds, positions))[1]


def best_candidates(logits, first_id, rows, temperatures, seeds, context_lens):
    return _candidates(logits, first_id, None, (rows, temperatures, seeds, context_lens))


def _candidates(logits, first_id, thresholds, inputs):
    """Return the score and the id of the token that each line draws."""
    ids = logits.new_empty(len(logits), dtype=torch.int32)
    scores = logits.new_empty(len(logits), dtype=torch.float32)
    _launch(logits, first_id, thresholds, inputs, ids, scores=scores)
    return scores, ids


def line_tables(rows, num_row_tokens, num_tokens, temperatures, seeds, context_lens):
    num_rows = len(rows)
    dtypes = (torch.int64, torch.float32, torch.int64, torch.int32)
    tables = spec.LineTables(*(rows.new_empty(num_rows * num_tokens, dtype=dtype) for dtype in dtypes))
    if num_rows:
        inputs = (rows, num_row_tokens, temperatures, seeds, context_lens)
        tokens = max(MIN_LINES, next_power_of_2(num_tokens))
        _line_tables_kernel[(num_rows,)](*inputs, *tables, num_tokens, TOKENS=tokens, num_warps=1)
    return tables


def enter_counted(ids, proposals, num_row_tokens, rows, token_ids, context_lens, num_counted):
    out = torch.empty_like(ids)
    num_rows, num_tokens = ids.shape
    if num_rows:
        inputs = (ids, proposals, num_row_tokens, rows, token_ids, context_lens, num_counted, out)
        sizes = (num_tokens, token_ids.stride(0))
        tokens = max(MIN_LINES, next_power_of_2(num_tokens))
        _enter_counted_kernel[(num_rows,)](*inputs, *sizes, TOKENS=tokens, num_warps=1)
    return out


def _launch(logits, first_id, thresholds, tables, out, token_ids=None, scores=None):
    """Launch both kernels. They write `out`, and either enter the ids in `token_ids` or write `scores`."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    if num_rows == 0:
        return
    num_tiles = ceil_div(vocab_size, TILE_GROUPS * GROUP_SIZE.value)
    best_scores = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    best_groups = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    inputs = (logits, *tables, thresholds, best_scores, best_groups)
    sizes = (first_id, vocab_size, logits.stride(0), num_tiles)
    _best_group_kernel[(num_rows, num_tiles)](*inputs, *sizes, GROUPS=TILE_GROUPS, num_warps=1)
    _best_id_kernel[(num_rows,)](
        *inputs,
        token_ids,
        out,
        scores,
        *sizes,
        0 if token_ids is None else token_ids.stride(0),
        TILES=next_power_of_2(num_tiles),
        num_warps=1,
    )
