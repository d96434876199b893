"""A product for steps of few tokens, fused with the norm before it and with what follows. Twin: `layers/few_rows.py`.

A decode step of few rows does nothing but read weights, a few microseconds for each product, so what counts is that the
memory never idles between two kernels.

- A program issues the loads of its first weights before it waits for the kernel before it, and lets the next kernel
  start right then. So one kernel's weights arrive while the other still computes.
- RMSNorm is a factor for each row. A program sums up the squares of what it multiplies anyway, and scales its results.
- SwiGLU and the residual addition are done where the sums are. SwiGLU's programs have columns of the gate, and the same
  columns of up.
- Sums are not split over programs, as every program of the next kernel would have to add up all of them. The
  warps of a program split them instead: each has a slice of K, and all slices are added up in the end.

Every program reads all of x, which limits this to few rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import num_multiprocessors
from nanoinfer.kernels.programmatic_launch import overlap_options


@triton.jit
def _load(
    row_ptrs,  # (R,)
    is_row,  # (R,); None: all rows exist
    first,  # of the values along K
    size: tl.constexpr,  # how many there are
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return (SLICES, R, DEPTH), DEPTH values of each row for each slice of K; without slices (R, DEPTH)."""
    if SLICES == 1:
        k = first + tl.arange(0, DEPTH)[None, :]
        ptrs = row_ptrs[:, None] + k
        mask = None if is_row is None else is_row[:, None]
    else:
        k = first + tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]
        ptrs = row_ptrs[None, :, None] + k
        mask = None if is_row is None else is_row[None, :, None]
    if size % (SLICES * DEPTH) != 0:
        mask = k < size if mask is None else mask & (k < size)
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _load_ahead(
    row_ptrs,
    is_row,
    size: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the tiles of the last AHEAD steps."""
    num_steps: tl.constexpr = (size + SLICES * DEPTH - 1) // (SLICES * DEPTH)
    tiles, pinned = (), ()
    for step in tl.static_range(num_steps - AHEAD, num_steps):
        tiles += (_load(row_ptrs, is_row, step * SLICES * DEPTH, size, SLICES, DEPTH),)  # type: ignore[assignment]
    for index in tl.static_range(AHEAD):
        tile = tiles[index]  # type: ignore[var-annotated]
        if ASM:
            # No instruction at all, but one that the compiler cannot look into. It would lay out each tile for the
            # tensor cores right after its load, and so wait for one tile before it loads the next.
            tile = tl.inline_asm_elementwise("// $0 $1", "=r,0", [tile], tile.dtype, is_pure=False, pack=2)
        pinned += (tile,)  # type: ignore[assignment]
    return pinned


@triton.jit
def _fetch(row_ptrs, first, size: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr):
    """Have the tile of a step brought to the L2 cache. For values of 16 bits, 64 of which are a line of the cache."""
    num_lines: tl.constexpr = max(SLICES * DEPTH // 64, 1)
    k = tl.minimum(first + tl.arange(0, num_lines) * 64, size - 1)
    address = (row_ptrs[:, None] + k[None, :]).to(tl.int64)
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def _multiply(x, weight, norm_weight, acc, squares, SLICES: tl.constexpr):
    """Add the product of two tiles to `acc`, (SLICES, ROWS, COLUMNS), and the squares of x to `squares`."""
    if norm_weight is not None:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=-1)
        x = (wide * norm_weight.to(tl.float32)).to(weight.dtype)
    weight = tl.trans(weight) if SLICES == 1 else tl.permute(weight, (0, 2, 1))
    return tl.dot(x, weight, acc, input_precision="ieee"), squares


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # None for none, as are the next two
    norm_weight_ptr,
    residual_ptr,
    out_ptr,
    x_row_stride,
    eps,
    num_rows,
    num_outputs: tl.constexpr,
    size: tl.constexpr,  # of the sums
    GATED: tl.constexpr,  # whether the weight has the gate and then up, of which SwiGLU makes one output
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # rows of the weight in a program
    SLICES: tl.constexpr,  # of K, a warp each; 1: the warps share the columns instead
    DEPTH: tl.constexpr,  # values of each slice in a step
    AHEAD: tl.constexpr,  # steps whose weights are read before the wait
    STAGES: tl.constexpr,  # of the pipeline of the others
    FETCHED: tl.constexpr,  # steps of these whose weights are brought to the L2 cache before the wait
    OVERLAP: tl.constexpr,
):
    num_steps: tl.constexpr = (size + SLICES * DEPTH - 1) // (SLICES * DEPTH)
    row, line = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < num_rows
    line = tl.minimum(line, num_outputs * (1 + GATED) - 1)  # what is computed beyond the last column is not stored
    if GATED:  # the gate and up alternate
        line = line // 2 + line % 2 * num_outputs
    x_ptrs = x_ptr + row * x_row_stride
    weight_ptrs = weight_ptr + line.to(tl.int64) * size
    column = tl.program_id(0) * (COLUMNS // (1 + GATED)) + tl.arange(0, COLUMNS // (1 + GATED))
    out_offsets = row[:, None] * num_outputs + column[None, :]
    is_out = is_row[:, None] & (column < num_outputs)[None, :]

    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    weights = _load_ahead(weight_ptrs, None, size, SLICES, DEPTH, AHEAD, OVERLAP)
    if norm_weight_ptr is not None:
        norm_ptrs = norm_weight_ptr + tl.arange(0, 1)
        norm_weights = _load_ahead(norm_ptrs, None, size, SLICES, DEPTH, AHEAD, OVERLAP)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + line).to(tl.float32)
    if OVERLAP:
        for step in tl.static_range(FETCHED):
            _fetch(weight_ptrs, step * SLICES * DEPTH, size, SLICES, DEPTH)
        tl.extra.cuda.gdc_wait()
    xs = _load_ahead(x_ptrs, is_row, size, SLICES, DEPTH, AHEAD, OVERLAP)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + out_offsets, mask=is_out, other=0.0)

    if SLICES == 1:
        acc, squares = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS,), tl.float32)
    else:
        acc, squares = tl.zeros((SLICES, ROWS, COLUMNS), tl.float32), tl.zeros((SLICES, ROWS), tl.float32)
    for step in tl.range(0, num_steps - AHEAD, num_stages=STAGES):
        first = step * SLICES * DEPTH
        x = _load(x_ptrs, is_row, first, size, SLICES, DEPTH)
        weight = _load(weight_ptrs, None, first, size, SLICES, DEPTH)
        if norm_weight_ptr is None:
            acc, squares = _multiply(x, weight, None, acc, squares, SLICES)
        else:
            norm_weight = _load(norm_ptrs, None, first, size, SLICES, DEPTH)
            acc, squares = _multiply(x, weight, norm_weight, acc, squares, SLICES)
    for index in tl.static_range(AHEAD):
        norm = None if norm_weight_ptr is None else norm_weights[index]
        acc, squares = _multiply(xs[index], weights[index], norm, acc, squares, SLICES)
    if SLICES > 1:
        acc, squares = tl.sum(acc, axis=0), tl.sum(squares, axis=0)

    dtype = out_ptr.dtype.element_ty
    if norm_weight_ptr is not None:
        acc *= tl.rsqrt(squares / size + eps)[:, None]
    if bias_ptr is not None:
        acc += bias[None, :]
    if GATED:  # rounded where separate kernels would do it
        gate, up = tl.split(tl.reshape(acc.to(dtype).to(tl.float32), (ROWS, COLUMNS // 2, 2)))
        acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    if residual_ptr is not None:
        acc += residual.to(tl.float32)
    tl.store(out_ptr + out_offsets, acc.to(dtype), mask=is_out)


class Tiling(NamedTuple):
    """How a product is cut: see the kernel's constants."""

    columns: int
    slices: int
    depth: int
    ahead: int
    stages: int
    warps: int
    fetched: int = 0


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return SwiGLU(RMSNorm(x) W^T + b) + residual, (num_rows, num_outputs); all except the product may be left out.

    x: (num_rows, size), rows contiguous. Not in float16 if there is a norm: x times its weight may overflow, as it is
    not divided by the root mean square yet. weight: (num_outputs, size), contiguous, or (2 * num_outputs, size) with
    the gate before up if it is `gated`. bias: as long as the weight. norm: the norm's weight, (size,) in the dtype of
    x, and its epsilon. residual: (num_rows, num_outputs), contiguous.
    """
    (num_rows, size), num_outputs = x.shape, len(weight) // (1 + gated)
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert weight.is_contiguous(), f"the weight must be contiguous, strides {weight.stride()}"
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    out = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out
    tiling = choose_tiling(num_rows, len(weight), size, x.device)
    num_steps = triton.cdiv(size, tiling.slices * tiling.depth)
    ahead = min(tiling.ahead, num_steps)
    norm_weight, eps = norm or (None, 0.0)
    _few_rows_product_kernel[(triton.cdiv(len(weight), tiling.columns),)](
        x,
        weight,
        bias,
        norm_weight,
        residual,
        out,
        x.stride(0),
        eps,
        num_rows,
        num_outputs=num_outputs,
        size=size,
        GATED=gated,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        COLUMNS=tiling.columns,
        SLICES=tiling.slices,
        DEPTH=tiling.depth,
        AHEAD=ahead,
        STAGES=tiling.stages,
        FETCHED=min(tiling.fetched, num_steps - ahead),
        num_warps=tiling.warps,
        **overlap_options(x.device),
    )
    return out


def choose_tiling(num_rows: int, num_lines: int, size: int, device: torch.device) -> Tiling:
    """Return how to cut a product with a weight of so many lines (rows) of `size` values.

    All programs should be on the GPU at the same time, and leave room for the first ones of the next kernel.
    """
    columns = 8
    while columns < 32 and num_lines // (2 * columns) >= num_multiprocessors(device) * 3 // 4:
        columns *= 2
    if num_rows > 16:  # x takes most of the memory
        return Tiling(columns, slices=1, depth=64, ahead=1, stages=5, warps=4 if num_rows <= 64 else 8)
    if columns * size <= 2**15:  # 64 KiB, of which all is read ahead
        return Tiling(columns, slices=8, depth=64, ahead=6, stages=3, warps=8)
    if num_lines >= 16384:
        return Tiling(columns=128, slices=1, depth=64, ahead=2, stages=4, warps=4, fetched=4)
    return Tiling(min(columns, 16), slices=4, depth=64, ahead=2, stages=5, warps=4, fetched=4)
