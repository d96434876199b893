"""The lowest logit that each row may draw, under top_k, top_p and min_p. Twin: `thresholds` in layers/logits.py.

Nothing is sorted. A threshold is found by bisection on the bits of the numbers, since the bits of floats, read as whole
numbers, are in the floats' order: a 16-bit logit takes 16 steps. So that a step need not look at all logits, the first
kernel takes the largest of each group of neighbouring ids. A group whose largest is below the k-th largest of these
has none of the k largest logits, so that the second kernel leaves but few candidates to the third.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_SIZE = tl.constexpr(64)  # ids
LOWEST_KEY = tl.constexpr(-(2**31))
INF = tl.constexpr(float("inf"))
GROUPS_AT_ONCE = 64
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # of a logit as a float32


@triton.jit
def _keys(x):
    """Whole numbers, int32, in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _limits(limits_ptr, line):
    """What a row asks for: (whether anything at all, temperature, top_k, top_p, min_p)."""
    temperature, top_k = tl.load(limits_ptr + line * 4), tl.load(limits_ptr + line * 4 + 1)
    top_p, min_p = tl.load(limits_ptr + line * 4 + 2), tl.load(limits_ptr + line * 4 + 3)
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)), temperature, top_k, top_p, min_p


@triton.jit
def _factor(temperature):
    return tl.minimum(1.44269504 / temperature, 3e38)  # exp(x / temperature) = 2 ** (x * factor)


@triton.jit
def _group_kernel(
    logits_ptr, limits_ptr, maxima_ptr, weights_ptr, vocab_size, logits_stride, num_groups, GROUPS: tl.constexpr
):
    """The largest logit of each group and, for a top_p of all tokens, its weight: the sum of exp((x - it) / T)."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    asks, temperature, top_k, top_p, _min_p = _limits(limits_ptr, line)
    if asks:
        group = tile * GROUPS + tl.arange(0, GROUPS)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        x = tl.load(logits_ptr + line * logits_stride + ids, mask=ids < vocab_size, other=-INF).to(tl.float32)
        maxima = tl.max(x, axis=1)
        tl.store(maxima_ptr + line * num_groups + group, maxima, mask=group < num_groups)
        if (top_k == 0) & (top_p < 1):
            reference = tl.where(tl.abs(maxima) < INF, maxima, 0.0)
            weights = tl.sum(tl.exp2((x - reference[:, None]) * _factor(temperature)), axis=1)
            tl.store(weights_ptr + line * num_groups + group, weights, mask=group < num_groups)


@triton.jit
def _candidates_kernel(
    limits_ptr,
    maxima_ptr,
    weights_ptr,
    candidates_ptr,
    found_ptr,
    num_groups,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A row's groups that may have a logit at or above its threshold.

    found: their number, a key at or below the threshold, the bits of the largest logit, and those of the total weight.
    """
    line = tl.program_id(0).to(tl.int64)
    asks, temperature, top_k, top_p, _min_p = _limits(limits_ptr, line)
    if asks:
        group = tl.arange(0, GROUPS)
        exists = group < num_groups
        maxima = tl.load(maxima_ptr + line * num_groups + group, mask=exists, other=-INF)
        peak = tl.max(maxima, axis=0)
        keys = _keys(maxima)
        # The key is the threshold that the largest of each group alone would have: no higher than that of all.
        parts, total, target = tl.where(maxima > -INF, 1.0, 0.0), top_k, top_k
        if (top_k == 0) & (top_p < 1):
            reference = tl.where(tl.abs(peak) < INF, peak, 0.0)
            parts *= tl.exp2(tl.where(parts > 0, maxima - reference, 0.0) * _factor(temperature))
            total = tl.sum(parts * tl.load(weights_ptr + line * num_groups + group, mask=exists, other=0.0), axis=0)
            target = top_p * total
        least = tl.where(tl.sum(tl.where(keys >= 0, parts, 0.0), axis=0) >= target, 0, LOWEST_KEY)
        step = 1 << 30
        for _ in range(31 - UNUSED):
            enough = tl.sum(tl.where(keys >= least + step, parts, 0.0), axis=0) >= target
            least = tl.where(enough, least + step, least)
            step = step >> 1
        least = tl.where((top_k > 0) | (top_p < 1), least, LOWEST_KEY)
        chosen = exists & (keys >= least)
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + line * num_groups + place, group, mask=chosen)
        tl.store(found_ptr + line * 4, tl.sum(chosen.to(tl.int32), axis=0))
        tl.store(found_ptr + line * 4 + 1, least)
        tl.store(found_ptr + line * 4 + 2, peak.to(tl.int32, bitcast=True))
        tl.store(found_ptr + line * 4 + 3, total.to(tl.int32, bitcast=True))


