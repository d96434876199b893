"""Min-p, top-k and top-p filtering without a sort: finds the lowest logit that each row may still sample.

Each filter keeps the tokens from some logit up, so all three together are one threshold. It is found by bisection over
the bits of the logits as integers (see `_keys`), which takes 16 steps for a 16-bit logit. The work is split over three
kernels, so that a step need not read all logits:

1. `_group_kernel` takes the maximum of each group of 64 neighbouring logits.
2. `_candidates_kernel` bisects over these maxima, which gives a lower bound of the threshold: at least k groups have a
   maximum at or above the k-th largest maximum, so the k-th largest logit is no lower. Groups below the bound drop out.
3. `_threshold_kernel` bisects over the logits of the few groups that are left.

Groups without a logit that min-p allows drop out too, as do those that a grammar has forbidden whole.
"""

import torch
import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.triton import INF

GROUP_SIZE = tl.constexpr(64)  # ids
LOWEST_KEY = tl.constexpr(-(2**31))
# A row's limits, in the order of the specification.
TEMPERATURE, TOP_K, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NUM_LIMITS = tl.constexpr(4)
# What `_candidates_kernel` finds for a row, as int32.
NUM_CANDIDATES = tl.constexpr(0)  # groups that may hold a logit at or above the threshold
LOWER_BOUND = tl.constexpr(1)  # of the threshold's key
PEAK = tl.constexpr(2)  # the bits of the largest logit
TOTAL = tl.constexpr(3)  # for top-p alone, the bits of the weight of all logits
NUM_FOUND = tl.constexpr(4)
GROUPS_AT_ONCE = 64
# The low bits of a float32 that are zero if it was a logit of this dtype: bisection need not look at them.
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _keys(x):
    """Map float32 to int32 in the same order: the float's bits, with all but the sign flipped if it is negative."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _limits(limits_ptr, line):
    """Return whether a row is filtered at all, and its temperature, top_k, top_p and min_p."""
    limits_ptr += line * NUM_LIMITS
    temperature, top_k = tl.load(limits_ptr + TEMPERATURE), tl.load(limits_ptr + TOP_K)
    top_p, min_p = tl.load(limits_ptr + TOP_P), tl.load(limits_ptr + MIN_P)
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)), temperature, top_k, top_p, min_p


@triton.jit
def _is_top_p_alone(top_k, top_p, min_p):
    """Return whether top-p is the only filter: its share is one of all logits then."""
    return (top_k == 0) & (top_p < 1) & (min_p == 0)


@triton.jit
def _exp2_scale(temperature):
    """Return the scale for which exp(x / temperature) = exp2(x * scale)."""
    return tl.minimum(1.44269504 / temperature, 3e38)


@triton.jit
def _min_p_bound(peak, temperature, min_p):
    """Return the lowest logit that min-p allows; -inf where it is off."""
    return tl.where(min_p > 0, peak + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0)), -INF)


@triton.jit
def _group_kernel(
    logits_ptr, limits_ptr, maxima_ptr, group_weights_ptr, vocab_size, logits_stride, num_groups, GROUPS: tl.constexpr
):
    """Store each group's maximum and, for top-p alone, the sum of exp((x - maximum) / temperature)."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_filtered, temperature, top_k, top_p, min_p = _limits(limits_ptr, line)
    if is_filtered:
        group = tile * GROUPS + tl.arange(0, GROUPS)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        x = tl.load(logits_ptr + line * logits_stride + ids, mask=ids < vocab_size, other=-INF).to(tl.float32)
        maxima = tl.max(x, axis=1)
        tl.store(maxima_ptr + line * num_groups + group, maxima, mask=group < num_groups)
        if _is_top_p_alone(top_k, top_p, min_p):
            reference = tl.where(tl.abs(maxima) < INF, maxima, 0.0)
            weights = tl.sum(tl.exp2((x - reference[:, None]) * _exp2_scale(temperature)), axis=1)
            tl.store(group_weights_ptr + line * num_groups + group, weights, mask=group < num_groups)


