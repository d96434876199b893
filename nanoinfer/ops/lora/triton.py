"""The products of adapters: A shrinks a token to the rank, B expands it to the outputs. Two kernels for a layer.

The tokens of a step are sorted by slot into tiles, once for all layers, as pairs of a token and its expert are
(ops/routing). The device alone knows which tokens these are, so a CUDA graph serves any adapters.

- `_shrink_kernel`: a program multiplies a tile by some lines of A, over a part of the inputs (split-K). How many parts
  there are is chosen as if all tokens had one adapter, which makes the fewest tiles. They stay apart, in float32.
- `_expand_kernel`: a program adds the parts up, multiplies them by a block of B's rows, and adds the product to the
  outputs, in place. Its outputs may be those of several shards, such as q and k. It fetches B and the outputs while the
  kernel before it still runs, and goes on to further tiles: most of the tiles that there can be are not there.
- `_gated_kernel` expands gate and up in the same way, and activates them at once: the sums are not written.

How many parts there are depends on how many tokens a step has, so sums are not the same to the last bit in each batch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2, num_multiprocessors
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import gated
from nanoinfer.ops.routing.triton import plan_tiles, tile_pairs, tile_rows

MIN_TILE = 16  # what tensor cores take
LEAST_TILES = 64  # of a step, unless its tokens are too few: larger tiles would not keep a GPU busy
MAX_LINES = 64  # of A that a program multiplies by, and ranks that one adds up at a time
MIN_STEPS = 4  # of DEPTH inputs, that a program sums up
MAX_SPLITS = 16  # further parts take longer to add up than they save
SHRINKING = 2  # programs of small tiles for each multiprocessor: one alone has too few loads in flight
MAX_PARTS = 8192  # numbers that a program adds up at a time: parts, times rows of a tile, times ranks
# Outputs of a program; fewer where so many would leave multiprocessors idle, and in large tiles, which take registers.
COLUMNS, FEW_COLUMNS = 128, 64
PROGRAMS = 8  # for each multiprocessor, that share the tiles of an expansion
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
    split, tile = tl.program_id(0), tl.program_id(2)  # tiles in the last place, where those come last that are not
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.num_programs(2) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
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
    a_ptrs = a_ptr + slot.to(tl.int64) * slot_stride + line[None, :] * num_inputs + k[:, None]
    acc = tl.zeros((ROWS, LINES), tl.float32)
    for step in range(num_steps):
        left = num_inputs - step * DEPTH
        x = tl.load(x_ptrs + step * DEPTH, mask=is_token & (k < left)[None, :], other=0.0)
        a = tl.load(a_ptrs + step * DEPTH, mask=is_line & (k < left)[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    first = inner_ptr + split.to(tl.int64) * num_tokens * num_lines
    tl.store(first + token.to(tl.int64)[:, None] * num_lines + line[None, :], acc, mask=is_token & is_line)


@triton.jit
def _add_up(part_ptrs, part_stride, num_splits, mask, SPLITS: tl.constexpr):
    """Return the sum of the parts of a tile: all are fetched at once. part_ptrs, mask: (ROWS, RANKS)."""
    if SPLITS == 1:
        inner = tl.load(part_ptrs, mask=mask, other=0.0)
    else:
        split = tl.arange(0, SPLITS)[:, None, None]
        parts = tl.load(part_ptrs[None] + split * part_stride, mask=mask[None] & (split < num_splits), other=0.0)
        inner = tl.sum(parts, axis=0)
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,  # of a step
    SPLITS: tl.constexpr,  # num_splits at most
    OVERLAP: tl.constexpr,
):
    first_column = tl.program_id(0) * COLUMNS
    # Before the wait: what the kernel before the shrinking one has written is there.
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    num_lines: tl.constexpr = len(SIZES) * max_rank
    part_stride = num_tokens.to(tl.int64) * num_lines
    column, rank = first_column + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    is_column = column < num_outputs
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
                if OVERLAP:
                    tl.extra.cuda.gdc_wait()
                    tl.extra.cuda.gdc_launch_dependents()
                start = 0
                for shard in tl.static_range(len(SIZES)):
                    end = start + SIZES[shard]
                    if (first_column < end) & (first_column + COLUMNS > start):
                        part_ptrs = inner_ptrs + shard * max_rank + first
                        inner = _add_up(part_ptrs, part_stride, num_splits, is_token & is_rank[None, :], SPLITS)
                        own = tl.where(((column >= start) & (column < end))[None, :], b, 0.0)
                        acc = tl.dot(inner.to(b.dtype), own, acc, input_precision="ieee")
                    start = end
            out = (out.to(tl.float32) + acc).to(out_ptr.dtype.element_ty)
            tl.store(out_ptrs, out, mask=is_token & is_column[None, :])
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # also where a program has no tile, or the next kernel might not wait long enough
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _gated_kernel(
    inner_ptr,
    b_ptr,
    gate_up_ptr,
    out_ptr,  # (num_tokens, size)
    tokens_ptr,
    tile_slots_ptr,
    num_tiles_ptr,
    row_stride,
    slot_stride,
    num_tokens,
    num_splits,
    num_slots: tl.constexpr,
    size: tl.constexpr,
    max_rank: tl.constexpr,
    GELU: tl.constexpr,
    ERF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    part_stride = num_tokens.to(tl.int64) * (2 * max_rank)
    column, rank = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    is_column = (column < size)[None, :]
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        slot, token = tl.load(tile_slots_ptr + tile), tile_pairs(tokens_ptr, tile, num_tokens, ROWS)
        is_token = (token < num_tokens)[:, None]
        end = tl.where(slot < num_slots, max_rank, 0)  # of the ranks: tokens without an adapter are activated too
        row = token.to(tl.int64)[:, None]
        gate_ptrs = gate_up_ptr + row * row_stride + column[None, :]
        gate = tl.load(gate_ptrs, mask=is_token & is_column, other=0.0)
        up = tl.load(gate_ptrs + size, mask=is_token & is_column, other=0.0)
        b_ptrs = b_ptr + slot.to(tl.int64) * slot_stride + column[None, :] * max_rank + rank[:, None]
        inner_ptrs = inner_ptr + row * (2 * max_rank) + rank[None, :]
        gate_sum, up_sum = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.static_range(0, max_rank, RANKS):
            is_rank = first + rank < end
            is_value = is_column & is_rank[:, None]
            gate_b = tl.load(b_ptrs + first, mask=is_value, other=0.0)
            up_b = tl.load(b_ptrs + size * max_rank + first, mask=is_value, other=0.0)
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            if slot < num_slots:
                is_part = is_token & is_rank[None, :]
                inner = _add_up(inner_ptrs + first, part_stride, num_splits, is_part, SPLITS)
                gate_sum = tl.dot(inner.to(gate_b.dtype), gate_b, gate_sum, input_precision="ieee")
                inner = _add_up(inner_ptrs + max_rank + first, part_stride, num_splits, is_part, SPLITS)
                up_sum = tl.dot(inner.to(up_b.dtype), up_b, up_sum, input_precision="ieee")
        gate_sum, up_sum = gate.to(tl.float32) + gate_sum, up.to(tl.float32) + up_sum
        out = gated(gate_sum, up_sum, gate.dtype, GELU, ERF).to(gate.dtype)
        tl.store(out_ptr + row * size + column[None, :], out, mask=is_token & is_column)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def tile_size(num_tokens: int, num_slots: int, dtype: torch.dtype) -> int:
    """Return how many tokens a tile has: few enough that there are many tiles, even with one adapter."""
    return min(tile_rows(num_tokens, num_slots, dtype), max(MIN_TILE, next_power_of_2(num_tokens // LEAST_TILES or 1)))


def num_steps_of(num_inputs: int, depth: int, num_programs: int, most_splits: int, num_wanted: int) -> int:
    """Return how many steps of `depth` inputs a program sums up, so that there are enough of them for a GPU.

    num_programs: those that there are without splits, at least. num_wanted: those that keep the GPU busy.
    """
    steps, num_splits = ceil_div(num_inputs, depth), max(1, min(most_splits, num_wanted // num_programs))
    return max(min(MIN_STEPS, steps), ceil_div(steps, num_splits))


class Shrunk(NamedTuple):
    """Holds x A^T in parts, and what the kernels that expand it are launched with."""

    parts: Tensor  # (num_splits, num_tokens, num_lines) float32
    options: dict[str, Any]
    num_columns: int  # of COLUMNS outputs
    num_programs: int  # that share the tiles of each


def _shrink(x, rows, matrices, num_outputs):
    """Multiply by A. num_outputs: columns that programs will expand it to."""
    a, b, _ = matrices
    (num_tokens, num_inputs), (num_slots, num_lines, _), max_rank = x.shape, a.shape, b.shape[2]
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    for name, tensor in (("A", a), ("B", b)):
        assert tensor[0].is_contiguous(), f"{name} of a slot must be contiguous, strides {tensor.stride()}"
    if rows.plan is None:
        rows.plan = plan_tiles(rows.slots.unsqueeze(1), num_slots, tile_size(num_tokens, num_slots, x.dtype))
    plan, num_sm = rows.plan, num_multiprocessors(x.device)
    least_tiles, most_tiles = ceil_div(num_tokens, plan.tile_size), len(plan.tile_experts)
    depth = 128 if x.dtype.itemsize == 2 else 32
    lines = min(MAX_LINES, max(MIN_TILE, next_power_of_2(num_lines)))
    ranks = min(MAX_LINES, max(MIN_TILE, next_power_of_2(max_rank)))
    num_blocks, most_splits = ceil_div(num_lines, lines), min(MAX_SPLITS, max(1, MAX_PARTS // (plan.tile_size * ranks)))
    num_wanted = num_sm * (SHRINKING if plan.tile_size <= 32 else 1)
    steps = num_steps_of(num_inputs, depth, least_tiles * num_blocks, most_splits, num_wanted)
    num_splits = ceil_div(num_inputs, steps * depth)
    parts = x.new_empty(num_splits, num_tokens, num_lines, dtype=torch.float32)
    common: dict[str, Any] = {
        "num_slots": num_slots,
        "ROWS": plan.tile_size,
        "num_warps": 8 if plan.tile_size >= 64 else 4,
        **overlap_options(x.device),
    }
    _shrink_kernel[(num_splits, num_blocks, most_tiles)](
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
        num_stages=4 if plan.tile_size <= 32 else 3,
        **common,
    )
    fills = least_tiles * ceil_div(num_outputs, COLUMNS) > num_sm
    columns = COLUMNS if fills and plan.tile_size < 128 else FEW_COLUMNS
    # Few numbers of splits, since each is compiled.
    splits = 1 if num_splits == 1 else min(most_splits, 8 if num_splits <= 8 else MAX_SPLITS)
    options = {**common, "max_rank": max_rank, "RANKS": ranks, "SPLITS": splits, "COLUMNS": columns}
    num_columns = ceil_div(num_outputs, columns)
    return Shrunk(parts, options, num_columns, min(most_tiles, ceil_div(PROGRAMS * num_sm, num_columns)))


def add_lora(out, x, rows, matrices):
    assert out.stride(1) == 1, f"the rows of out must be contiguous, strides {out.stride()}"
    if len(out) > 0:
        _expand(out, _shrink(x, rows, matrices, out.shape[1]), rows, matrices)


def _expand(out, shrunk, rows, matrices):
    """Multiply by B, and add the product to `out`."""
    num_tokens, num_outputs = out.shape
    _expand_kernel[(shrunk.num_columns, shrunk.num_programs)](
        shrunk.parts,
        matrices.b,
        out,
        *rows.plan.tensors,
        out.stride(0),
        matrices.b.stride(0),
        num_tokens,
        len(shrunk.parts),
        num_outputs=num_outputs,
        SIZES=matrices.sizes,
        **shrunk.options,
    )


def gated_with_lora(gate_up, x, rows, matrices, activation):
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, f"the rows of gate_up must be contiguous, strides {gate_up.stride()}"
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens > 0:
        shrunk = _shrink(x, rows, matrices, size)
        is_gelu, is_exact = ACTIVATIONS[activation.__name__]
        _gated_kernel[(shrunk.num_columns, shrunk.num_programs)](
            shrunk.parts,
            matrices.b,
            gate_up,
            out,
            *rows.plan.tensors,
            gate_up.stride(0),
            matrices.b.stride(0),
            num_tokens,
            len(shrunk.parts),
            size=size,
            GELU=is_gelu,
            ERF=is_exact,
            **shrunk.options,
        )
    return out
