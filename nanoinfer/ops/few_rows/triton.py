"""A product for steps of a few tokens, fused with the norm before it and with what follows.

Such a product does nothing but read its weight, which takes 1 to 50 microseconds, so what counts is that the memory
never idles, least of all between two kernels.

- A program issues the loads of its first weights before it waits for the kernel before it, and lets the next kernel
  start right then. So one kernel's weights arrive while the other still computes.
- Tensor cores want 16 rows, and their operands through shared memory. Here each thread multiplies what it loads, and
  threads add up their sums only at the end.
- RMSNorm is a factor for each row. A program sums up the squares of what it multiplies anyway, and scales its results.
- SwiGLU and the residual addition are done where the sums are.

Every thread multiplies by every row, which limits this to a few of them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import gated

DEPTH = 256  # values of a line that a warp reads at once: 16 bytes a thread


@triton.jit
def _load_chunk(ptrs, first_step, k, end, AHEAD: tl.constexpr, DEPTH: tl.constexpr):
    """Return the tiles of so many steps, one of each pointer a step; 0 from `end` on, if it is not None."""
    tiles = ()
    for step in tl.static_range(AHEAD):
        step_k = (first_step + step) * DEPTH + k
        for index in tl.static_range(len(ptrs)):
            if end is None:
                tiles += (tl.load(ptrs[index] + step_k),)  # type: ignore[assignment]
            else:
                tiles += (tl.load(ptrs[index] + step_k, mask=step_k < end, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _multiply(weights, xs, norm_weights, sums, squares, step: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr):
    """Add the products of each row of x and each line of the weight in a step to `sums`, the squares of x to `squares`.

    Without norm weights there are no squares.
    """
    new_sums, new_squares = (), ()
    for row in tl.static_range(ROWS):
        x = xs[step * ROWS + row].to(tl.float32)
        if len(norm_weights) > 0:
            new_squares += (squares[row] + tl.sum(x * x, axis=2),)  # type: ignore[assignment]
            x *= norm_weights[step].to(tl.float32)
        for line in tl.static_range(LINES):
            product = tl.sum(weights[step * LINES + line].to(tl.float32) * x, axis=2)
            new_sums += (sums[row * LINES + line] + product,)  # type: ignore[assignment]
    return new_sums, new_squares


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
    WARPS: tl.constexpr,
    SLICES: tl.constexpr,  # of K, each for another warp; their sums are added up in the end
    OUTPUTS: tl.constexpr,  # of a warp; from two on Triton leaves sums where they are until they are stored
    DEPTH: tl.constexpr,  # values of a line in a step
    AHEAD: tl.constexpr,  # steps whose weights are on their way
    OVERLAP: tl.constexpr,
):
    num_lines: tl.constexpr = OUTPUTS * (1 + GATED)  # of the weight that a warp reads
    num_steps: tl.constexpr = (size + DEPTH * SLICES - 1) // (DEPTH * SLICES)
    num_chunks: tl.constexpr = (num_steps + AHEAD - 1) // AHEAD
    warp = tl.arange(0, WARPS)
    first = (tl.program_id(0) * (WARPS // SLICES) + warp // SLICES) * OUTPUTS  # output of each warp
    # A tile is (32, WARPS, 8), in this order so that Triton gives each warp a line of the weight. Each warp reads all
    # that it needs of x, so x is loaded in such tiles too.
    k = tl.arange(0, 32)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    slice_begin = (warp % SLICES * (num_steps * DEPTH))[None, :, None]
    k += slice_begin
    end = None if size % (DEPTH * SLICES * AHEAD) == 0 else tl.minimum(slice_begin + num_steps * DEPTH, size)
    weight_ptrs, x_ptrs, norm_ptrs = (), (), ()
    for index in tl.static_range(OUTPUTS):
        line = tl.minimum(first + index, num_outputs - 1).to(tl.int64)[None, :, None]
        weight_ptrs += (weight_ptr + line * size,)  # type: ignore[assignment]
        if GATED:
            weight_ptrs += (weight_ptr + (line + num_outputs) * size,)  # type: ignore[assignment]
    for row in tl.static_range(ROWS):
        x_ptrs += (x_ptr + tl.minimum(row, num_rows - 1) * x_row_stride,)  # type: ignore[assignment]
    if norm_weight_ptr is not None:
        norm_ptrs = (norm_weight_ptr,)  # type: ignore[assignment]
    # In the end each lane has another row and output, and the warps that had slices of the same lines are one.
    lane = tl.arange(0, 32)[:, None]
    first_in_end = (tl.program_id(0) * (WARPS // SLICES) + tl.arange(0, WARPS // SLICES)) * OUTPUTS
    row, column = lane // OUTPUTS, first_in_end[None, :] + lane % OUTPUTS
    out_offsets = row * num_outputs + column
    is_out = (row < num_rows) & (column < num_outputs)

    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    weights = _load_chunk(weight_ptrs, 0, k, end, AHEAD, DEPTH)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=is_out, other=0.0)
        if GATED:
            up_bias = tl.load(bias_ptr + num_outputs + column, mask=is_out, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + out_offsets, mask=is_out, other=0.0)
    sums, squares = (), ()
    for _ in tl.static_range(ROWS * num_lines):
        sums += (tl.zeros((32, WARPS), tl.float32),)  # type: ignore[assignment]
    for _ in tl.static_range(ROWS * len(norm_ptrs)):
        squares += (tl.zeros((32, WARPS), tl.float32),)  # type: ignore[assignment]

    for chunk in range(num_chunks - 1):
        xs = _load_chunk(x_ptrs, chunk * AHEAD, k, end, AHEAD, DEPTH)
        norm_weights = _load_chunk(norm_ptrs, chunk * AHEAD, k, end, AHEAD, DEPTH)
        later = ()
        for index in tl.static_range(AHEAD):
            sums, squares = _multiply(weights, xs, norm_weights, sums, squares, index, num_lines, ROWS)
            later += _load_chunk(weight_ptrs, (chunk + 1) * AHEAD + index, k, end, 1, DEPTH)
        weights = later
    xs = _load_chunk(x_ptrs, (num_chunks - 1) * AHEAD, k, end, AHEAD, DEPTH)
    norm_weights = _load_chunk(norm_ptrs, (num_chunks - 1) * AHEAD, k, end, AHEAD, DEPTH)
    for index in tl.static_range(AHEAD):
        sums, squares = _multiply(weights, xs, norm_weights, sums, squares, index, num_lines, ROWS)

    out = tl.zeros((32, WARPS), tl.float32)
    up, mean_square = out, out
    for index in tl.static_range(ROWS * OUTPUTS):
        is_its_lane = lane == index
        out = tl.where(is_its_lane, tl.sum(sums[index * (1 + GATED)], axis=0, keep_dims=True), out)
        if GATED:
            up = tl.where(is_its_lane, tl.sum(sums[index * 2 + 1], axis=0, keep_dims=True), up)
    if norm_weight_ptr is not None:
        for index in tl.static_range(ROWS):
            mean_square = tl.where(row == index, tl.sum(squares[index], axis=0, keep_dims=True) / size, mean_square)
    if SLICES > 1:
        out = tl.sum(tl.reshape(out, (32, WARPS // SLICES, SLICES)), axis=2)
        if GATED:
            up = tl.sum(tl.reshape(up, (32, WARPS // SLICES, SLICES)), axis=2)
        if norm_weight_ptr is not None:
            mean_square = tl.sum(tl.reshape(mean_square, (32, WARPS // SLICES, SLICES)), axis=2)
    if norm_weight_ptr is not None:
        factor = tl.rsqrt(mean_square + eps)
        out *= factor
        if GATED:
            up *= factor
    if bias_ptr is not None:
        out += bias.to(tl.float32)
        if GATED:
            up += up_bias.to(tl.float32)
    if GATED:
        out = gated(out, up, out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        out += residual.to(tl.float32)
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_out)


class Tiling(NamedTuple):
    """Says how a product is cut: see the kernel's constants."""

    warps: int
    slices: int
    outputs: int
    ahead: int


