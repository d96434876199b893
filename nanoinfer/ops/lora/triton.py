"""The products of adapters: A shrinks a token to the rank, B expands it to the outputs. Two kernels for a layer.

The tokens of a step are sorted by slot into tiles, once for all layers, as pairs of a token and its expert are
(ops/routing). The device alone knows which tokens these are, so a CUDA graph serves any adapters.

- `_shrink_kernel`: a program multiplies a tile by some lines of A, over a part of the inputs (split-K). A step of few
  tokens has few tiles, and would leave the GPU idle otherwise. The parts stay apart, in float32.
- `_expand_kernel`: a program adds the parts up in order, multiplies them by a block of B's rows, and adds the product
  to the outputs, in place. Its outputs may be those of several shards, such as q and k.

How many parts there are depends on how many tokens a step has, so sums are not the same to the last bit in each batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2, num_multiprocessors
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.routing.triton import plan_tiles, tile_pairs, tile_rows

MIN_TILE = 16  # what tensor cores take
MAX_LINES = 64  # of A that a program multiplies by, and ranks that one adds up at a time
MAX_COLUMNS = 128  # outputs of a program
MIN_STEPS = 2  # of DEPTH inputs, that a program sums up


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    inner_ptr,  # (num_splits, num_tokens, num_lines) float32
    tokens_ptr,  # None where the step has one token
    tile_slots_ptr,
    num_tiles_ptr,  # None where the step has one token
    x_row_stride,
    num_tokens,
    num_steps,  # of a program
    num_slots: tl.constexpr,
    num_inputs: tl.constexpr,
    num_lines: tl.constexpr,  # of A: num_shards * max_rank
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs in a step
    OVERLAP: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(2)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.num_programs(0) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    slot = tl.load(tile_slots_ptr + tile)
    if slot >= num_slots:
        return
    token = tile_pairs(tokens_ptr, tile, num_tokens, ROWS)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    k = split * (num_steps * DEPTH) + tl.arange(0, DEPTH)
    is_token, is_line = (token < num_tokens)[:, None], (line < num_lines)[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_row_stride + k[None, :]
    a_ptrs = a_ptr + (slot.to(tl.int64) * num_lines + line)[None, :] * num_inputs + k[:, None]
    acc = tl.zeros((ROWS, LINES), tl.float32)
    for step in range(num_steps):
        left = num_inputs - step * DEPTH
        x = tl.load(x_ptrs + step * DEPTH, mask=is_token & (k < left)[None, :], other=0.0)
        a = tl.load(a_ptrs + step * DEPTH, mask=is_line & (k < left)[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    first = inner_ptr + split.to(tl.int64) * num_tokens * num_lines
    tl.store(first + token.to(tl.int64)[:, None] * num_lines + line[None, :], acc, mask=is_token & is_line)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _expand_kernel(
    inner_ptr,
    b_ptr,
    out_ptr,
    tokens_ptr,
    tile_slots_ptr,
    num_tiles_ptr,
    out_row_stride,
    num_tokens,
    num_splits,
    num_slots: tl.constexpr,
    num_outputs: tl.constexpr,
    max_rank: tl.constexpr,
    SIZES: tl.constexpr,  # the outputs of each shard
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,  # of a step
    OVERLAP: tl.constexpr,
):
    tile, first_column = tl.program_id(0), tl.program_id(1) * COLUMNS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.num_programs(0) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    slot = tl.load(tile_slots_ptr + tile)
    if slot >= num_slots:
        return
    num_lines: tl.constexpr = len(SIZES) * max_rank
    part_stride = num_tokens.to(tl.int64) * num_lines
    token = tile_pairs(tokens_ptr, tile, num_tokens, ROWS)
    is_token = (token < num_tokens)[:, None]
    column, rank = first_column + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    inner_ptrs = inner_ptr + token.to(tl.int64)[:, None] * num_lines + rank[None, :]
    b_ptrs = b_ptr + (slot.to(tl.int64) * num_outputs + column)[None, :] * max_rank + rank[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = 0
    for shard in tl.static_range(len(SIZES)):
        end = start + SIZES[shard]
        if (first_column < end) & (first_column + COLUMNS > start):
            is_own = ((column >= start) & (column < end))[None, :]
            for first in range(0, max_rank, RANKS):
                is_rank = first + rank < max_rank
                inner = tl.zeros((ROWS, RANKS), tl.float32)
                for split in range(num_splits):
                    part_ptrs = inner_ptrs + split * part_stride + shard * max_rank + first
                    inner += tl.load(part_ptrs, mask=is_token & is_rank[None, :], other=0.0)
                b = tl.load(b_ptrs + first, mask=is_own & is_rank[:, None], other=0.0)
                acc = tl.dot(inner.to(b.dtype), b, acc, input_precision="ieee")
        start = end
    out_ptrs = out_ptr + token.to(tl.int64)[:, None] * out_row_stride + column[None, :]
    is_out = is_token & (column < num_outputs)[None, :]
    out = tl.load(out_ptrs, mask=is_out, other=0.0).to(tl.float32) + acc
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_out)


def add_lora(out, x, rows, matrices):
    a, b, sizes = matrices
    (num_tokens, num_inputs), (num_slots, num_lines, _), (_, num_outputs, max_rank) = x.shape, a.shape, b.shape
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert out.stride(1) == 1, f"the rows of out must be contiguous, strides {out.stride()}"
    assert a.is_contiguous(), f"A must be contiguous, strides {a.stride()}"
    assert b.is_contiguous(), f"B must be contiguous, strides {b.stride()}"
    if num_tokens == 0:
        return
    if rows.plan is None:
        rows.plan = plan_tiles(rows.slots.unsqueeze(1), num_slots, tile_rows(num_tokens, num_slots, x.dtype))
    plan, num_tiles = rows.plan, len(rows.plan.tile_experts)
    depth = 128 if x.dtype.itemsize == 2 else 32
    lines = min(MAX_LINES, max(MIN_TILE, next_power_of_2(num_lines)))
    ranks = min(MAX_LINES, max(MIN_TILE, next_power_of_2(max_rank)))
    num_blocks, steps = ceil_div(num_lines, lines), ceil_div(num_inputs, depth)
    wanted = max(1, num_multiprocessors(x.device) // (num_tiles * num_blocks))  # programs for each block of A
    steps = max(min(MIN_STEPS, steps), ceil_div(steps, wanted))
    num_splits = ceil_div(num_inputs, steps * depth)
    inner = x.new_empty(num_splits, num_tokens, num_lines, dtype=torch.float32)
    columns = MAX_COLUMNS if num_tiles * ceil_div(num_outputs, MAX_COLUMNS) > num_multiprocessors(x.device) else 64
    common: dict[str, Any] = {"num_slots": num_slots, "ROWS": plan.tile_size, **overlap_options(x.device)}
    _shrink_kernel[(num_tiles, num_blocks, num_splits)](
        x,
        a,
        inner,
        *plan.tensors,
        x.stride(0),
        num_tokens,
        steps,
        num_inputs=num_inputs,
        num_lines=num_lines,
        LINES=lines,
        DEPTH=depth,
        num_warps=4,
        **common,
    )
    _expand_kernel[(num_tiles, ceil_div(num_outputs, columns))](
        inner,
        b,
        out,
        *plan.tensors,
        out.stride(0),
        num_tokens,
        num_splits,
        num_outputs=num_outputs,
        max_rank=max_rank,
        SIZES=sizes,
        COLUMNS=columns,
        RANKS=ranks,
        num_warps=4,
        **common,
    )
