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
def _options(rows_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, options_stride, vocab_size, line):
    """What a row asks for, all 0 or 1 where it asks for nothing: (top_k, top_p, min_p, temperature, whether at all)."""
    row = tl.load(rows_ptr + line)
    asked = row >= 0
    temperature = tl.load(temperatures_ptr + row, mask=asked, other=0.0)
    asked = temperature > 0
    top_k = tl.load(top_k_ptr + row * options_stride, mask=asked, other=0)
    top_p = tl.load(top_p_ptr + row * options_stride, mask=asked, other=1.0)
    min_p = tl.load(min_p_ptr + row * options_stride, mask=asked, other=0.0)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    return top_k, top_p, min_p, temperature, (top_k > 0) | (top_p < 1) | (min_p > 0)


@triton.jit
def _scale(temperature):
    return tl.minimum(1.44269504 / temperature, 3e38)  # exp(x / temperature) = 2 ** (x * scale)


@triton.jit
def _group_kernel(
    logits_ptr,
    rows_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    options_stride,
    maxima_ptr,
    weights_ptr,
    vocab_size,
    logits_stride,
    num_groups,
    GROUPS: tl.constexpr,
):
    """The largest logit of each group and, for a top_p of all tokens, its weight: the sum of exp((x - it) / T)."""
    line, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p, _min_p, temperature, asked = _options(
        rows_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, options_stride, vocab_size, line
    )
    if asked:
        group = tile * GROUPS + tl.arange(0, GROUPS)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        x = tl.load(logits_ptr + line * logits_stride + ids, mask=ids < vocab_size, other=-INF).to(tl.float32)
        maxima = tl.max(x, axis=1)
        tl.store(maxima_ptr + line * num_groups + group, maxima, mask=group < num_groups)
        if (top_k == 0) & (top_p < 1):
            reference = tl.where(tl.abs(maxima) < INF, maxima, 0.0)
            weights = tl.sum(tl.exp2((x - reference[:, None]) * _scale(temperature)), axis=1)
            tl.store(weights_ptr + line * num_groups + group, weights, mask=group < num_groups)