def few_rows_product(x, weight, bias=None, norm=None, residual=None, gated=False, out_dtype=None):
    (num_rows, size), num_outputs = x.shape, len(weight) // (1 + gated)
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert weight.is_contiguous(), f"the weight must be contiguous, strides {weight.stride()}"
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype)
    if num_rows == 0:
        return out
    tiling = choose_tiling(num_rows, len(weight), size, gated)
    num_steps, padded_rows = ceil_div(size, DEPTH * tiling.slices), next_power_of_2(num_rows)
    assert padded_rows * tiling.outputs <= 32, f"a warp has no lanes for {num_rows} rows of {tiling.outputs} outputs"
    norm_weight, eps = norm or (None, 0.0)
    _few_rows_product_kernel[(ceil_div(num_outputs, tiling.warps // tiling.slices * tiling.outputs),)](
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
        ROWS=padded_rows,
        WARPS=tiling.warps,
        SLICES=tiling.slices,
        OUTPUTS=tiling.outputs,
        DEPTH=DEPTH,
        AHEAD=min(tiling.ahead, num_steps),
        num_warps=tiling.warps,
        **overlap_options(x.device),
    )
    return out


def choose_tiling(num_rows: int, num_lines: int, size: int, gated: bool) -> Tiling:
    """Return how to cut a product with a weight of so many lines (rows) of `size` values: what was fastest on an H200.

    Each multiprocessor should have some 32 KiB of loads in flight. For a small weight, that requires cutting its lines
    into slices. With more outputs for each warp, x is loaded less often.
    """
    if size <= 4 * DEPTH:
        return Tiling(warps=4, slices=1, outputs=2 if gated else 4, ahead=4)
    if num_lines <= 2048:
        if num_rows > 2 and num_lines > 1024 and not gated:
            return Tiling(warps=8, slices=4, outputs=4, ahead=2)
        return Tiling(warps=8, slices=4, outputs=2, ahead=3)
    outputs = 2 if gated or num_rows == 1 else 4
    return Tiling(warps=8, slices=2, outputs=outputs, ahead=4 if size <= 8192 else 2)