@triton.jit
def _weight_from(logits_ptr, candidates_ptr, count, vocab_size, least, peak, factor, GROUPS: tl.constexpr):
    """The sum of 2 ** ((x - peak) * factor) over the candidates' logits with a key of at least `least`."""
    sums = tl.zeros((GROUPS,), dtype=tl.float32)
    for start in range(0, count, GROUPS):
        place = start + tl.arange(0, GROUPS)
        group = tl.load(candidates_ptr + place, mask=place < count, other=0)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        mask = (place < count)[:, None] & (ids < vocab_size)
        x = tl.load(logits_ptr + ids, mask=mask, other=-INF).to(tl.float32)
        counted = (x > -INF) & (_keys(x) >= least)
        sums += tl.sum(tl.where(counted, tl.exp2(tl.where(counted, x - peak, 0.0) * factor), 0.0), axis=1)
    return tl.sum(sums, axis=0)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    limits_ptr,
    candidates_ptr,
    found_ptr,
    out_ptr,
    vocab_size,
    logits_stride,
    num_groups,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The threshold of a row, from its candidates."""
    line = tl.program_id(0).to(tl.int64)
    asks, temperature, top_k, top_p, min_p = _limits(limits_ptr, line)
    threshold = -INF
    peak = tl.load(found_ptr + line * 4 + 2, mask=asks, other=0x7F800000)  # the bits of infinity
    peak = peak.to(tl.float32, bitcast=True)
    if tl.abs(peak) < INF:
        factor = _factor(temperature)
        logits_ptr += line * logits_stride
        candidates_ptr += line * num_groups
        count, floor = tl.load(found_ptr + line * 4), tl.load(found_ptr + line * 4 + 1)
        for pass_ in tl.static_range(2):  # by top_k, where each logit counts as 1, and by top_p of what that has left
            if pass_ == 0:
                asked, scale, target = top_k > 0, 0.0, top_k
            else:
                asked, scale, target = top_p < 1, factor, 0.0
                if asked:
                    weight = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, floor, peak, factor, GROUPS)
                    target = top_p * weight
                    if top_k == 0:
                        # The total is rounded another way, and must not ask for more than the candidates have.
                        total = tl.load(found_ptr + line * 4 + 3).to(tl.float32, bitcast=True)
                        target = tl.minimum(top_p * total, weight)
            if asked:
                start = tl.maximum(floor, 0)
                weight = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, start, peak, scale, GROUPS)
                least = tl.where(weight >= target, 0, LOWEST_KEY)
                step = 1 << 30
                for _ in range(31 - UNUSED):
                    start = tl.maximum(floor, least + step)
                    weight = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, start, peak, scale, GROUPS)
                    least = tl.where(weight >= target, least + step, least)
                    step = step >> 1
                floor = least
        if floor > LOWEST_KEY:
            bits = tl.where(floor < 0, (floor ^ 0x7FFFFFFF) & (-1 << UNUSED), floor)
            threshold = bits.to(tl.float32, bitcast=True)
        if min_p > 0:
            threshold = tl.maximum(threshold, peak + temperature * tl.log(min_p))
    tl.store(out_ptr + line, threshold)


def thresholds(logits: Tensor, limits: Tensor) -> Tensor:
    """As `thresholds` in `layers/logits.py`; the logits of a row must be contiguous."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    assert limits.stride() == (4, 1), f"limits are (num_rows, 4) and contiguous, strides {limits.stride()}"
    num_groups, unused = triton.cdiv(vocab_size, GROUP_SIZE.value), UNUSED_BITS[logits.dtype]
    out = torch.empty(num_rows, dtype=torch.float32, device=device)
    maxima, weights = torch.empty(2, num_rows, num_groups, dtype=torch.float32, device=device)
    candidates = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    found = torch.empty(num_rows, 4, dtype=torch.int32, device=device)
    if num_rows == 0:
        return out
    sizes, at_once = (vocab_size, logits.stride(0), num_groups), GROUPS_AT_ONCE
    grid, all_groups = (num_rows, triton.cdiv(num_groups, at_once)), triton.next_power_of_2(num_groups)
    _group_kernel[grid](logits, limits, maxima, weights, *sizes, GROUPS=at_once, num_warps=4)
    buffers = maxima, weights, candidates, found, num_groups
    _candidates_kernel[(num_rows,)](limits, *buffers, UNUSED=unused, GROUPS=all_groups, num_warps=8)
    rest = candidates, found, out, *sizes
    _threshold_kernel[(num_rows,)](logits, limits, *rest, UNUSED=unused, GROUPS=at_once, num_warps=8)
    return out