@triton.jit
def _candidates_kernel(
    limits_ptr,
    maxima_ptr,
    group_weights_ptr,
    candidates_ptr,
    found_ptr,
    num_groups,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """List the groups of a row that may hold a logit at or above its threshold.

    found_ptr: (num_rows, NUM_FOUND) int32.
    """
    line = tl.program_id(0).to(tl.int64)
    is_filtered, temperature, top_k, top_p, min_p = _limits(limits_ptr, line)
    if is_filtered:
        by_total = _is_top_p_alone(top_k, top_p, min_p)
        group = tl.arange(0, GROUPS)
        exists = group < num_groups
        maxima = tl.load(maxima_ptr + line * num_groups + group, mask=exists, other=-INF)
        peak = tl.max(maxima, axis=0)
        keys = _keys(maxima)
        # Bisect over the maxima alone: each counts as one token for top-k, and with its own weight for top-p. Fewer
        # logits reach the target at a lower key, so the result is a lower bound of the threshold.
        weights, total, target = tl.where(maxima > -INF, 1.0, 0.0), top_k, top_k
        if by_total:
            reference = tl.where(tl.abs(peak) < INF, peak, 0.0)
            weights *= tl.exp2(tl.where(weights > 0, maxima - reference, 0.0) * _exp2_scale(temperature))
            group_weights = tl.load(group_weights_ptr + line * num_groups + group, mask=exists, other=0.0)
            total = tl.sum(weights * group_weights, axis=0)
            target = top_p * total
        key = tl.where(tl.sum(tl.where(keys >= 0, weights, 0.0), axis=0) >= target, 0, LOWEST_KEY)
        step = 1 << 30
        for _ in range(31 - UNUSED):
            enough = tl.sum(tl.where(keys >= key + step, weights, 0.0), axis=0) >= target
            key = tl.where(enough, key + step, key)
            step = step >> 1
        key = tl.where((top_k > 0) | by_total, key, LOWEST_KEY)
        chosen = exists & (maxima > -INF) & (keys >= key) & (maxima >= _min_p_bound(peak, temperature, min_p))
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(candidates_ptr + line * num_groups + place, group, mask=chosen)
        found_ptr += line * NUM_FOUND
        tl.store(found_ptr + NUM_CANDIDATES, tl.sum(chosen.to(tl.int32), axis=0))
        tl.store(found_ptr + LOWER_BOUND, key)
        tl.store(found_ptr + PEAK, peak.to(tl.int32, bitcast=True))
        tl.store(found_ptr + TOTAL, total.to(tl.int32, bitcast=True))


@triton.jit
def _weight_from(logits_ptr, candidates_ptr, num_candidates, vocab_size, key, peak, scale, GROUPS: tl.constexpr):
    """Return the sum of exp2((x - peak) * scale) over the candidates' logits x whose key is at least `key`."""
    sums = tl.zeros((GROUPS,), dtype=tl.float32)
    for start in range(0, num_candidates, GROUPS):
        place = start + tl.arange(0, GROUPS)
        group = tl.load(candidates_ptr + place, mask=place < num_candidates, other=0)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        mask = (place < num_candidates)[:, None] & (ids < vocab_size)
        x = tl.load(logits_ptr + ids, mask=mask, other=-INF).to(tl.float32)
        counted = (x > -INF) & (_keys(x) >= key)
        sums += tl.sum(tl.where(counted, tl.exp2(tl.where(counted, x - peak, 0.0) * scale), 0.0), axis=1)
    return tl.sum(sums, axis=0)


@triton.jit
def _bisect(
    logits_ptr,
    candidates_ptr,
    num_candidates,
    vocab_size,
    floor,
    peak,
    scale,
    target,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the highest key from which on the candidates' logits weigh at least `target`.

    Logits with a key below `floor` do not count. With scale 0 every logit weighs 1.
    """
    start = tl.maximum(floor, 0)
    weight = _weight_from(logits_ptr, candidates_ptr, num_candidates, vocab_size, start, peak, scale, GROUPS)
    key = tl.where(weight >= target, 0, LOWEST_KEY)
    step = 1 << 30
    for _ in range(31 - UNUSED):
        start = tl.maximum(floor, key + step)
        weight = _weight_from(logits_ptr, candidates_ptr, num_candidates, vocab_size, start, peak, scale, GROUPS)
        key = tl.where(weight >= target, key + step, key)
        step = step >> 1
    return key


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
    """Store the threshold of a row: the highest of those that min-p, top-k and top-p set."""
    line = tl.program_id(0).to(tl.int64)
    is_filtered, temperature, top_k, top_p, min_p = _limits(limits_ptr, line)
    threshold = -INF
    found_ptr += line * NUM_FOUND
    peak = tl.load(found_ptr + PEAK, mask=is_filtered, other=0x7F800000)  # the bits of infinity
    peak = peak.to(tl.float32, bitcast=True)
    if tl.abs(peak) < INF:
        scale = _exp2_scale(temperature)
        logits_ptr += line * logits_stride
        candidates_ptr += line * num_groups
        count, key = tl.load(found_ptr + NUM_CANDIDATES), tl.load(found_ptr + LOWER_BOUND)
        if top_k > 0:
            key = _bisect(logits_ptr, candidates_ptr, count, vocab_size, key, peak, 0.0, top_k, UNUSED, GROUPS)
        bound = _min_p_bound(peak, temperature, min_p)
        if top_p < 1:  # a share of what min-p and top-k have left
            if min_p > 0:
                key = tl.maximum(key, _keys(bound))
            weight = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, key, peak, scale, GROUPS)
            target = top_p * weight
            if _is_top_p_alone(top_k, top_p, min_p):
                # The total was summed in another order. Its rounding must not ask for more than the candidates have.
                total = tl.load(found_ptr + TOTAL).to(tl.float32, bitcast=True)
                target = tl.minimum(top_p * total, weight)
            key = _bisect(logits_ptr, candidates_ptr, count, vocab_size, key, peak, scale, target, UNUSED, GROUPS)
        if key > LOWEST_KEY:
            # Back to the bits of the float; the unused ones of a negative float are zero again.
            bits = tl.where(key < 0, (key ^ 0x7FFFFFFF) & (-1 << UNUSED), key)
            threshold = bits.to(tl.float32, bitcast=True)
        threshold = tl.maximum(threshold, bound)
    tl.store(out_ptr + line, threshold)


def thresholds(logits, limits):
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    assert limits.stride() == (NUM_LIMITS.value, 1), (
        f"limits are (num_rows, {NUM_LIMITS.value}) and contiguous, strides {limits.stride()}"
    )
    num_groups, unused = ceil_div(vocab_size, GROUP_SIZE.value), UNUSED_BITS[logits.dtype]
    out = logits.new_empty(num_rows, dtype=torch.float32)
    maxima, group_weights = out.new_empty(2, num_rows, num_groups)
    candidates = out.new_empty(num_rows, num_groups, dtype=torch.int32)
    found = candidates.new_empty(num_rows, NUM_FOUND.value)
    if num_rows == 0:
        return out
    sizes = vocab_size, logits.stride(0), num_groups
    _group_kernel[num_rows, ceil_div(num_groups, GROUPS_AT_ONCE)](
        logits, limits, maxima, group_weights, *sizes, GROUPS=GROUPS_AT_ONCE, num_warps=4
    )
    _candidates_kernel[(num_rows,)](
        limits,
        maxima,
        group_weights,
        candidates,
        found,
        num_groups,
        UNUSED=unused,
        GROUPS=next_power_of_2(num_groups),
        num_warps=8,
    )
    _threshold_kernel[(num_rows,)](
        logits, limits, candidates, found, out, *sizes, UNUSED=unused, GROUPS=GROUPS_AT_ONCE, num_warps=8
    )
    return out
