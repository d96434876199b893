"""The products of adapters: A shrinks a token to the rank, B expands it to the outputs. Two kernels for a layer.

The tokens of a step are sorted by slot into tiles, once for all layers, as pairs of a token and its expert are
(ops/routing). The device alone knows which tokens these are, so a CUDA graph serves any adapters.

- `_shrink_kernel`: a program multiplies a tile by some lines of A, over a part of the inputs (split-K). How many parts
  there are is chosen as if all tokens had one adapter, which makes the fewest tiles. They stay apart, in float32.
- `_expand_kernel`: a program adds the parts up, multiplies them by a block of B's rows, and adds the product to the
  outputs, in place. Its outputs may be those of several shards, such as q and k. It fetches B and the outputs while the
  kernel before it still runs, and goes on to further tiles: most of the tiles that there can be are not there.
- `_gated_kernel` expands gate and up in the same way, and activates them at once: the sums are not written. Of many
  tokens it also shrinks the result for the product that follows, while it has that in registers.

How many parts there are depends on how many tokens a step has, so sums are not the same to the last bit in each batch.
All choices depend on that number rounded up to a power of two. So steps of 1, 2, 4, 8 and so on tokens launch all
kernels that there are, and an engine compiles these as it loads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2, num_multiprocessors
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import gated, wait_for_inputs
from nanoinfer.ops.lora.spec import LoRAMatrices, LoRARows
from nanoinfer.ops.routing.triton import TilePlan, plan_tiles, tile_pairs, tile_rows

MIN_TILE = 16  # what tensor cores take
LARGE_TILE = 128
LEAST_TILES = 64  # of a step, unless its tokens are too few: larger tiles would not keep a GPU busy
MAX_LINES = 64  # of A that a program multiplies by, and ranks that one adds up at a time
MIN_STEPS = 4  # of DEPTH inputs, that a program sums up
MAX_SPLITS = 16  # further parts take longer to add up than they save
SHRINKING = 2  # programs of small tiles for each multiprocessor: one alone has too few loads in flight
MAX_PARTS = 8192  # numbers that a program adds up at a time: parts, times rows of a tile, times ranks
# Outputs of a program; fewer where so many would leave multiprocessors idle.
COLUMNS, FEW_COLUMNS = 256, 64
# The same of gate and up, and in large tiles, which take registers.
GATED_COLUMNS, GATED_LARGE_TILE_COLUMNS = 128, 64
MAX_OF_B = 8192  # numbers of B that a program multiplies by at a time
BLOCKS, LARGE_TILE_BLOCKS = 4, 48  # of gate and up, that a program computes, and shrinks for the product that follows
PROGRAMS = 8  # for each multiprocessor, at most, that share the tiles
# By the name of the operation: whether it is a GELU, and whether that is computed by the error function.
ACTIVATIONS = {"silu_and_mul": (False, False), "gelu_tanh_and_mul": (True, False), "gelu_and_mul": (True, True)}


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    inner_ptr,  # (num_splits, num_tokens, num_lines) float32
    tokens_ptr,  # None where the step has one token
    tile_slots_ptr,
    num_tiles_ptr,  # None where the step has one token
    x_row_stride,
    slot_stride,
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
    split = tl.program_id(0)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    k = split * (num_steps * DEPTH) + tl.arange(0, DEPTH)
    is_line = (line < num_lines)[None, :]
    wait_for_inputs(OVERLAP)
    num_tiles = tl.num_programs(2) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    first = inner_ptr + split.to(tl.int64) * num_tokens * num_lines
    for tile in range(tl.program_id(2), num_tiles, tl.num_programs(2)):
        slot, token = tl.load(tile_slots_ptr + tile), tile_pairs(tokens_ptr, tile, num_tokens, ROWS)
        is_token = (token < num_tokens)[:, None]
        if slot < num_slots:
            x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_row_stride + k[None, :]
            a_ptrs = a_ptr + slot.to(tl.int64) * slot_stride + line[None, :] * num_inputs + k[:, None]
            acc = tl.zeros((ROWS, LINES), tl.float32)
            for step in range(num_steps):
                left = num_inputs - step * DEPTH
                x = tl.load(x_ptrs + step * DEPTH, mask=is_token & (k < left)[None, :], other=0.0)
                a = tl.load(a_ptrs + step * DEPTH, mask=is_line & (k < left)[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            tl.store(first + token.to(tl.int64)[:, None] * num_lines + line[None, :], acc, mask=is_token & is_line)


@triton.jit
def _add_up(part_ptrs, part_stride, num_splits, mask, SPLITS: tl.constexpr):
    """Return the sum of the parts of a tile, of which SPLITS are fetched at once. part_ptrs, mask: (ROWS, RANKS)."""
    inner = tl.load(part_ptrs, mask=mask, other=0.0)
    if SPLITS > 1:
        zero = tl.arange(0, 1)[:, None]
        for split in tl.static_range(1, SPLITS):
            inner += tl.load(part_ptrs + split * part_stride, mask=mask & (zero + split < num_splits), other=0.0)
        for first in range(SPLITS, num_splits, SPLITS):
            for split in tl.static_range(SPLITS):
                is_part = mask & (zero + (first + split) < num_splits)
                inner += tl.load(part_ptrs + (first + split) * part_stride, mask=is_part, other=0.0)
    return inner


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _expand_kernel(
    inner_ptr,
    b_ptr,
    out_ptr,
    tokens_ptr,
    tile_slots_ptr,
    num_tiles_ptr,
    out_row_stride,
    slot_stride,
    num_tokens,
    num_splits,
    num_slots: tl.constexpr,
    num_outputs: tl.constexpr,
    max_rank: tl.constexpr,
    SIZES: tl.constexpr,  # the outputs of each shard
    ALIGNED: tl.constexpr,  # whether the outputs of a program are all of one shard
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,  # of a step
    SPLITS: tl.constexpr,  # num_splits at most
    AFTER_SHRINKING: tl.constexpr,  # whether that was the kernel before, and not the one that computes the outputs
    OVERLAP: tl.constexpr,
):
    first_column = tl.program_id(0) * COLUMNS
    if OVERLAP and not AFTER_SHRINKING:
        tl.extra.cuda.gdc_wait()
    # Before the wait: what the kernel before the shrinking one has written is there.
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    num_lines: tl.constexpr = len(SIZES) * max_rank
    part_stride = num_tokens.to(tl.int64) * num_lines
    column, rank = first_column + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    is_column = column < num_outputs
    first_shard, end = 0, 0
    for shard in tl.static_range(len(SIZES) - 1):
        end += SIZES[shard]
        first_shard += (first_column >= end).to(tl.int32)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        slot, token = tl.load(tile_slots_ptr + tile), tile_pairs(tokens_ptr, tile, num_tokens, ROWS)
        is_token = (token < num_tokens)[:, None]
        if slot < num_slots:
            out_ptrs = out_ptr + token.to(tl.int64)[:, None] * out_row_stride + column[None, :]
            out = tl.load(out_ptrs, mask=is_token & is_column[None, :], other=0.0)
            b_ptrs = b_ptr + slot.to(tl.int64) * slot_stride + column[None, :] * max_rank + rank[:, None]
            inner_ptrs = inner_ptr + token.to(tl.int64)[:, None] * num_lines + rank[None, :]
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in tl.static_range(0, max_rank, RANKS):
                is_rank = first + rank < max_rank
                b = tl.load(b_ptrs + first, mask=is_column[None, :] & is_rank[:, None], other=0.0)
                wait_for_inputs(OVERLAP)
                is_part = is_token & is_rank[None, :]
                if ALIGNED:
                    part_ptrs = inner_ptrs + first_shard * max_rank + first
                    inner = _add_up(part_ptrs, part_stride, num_splits, is_part, SPLITS)
                    acc = tl.dot(inner.to(b.dtype), b, acc, input_precision="ieee")
                else:
                    start = 0
                    for shard in tl.static_range(len(SIZES)):
                        end = start + SIZES[shard]
                        if (first_column < end) & (first_column + COLUMNS > start):
                            part_ptrs = inner_ptrs + shard * max_rank + first
                            inner = _add_up(part_ptrs, part_stride, num_splits, is_part, SPLITS)
                            own = tl.where(((column >= start) & (column < end))[None, :], b, 0.0)
                            acc = tl.dot(inner.to(b.dtype), own, acc, input_precision="ieee")
                        start = end
            out = (out.to(tl.float32) + acc).to(out_ptr.dtype.element_ty)
            tl.store(out_ptrs, out, mask=is_token & is_column[None, :])
    wait_for_inputs(OVERLAP)  # also where a program has no tile, or the next kernel might not wait long enough


@triton.jit
def _load_gate_and_up(row_ptrs, column, size, half: tl.constexpr, is_token):
    """Return two blocks of (ROWS, COLUMNS)."""
    mask = is_token & (column < size)[None, :]
    gate = tl.load(row_ptrs + column[None, :], mask=mask, other=0.0)
    return gate, tl.load(row_ptrs + half + column[None, :], mask=mask, other=0.0)


@triton.jit
def _load_b(b_ptr, column, size, rank, max_rank: tl.constexpr, end):
    """Return a block of B, transposed: (RANKS, COLUMNS)."""
    mask = (column < size)[None, :] & (rank < end)[:, None]
    return tl.load(b_ptr + column[None, :] * max_rank + rank[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _gated_kernel(
    inner_ptr,
    b_ptr,
    gate_up_ptr,
    out_ptr,  # (num_tokens, size)
    next_a_ptr,  # of the product that reads the outputs; None if that is not multiplied by here
    next_inner_ptr,  # (num_programs(0), num_tokens, max_rank) float32
    tokens_ptr,
    tile_slots_ptr,
    num_tiles_ptr,
    row_stride,
    slot_stride,
    next_slot_stride,
    num_tokens,
    num_splits,
    num_slots: tl.constexpr,
    size: tl.constexpr,
    max_rank: tl.constexpr,
    GELU: tl.constexpr,
    ERF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of COLUMNS outputs
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    part_stride = num_tokens.to(tl.int64) * (2 * max_rank)
    part, rank = tl.program_id(0), tl.arange(0, RANKS)
    up_b_ptr = b_ptr + size * max_rank
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        slot, token = tl.load(tile_slots_ptr + tile), tile_pairs(tokens_ptr, tile, num_tokens, ROWS)
        is_token = (token < num_tokens)[:, None]
        end = tl.where(slot < num_slots, max_rank, 0)  # of the ranks: tokens without an adapter are activated too
        row, slot_start = token.to(tl.int64)[:, None], slot.to(tl.int64) * slot_stride
        gate_up_row, inner_row = gate_up_ptr + row * row_stride, inner_ptr + row * (2 * max_rank)
        column = part * (BLOCKS * COLUMNS) + tl.arange(0, COLUMNS)
        gate, up = _load_gate_and_up(gate_up_row, column, size, size, is_token)
        gate_b = _load_b(b_ptr + slot_start, column, size, rank, max_rank, end)
        up_b = _load_b(up_b_ptr + slot_start, column, size, rank, max_rank, end)
        wait_for_inputs(OVERLAP)
        is_part = is_token & (rank < end)[None, :]
        gate_inner = _add_up(inner_row + rank[None, :], part_stride, num_splits, is_part, SPLITS).to(gate_b.dtype)
        up_inner = _add_up(inner_row + max_rank + rank[None, :], part_stride, num_splits, is_part, SPLITS)
        up_inner = up_inner.to(up_b.dtype)
        next_inner = tl.zeros((ROWS, RANKS), tl.float32)
        for block in range(BLOCKS):
            if next_a_ptr is not None:
                next_a_ptrs = next_a_ptr + slot.to(tl.int64) * next_slot_stride + rank[None, :] * size + column[:, None]
                next_a = tl.load(next_a_ptrs, mask=(column < size)[:, None] & (rank < end)[None, :], other=0.0)
            gate_sum = tl.dot(gate_inner, gate_b, gate.to(tl.float32), input_precision="ieee")
            up_sum = tl.dot(up_inner, up_b, up.to(tl.float32), input_precision="ieee")
            for first in tl.static_range(RANKS, max_rank, RANKS):
                more = first + rank
                is_more = is_token & (more < end)[None, :]
                more_inner = _add_up(inner_row + more[None, :], part_stride, num_splits, is_more, SPLITS)
                more_b = _load_b(b_ptr + slot_start, column, size, more, max_rank, end)
                gate_sum = tl.dot(more_inner.to(more_b.dtype), more_b, gate_sum, input_precision="ieee")
                more_inner = _add_up(inner_row + max_rank + more[None, :], part_stride, num_splits, is_more, SPLITS)
                more_b = _load_b(up_b_ptr + slot_start, column, size, more, max_rank, end)
                up_sum = tl.dot(more_inner.to(more_b.dtype), more_b, up_sum, input_precision="ieee")
            out = gated(gate_sum, up_sum, gate.dtype, GELU, ERF).to(gate.dtype)
            tl.store(out_ptr + row * size + column[None, :], out, mask=is_token & (column < size)[None, :])
            if next_a_ptr is not None:  # noqa: SIM102  # a constant alone chooses the code
                if slot < num_slots:  # in a scope of its own, or Triton would have each warp compute all of `out`
                    next_inner = tl.dot(out, next_a, next_inner, input_precision="ieee")
            column += COLUMNS
            left = tl.where(block + 1 < BLOCKS, size, 0)
            gate, up = _load_gate_and_up(gate_up_row, column, left, size, is_token)
            gate_b = _load_b(b_ptr + slot_start, column, left, rank, max_rank, end)
            up_b = _load_b(up_b_ptr + slot_start, column, left, rank, max_rank, end)
        if next_a_ptr is not None:
            next_ptrs = next_inner_ptr + (part.to(tl.int64) * num_tokens + row) * max_rank + rank[None, :]
            tl.store(next_ptrs, next_inner, mask=is_part)
    wait_for_inputs(OVERLAP)


def tile_size(num_tokens: int, num_slots: int, dtype: torch.dtype) -> int:
    """Return how many tokens a tile has: few enough that there are many tiles, even with one adapter."""
    num_tokens = next_power_of_2(num_tokens)
    return min(tile_rows(num_tokens, num_slots, dtype), max(MIN_TILE, num_tokens // LEAST_TILES))


def num_steps_of(num_inputs: int, depth: int, num_programs: int, most_splits: int, num_wanted: int) -> int:
    """Return how many steps of `depth` inputs a program sums up, so that there are enough of them for a GPU.

    num_programs: those that there are without splits, at least. num_wanted: those that keep the GPU busy.
    """
    steps, num_splits = ceil_div(num_inputs, depth), max(1, min(most_splits, num_wanted // num_programs))
    return max(min(MIN_STEPS, steps), ceil_div(steps, num_splits))


def _planned(rows: LoRARows, num_slots: int, dtype: torch.dtype) -> TilePlan:
    """Return how the tokens are grouped."""
    if rows.plan is None:
        tile = tile_size(len(rows.slots), num_slots, dtype)
        rows.plan = plan_tiles(rows.slots.unsqueeze(1), num_slots, tile)
    plan: TilePlan = rows.plan
    return plan


def _padded(size: int) -> int:
    """Return how many lines of A, or ranks, programs take at a time."""
    return min(MAX_LINES, max(MIN_TILE, next_power_of_2(size)))


def _least_tiles(num_tokens: int, plan: TilePlan) -> int:
    """Return how many tiles the tokens have if all have one adapter, once rounded up to a power of two."""
    return ceil_div(next_power_of_2(num_tokens), plan.tile_size)


def _fills(num_tokens: int, plan: TilePlan, num_programs: int, device: torch.device) -> bool:
    """Return whether so many programs for each tile keep the GPU busy, even if all tokens have one adapter."""
    return _least_tiles(num_tokens, plan) * num_programs > num_multiprocessors(device)


def _num_sharing(plan: TilePlan, num_others: int, device: torch.device) -> int:
    """Return how many programs share the tiles. num_others: how many there are for each tile."""
    return min(len(plan.tile_experts), ceil_div(PROGRAMS * num_multiprocessors(device), num_others))


def _constants(plan: TilePlan, num_slots: int, device: torch.device) -> dict[str, Any]:
    """Return what all kernels have in common."""
    warps = 8 if plan.tile_size >= 64 else 4
    return {"num_slots": num_slots, "ROWS": plan.tile_size, "num_warps": warps, **overlap_options(device)}


def _shrink(x: Tensor, rows: LoRARows, matrices: LoRAMatrices) -> Tensor:
    """Return x A^T in parts, (num_splits, num_tokens, num_lines) float32; not those of tokens without an adapter."""
    a, b, _ = matrices
    (num_tokens, num_inputs), (num_slots, num_lines, _), max_rank = x.shape, a.shape, b.shape[2]
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert a[0].is_contiguous(), f"A of a slot must be contiguous, strides {a.stride()}"
    plan, num_sm = _planned(rows, num_slots, x.dtype), num_multiprocessors(x.device)
    least_tiles, is_small = _least_tiles(num_tokens, plan), plan.tile_size <= 32
    depth, lines = 128 if x.dtype.itemsize == 2 else 32, _padded(num_lines)
    num_blocks = ceil_div(num_lines, lines)
    most_splits = min(MAX_SPLITS, max(1, MAX_PARTS // (plan.tile_size * _padded(max_rank))))
    num_wanted = num_sm * (SHRINKING if is_small else 1)
    steps = num_steps_of(num_inputs, depth, least_tiles * num_blocks, most_splits, num_wanted)
    num_splits = ceil_div(num_inputs, steps * depth)
    parts = x.new_empty(num_splits, num_tokens, num_lines, dtype=torch.float32)
    _shrink_kernel[(num_splits, num_blocks, _num_sharing(plan, num_splits * num_blocks, x.device))](
        x,
        a,
        parts,
        *plan.tensors,
        x.stride(0),
        a.stride(0),
        num_tokens,
        steps,
        num_inputs=num_inputs,
        num_lines=num_lines,
        LINES=lines,
        DEPTH=depth,
        num_stages=4 if is_small else 3,
        **_constants(plan, num_slots, x.device),
    )
    return parts


def _expansion(parts: Tensor, plan: TilePlan, b: Tensor) -> dict[str, Any]:
    """Return the constants of both kernels that multiply by B.

    They have one stage, since they wait in a loop: see ops/common/programmatic_launch.py.
    """
    assert b[0].is_contiguous(), f"B of a slot must be contiguous, strides {b.stride()}"
    num_slots, _, max_rank = b.shape
    ranks = _padded(max_rank)
    # Few numbers of splits, since each is compiled. Two at least, or further parts would not be read.
    most, at_once = max(1, MAX_PARTS // (plan.tile_size * ranks)), min(32, max(8, next_power_of_2(len(parts))))
    splits = 1 if len(parts) == 1 else max(2, min(most, at_once))
    constants = _constants(plan, num_slots, b.device)
    return {"max_rank": max_rank, "RANKS": ranks, "SPLITS": splits, "num_stages": 1, **constants}


def add_lora(out, x, rows, matrices, shrunk=None):
    num_tokens, num_outputs = out.shape
    assert out.stride(1) == 1, f"the rows of out must be contiguous, strides {out.stride()}"
    if num_tokens == 0:
        return
    b, parts = matrices.b, _shrink(x, rows, matrices) if shrunk is None else shrunk
    plan = _planned(rows, len(b), x.dtype)
    fills = _fills(num_tokens, plan, ceil_div(num_outputs, COLUMNS), x.device)
    columns = min(COLUMNS if fills else FEW_COLUMNS, MAX_OF_B // _padded(b.shape[2]))
    num_columns = ceil_div(num_outputs, columns)
    _expand_kernel[(num_columns, _num_sharing(plan, num_columns, x.device))](
        parts,
        b,
        out,
        *plan.tensors,
        out.stride(0),
        b.stride(0),
        num_tokens,
        len(parts),
        num_outputs=num_outputs,
        SIZES=matrices.sizes,
        ALIGNED=all(size % columns == 0 for size in matrices.sizes[:-1]),
        COLUMNS=columns,
        AFTER_SHRINKING=shrunk is None,
        **_expansion(parts, plan, b),
    )


def gated_with_lora(gate_up, x, rows, matrices, activation, next_a=None):
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, f"the rows of gate_up must be contiguous, strides {gate_up.stride()}"
    assert next_a is None or next_a[0].is_contiguous(), f"A of a slot must be contiguous, strides {next_a.stride()}"
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens == 0:
        return out, None
    b, parts = matrices.b, _shrink(x, rows, matrices)
    plan, max_rank, is_large = _planned(rows, len(b), x.dtype), b.shape[2], rows.plan.tile_size >= LARGE_TILE
    fills = _fills(num_tokens, plan, ceil_div(size, GATED_COLUMNS), x.device)
    columns = GATED_COLUMNS if fills and not is_large else GATED_LARGE_TILE_COLUMNS
    columns = min(columns, MAX_OF_B // 2 // _padded(max_rank))
    if not fills or max_rank > MAX_LINES:  # few tokens would have too many parts to add up
        next_a = None
    blocks = 1 if next_a is None else LARGE_TILE_BLOCKS if is_large else BLOCKS
    num_parts = ceil_div(size, columns * blocks)
    next_parts = None if next_a is None else x.new_empty(num_parts, num_tokens, max_rank, dtype=torch.float32)
    is_gelu, is_exact = ACTIVATIONS[activation.__name__]
    _gated_kernel[(num_parts, _num_sharing(plan, num_parts, x.device))](
        parts,
        b,
        gate_up,
        out,
        next_a,
        next_parts,
        *plan.tensors,
        gate_up.stride(0),
        b.stride(0),
        0 if next_a is None else next_a.stride(0),
        num_tokens,
        len(parts),
        size=size,
        GELU=is_gelu,
        ERF=is_exact,
        COLUMNS=columns,
        BLOCKS=blocks,
        **_expansion(parts, plan, b),
    )
    return out, next_parts