@triton.jit
def _candidates_kernel(
    rows_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    options_stride,
    maxima_ptr,
    weights_ptr,
    candidates_ptr,
    counts_ptr,
    bounds_ptr,
    peaks_ptr,
    totals_ptr,
    vocab_size,
    num_groups,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The groups of a row that may have a logit at or above its threshold, a key below that, and the largest logit."""
    line = tl.program_id(0).to(tl.int64)
    top_k, top_p, _min_p, temperature, asked = _options(
        rows_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, options_stride, vocab_size, line
    )
    if asked:
        group = tl.arange(0, GROUPS)
        exists = group < num_groups
        maxima = tl.load(maxima_ptr + line * num_groups + group, mask=exists, other=-INF)
        peak = tl.max(maxima, axis=0)
        keys = _keys(maxima)
        # The bound is the threshold that the largest of each group alone would have: no higher than that of all.
        parts = tl.where(exists & (maxima > -INF), 1.0, 0.0)
        target = top_k.to(tl.float32)
        if (top_k == 0) & (top_p < 1):
            reference = tl.where(tl.abs(peak) < INF, peak, 0.0)
            parts *= tl.exp2(tl.where(parts > 0, maxima - reference, 0.0) * _scale(temperature))
            weights = tl.load(weights_ptr + line * num_groups + group, mask=exists, other=0.0)
            total = tl.sum(parts * weights, axis=0)
            tl.store(totals_ptr + line, total)
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
        tl.store(counts_ptr + line, tl.sum(chosen.to(tl.int32), axis=0))
        tl.store(bounds_ptr + line, least)
        tl.store(peaks_ptr + line, peak)


@triton.jit
def _weight_from(logits_ptr, candidates_ptr, count, vocab_size, least, peak, scale, GROUPS: tl.constexpr):
    """The sum of 2 ** ((x - peak) * scale) over the candidates' logits with a key of at least `least`."""
    sums = tl.zeros((GROUPS,), dtype=tl.float32)
    for start in range(0, count, GROUPS):
        place = start + tl.arange(0, GROUPS)
        group = tl.load(candidates_ptr + place, mask=place < count, other=0)
        ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
        mask = (place < count)[:, None] & (ids < vocab_size)
        x = tl.load(logits_ptr + ids, mask=mask, other=-INF).to(tl.float32)
        counted = (x > -INF) & (_keys(x) >= least)
        sums += tl.sum(tl.where(counted, tl.exp2(tl.where(counted, x - peak, 0.0) * scale), 0.0), axis=1)
    return tl.sum(sums, axis=0)


@triton.jit
def _least_key(
    logits_ptr,
    candidates_ptr,
    count,
    vocab_size,
    floor,
    peak,
    scale,
    target,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The largest key from which on the weight is `target` or more; what is below the key `floor` does not count."""
    start = tl.maximum(floor, 0)
    weight = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, start, peak, scale, GROUPS)
    least = tl.where(weight >= target, 0, LOWEST_KEY)
    step = 1 << 30
    for _ in range(31 - UNUSED):
        start = tl.maximum(floor, least + step)
        weight = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, start, peak, scale, GROUPS)
        least = tl.where(weight >= target, least + step, least)
        step = step >> 1
    return least


@triton.jit
def _threshold_kernel(
    logits_ptr,
    rows_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    options_stride,
    candidates_ptr,
    counts_ptr,
    bounds_ptr,
    peaks_ptr,
    totals_ptr,
    out_ptr,
    vocab_size,
    logits_stride,
    num_groups,
    UNUSED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The threshold of a row, from its candidates."""
    line = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p, temperature, asked = _options(
        rows_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, options_stride, vocab_size, line
    )
    threshold = -INF
    peak = tl.load(peaks_ptr + line, mask=asked, other=INF)
    if tl.abs(peak) < INF:
        logits_ptr += line * logits_stride
        candidates_ptr += line * num_groups
        count = tl.load(counts_ptr + line)
        scale = _scale(temperature)
        least = tl.load(bounds_ptr + line)
        if top_k > 0:
            target = top_k.to(tl.float32)  # each counts as 1
            least = _least_key(logits_ptr, candidates_ptr, count, vocab_size, least, peak, 0.0, target, UNUSED, GROUPS)
        if top_p < 1:
            total = _weight_from(logits_ptr, candidates_ptr, count, vocab_size, least, peak, scale, GROUPS)
            target = top_p * total
            if top_k == 0:
                # The sum of all may be rounded another way, and must not ask for more than the candidates have.
                target = tl.minimum(top_p * tl.load(totals_ptr + line), total)
            by_p = _least_key(logits_ptr, candidates_ptr, count, vocab_size, least, peak, scale, target, UNUSED, GROUPS)
            least = by_p
        if least > LOWEST_KEY:
            bits = tl.where(least < 0, (least ^ 0x7FFFFFFF) & (-1 << UNUSED), least)
            threshold = bits.to(tl.float32, bitcast=True)
        if min_p > 0:
            threshold = tl.maximum(threshold, peak + temperature * tl.log(min_p))
    tl.store(out_ptr + line, threshold)


def thresholds(
    logits: Tensor, rows: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """As `thresholds` in `layers/logits.py`; the logits of a row must be contiguous, and the options columns alike."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    assert top_k.stride() == top_p.stride() == min_p.stride(), "the options are columns of one table, or vectors"
    num_groups = triton.cdiv(vocab_size, GROUP_SIZE.value)
    out, peaks, totals = torch.empty(3, num_rows, dtype=torch.float32, device=device)
    maxima, weights = torch.empty(2, num_rows, num_groups, dtype=torch.float32, device=device)
    candidates = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    counts, bounds = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return out
    options = rows, temperatures, top_k, top_p, min_p, top_k.stride(0)
    unused = UNUSED_BITS[logits.dtype]
    _group_kernel[(num_rows, triton.cdiv(num_groups, GROUPS_AT_ONCE))](
        logits, *options, maxima, weights, vocab_size, logits.stride(0), num_groups, GROUPS=GROUPS_AT_ONCE, num_warps=4
    )
    _candidates_kernel[(num_rows,)](
        *options,
        maxima,
        weights,
        candidates,
        counts,
        bounds,
        peaks,
        totals,
        vocab_size,
        num_groups,
        UNUSED=unused,
        GROUPS=triton.next_power_of_2(num_groups),
        num_warps=8,
    )
    _threshold_kernel[(num_rows,)](
        logits,
        *options,
        candidates,
        counts,
        bounds,
        peaks,
        totals,
        out,
        vocab_size,
        logits.stride(0),
        num_groups,
        UNUSED=unused,
        GROUPS=GROUPS_AT_ONCE,
        num_warps=8,
    )
    return out
