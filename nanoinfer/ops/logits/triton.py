"""Caps logits, forbids tokens, and reads what log-probabilities follow from: each in one pass over the logits.

`forbid_tokens` writes straight into the model's logits. Eight neighbouring ids are a group: one byte of the mask, and
16 bytes of 16-bit logits, which one thread moves at once. Logits are read only where a group has both allowed and
forbidden ids, and written only where it has forbidden ones.

`logit_statistics` reads a row in chunks. Each lane of a program keeps a maximum, a sum of exponentials relative to it
(Milakov and Gimelshein 2018), a count and the best id of its own, and they are put together at the end. Each further
one of the best ids is the best of those that rank after the previous one. It costs another pass over the row, now in
the L2 cache.
"""

import torch
import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import INF, soft_capped

CAP_TILE = 4096  # logits of a program of `cap_logits`
GROUP_SIZE = tl.constexpr(8)  # ids of a byte of a mask
TILE_GROUPS = 512  # groups for each program of `forbid_tokens`
CHUNK = 4096  # logits that a program of `logit_statistics` reads at once
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _cap_logits_kernel(logits_ptr, row_stride, size, CAP: tl.constexpr, TILE: tl.constexpr):
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pointers = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride + column
    x = tl.load(pointers, mask=column < size, other=0.0)
    tl.store(pointers, soft_capped(x.to(tl.float32), CAP).to(x.dtype), mask=column < size)


def cap_logits(logits, soft_cap):
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    num_rows, size = logits.shape
    if logits.numel() > 0:
        grid = num_rows, triton.cdiv(size, CAP_TILE)
        _cap_logits_kernel[grid](logits, logits.stride(0), size, CAP=soft_cap, TILE=CAP_TILE, num_warps=8)
    return logits


@triton.jit
def _forbid_tokens_kernel(
    logits_ptr,
    rows_ptr,
    bytes_ptr,
    num_ids,
    logits_stride,
    num_bytes,  # of a mask
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    mask, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    byte = tl.load(bytes_ptr + mask * num_bytes + group, mask=group * GROUP_SIZE < num_ids, other=255).to(tl.int32)
    is_mixed, has_forbidden = (byte > 0) & (byte < 255), byte < 255
    logits_ptrs = logits_ptr + tl.load(rows_ptr + mask) * logits_stride + ids
    logits = tl.load(logits_ptrs, mask=is_mixed[:, None] & (ids < num_ids), other=-INF)
    is_allowed = ((byte[:, None] >> tl.arange(0, GROUP_SIZE)[None, :]) & 1) == 1
    tl.store(logits_ptrs, tl.where(is_allowed, logits, -INF), mask=has_forbidden[:, None] & (ids < num_ids))


def forbid_tokens(logits, rows, bits, first_id=0):
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    assert bits.stride(1) == 1, f"the bits of a mask must be contiguous, strides {bits.stride()}"
    assert first_id % 32 == 0, f"first_id={first_id} lies within a word"
    num_masks, num_ids = len(rows), logits.shape[1]
    if num_masks == 0:
        return
    grid = (num_masks, ceil_div(num_ids, TILE_GROUPS * GROUP_SIZE.value))
    _forbid_tokens_kernel[grid](
        logits,
        rows,
        bits[:, first_id // 32 :].view(torch.uint8),
        num_ids,
        logits.stride(0),
        4 * bits.stride(0),
        GROUPS=TILE_GROUPS,
        **overlap_options(logits.device),
    )


@triton.jit
def _best_after(logits_ptr, last, last_id, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the largest logit after `last` in order, and its column; of equal ones the first comes first."""
    lane = tl.arange(0, CHUNK)
    best, best_column = tl.full((CHUNK,), -INF, tl.float32), tl.full((CHUNK,), NO_ID, tl.int32)
    for first in range(0, SIZE, CHUNK):
        column = first + lane
        x = tl.load(logits_ptr + column, mask=column < SIZE, other=-INF).to(tl.float32)
        x = tl.where(x == x, x, -INF)
        comes_after = (column < SIZE) & ((x < last) | ((x == last) & (column > last_id)))
        is_better = comes_after & ((x > best) | (best_column == NO_ID))
        best, best_column = tl.where(is_better, x, best), tl.where(is_better, column, best_column)
    largest = tl.max(best, axis=0)
    return largest, tl.min(tl.where((best == largest) & (best_column < NO_ID), best_column, NO_ID), axis=0)


@triton.jit
def _logit_statistics_kernel(
    logits_ptr,
    chosen_logits_ptr,
    chosen_ids_ptr,
    largest_ptr,
    sums_ptr,
    num_better_ptr,
    best_ids_ptr,
    best_logits_ptr,
    logits_stride,
    first_id,
    SIZE: tl.constexpr,
    NUM_BEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNK)
    logits_ptr += row * logits_stride
    chosen, chosen_column = tl.load(chosen_logits_ptr + row), tl.load(chosen_ids_ptr + row) - first_id
    largest, total = tl.full((CHUNK,), -INF, tl.float32), tl.zeros((CHUNK,), tl.float32)
    num_better = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, SIZE, CHUNK):
        column = first + lane
        x = tl.load(logits_ptr + column, mask=column < SIZE, other=-INF).to(tl.float32)
        larger = tl.maximum(largest, x)
        shift = tl.where(larger == -INF, 0.0, larger)  # -inf - -inf is NaN
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
        comes_before = (x > chosen) | ((x == chosen) & (column < chosen_column))
        num_better += (comes_before & (column < SIZE)).to(tl.int32)
    row_largest = tl.max(largest, axis=0)
    shift = tl.where(row_largest == -INF, 0.0, row_largest)
    tl.store(largest_ptr + row, row_largest)
    tl.store(sums_ptr + row, tl.sum(total * tl.exp(largest - shift), axis=0))
    tl.store(num_better_ptr + row, tl.sum(num_better, axis=0))
    last, last_id = INF, -1
    for index in tl.static_range(NUM_BEST):
        last, last_id = _best_after(logits_ptr, last, last_id, SIZE, CHUNK)
        tl.store(best_logits_ptr + row * NUM_BEST + index, last)
        tl.store(best_ids_ptr + row * NUM_BEST + index, tl.minimum(last_id, SIZE - 1) + first_id)


def logit_statistics(logits, chosen_logits, chosen_ids, first_id, num_best):
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    num_rows, size = logits.shape
    largest, sums = (logits.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    num_better = logits.new_empty(num_rows, dtype=torch.int32)
    best_ids = num_better.new_empty(num_rows, num_best)
    best_logits = largest.new_empty(num_rows, num_best)
    if num_rows > 0:
        _logit_statistics_kernel[(num_rows,)](
            logits,
            chosen_logits.contiguous(),
            chosen_ids.contiguous(),
            largest,
            sums,
            num_better,
            best_ids,
            best_logits,
            logits.stride(0),
            first_id,
            SIZE=size,
            NUM_BEST=num_best,
            CHUNK=CHUNK,
            num_warps=8,
        )
    return largest, sums, num_better, best_ids, best_logits
