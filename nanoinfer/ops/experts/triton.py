"""The experts' MLPs as two grouped matrix products.

The pairs of a token and an expert are sorted into tiles of one expert each (`ops/routing`), and each product is one
kernel over tiles and columns. Rows are gathered where they are read, and nothing is copied into order.

- Decode is bound by reading the weights of the chosen experts. Most experts then have few tokens: one tile of 16 rows,
  so that each weight is read once. The columns are cut so narrow that one token keeps all multiprocessors busy.
- Prefill is bound by the tensor cores, and has tiles of 128 rows. On Hopper it has a kernel of its own
  (`hopper.py`).
- Weights in 4 bits are read as such by tiles of up to 64 rows (`ops/int4`, and on Hopper
  `hopper_int4.py`). For more rows they are widened first on Hopper.
- SwiGLU is computed where gate and up are: each program has a column of the gate next to the same column of up, so that
  one thread holds both.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.device_properties import (
    has_hopper_kernels,
    has_large_shared_memory,
    num_multiprocessors,
)
from nanoinfer.ops.common.math import gated
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.experts.triton_fp8 import fp8_expert_mlp as fp8_expert_mlp
from nanoinfer.ops.int4.triton import int4_tile_product, widen
from nanoinfer.ops.routing.triton import plan_tiles, tile_pairs, tile_rows


@triton.jit
def _tile_product(
    x_ptr,
    weight,  # pointers to the weights, and if these have 4 bits to scales and zero points
    x_rows,
    is_pair,
    expert,
    weight_rows,
    x_row_stride,
    num_rows: tl.constexpr,  # of an expert's weight
    depth: tl.constexpr,
    num_groups: tl.constexpr,  # 0: the weight has the dtype of x
    E2M1: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return x W^T in float32 for a few rows of both, (len(x_rows), len(weight_rows))."""
    is_row = weight_rows < num_rows
    if num_groups > 0:
        lines = expert.to(tl.int64) * num_rows + weight_rows
        num_blocks: tl.constexpr = (depth + 127) // 128
        width: tl.constexpr = None if depth % 128 == 0 else depth
        return int4_tile_product(
            x_ptr, weight, x_rows, is_pair, lines, is_row, x_row_stride, (0, num_blocks), num_blocks * 128, num_groups,
            STAGES, E2M1, ASM, width,
        )  # fmt: skip
    else:
        return _wide_tile_product(
            x_ptr,
            weight[0] + expert.to(tl.int64) * (num_rows * depth),
            x_rows,
            is_pair,
            weight_rows,
            is_row,
            x_row_stride,
            depth,
            DEPTH,
            STAGES,
        )


@triton.jit
def _wide_tile_product(
    x_ptr,
    weight_ptr,
    x_rows,
    is_pair,
    weight_rows,
    is_row,
    x_row_stride,
    depth: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * x_row_stride + k[None, :]
    weight_ptrs = weight_ptr + weight_rows[None, :] * depth + k[:, None]
    acc = tl.zeros((x_rows.shape[0], weight_rows.shape[0]), tl.float32)
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        if depth % DEPTH == 0:
            x = tl.load(x_ptrs + start, mask=is_pair[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_row[None, :], other=0.0)
        else:
            is_inside = start + k < depth
            x = tl.load(x_ptrs + start, mask=is_pair[:, None] & is_inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_row[None, :] & is_inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    return acc


@triton.jit
def _clamped(gate, up, limit, alpha, dtype: tl.constexpr):
    """Return `clamped_swiglu`, in float32. Gate and up are rounded to `dtype` before; NaN stays."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit(do_not_specialize=["num_pairs", "limit", "alpha"])
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # None, unless SwiGLU is clamped
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,
    x_row_stride,
    limit,
    alpha,
    num_pairs,
    num_choices: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    num_groups: tl.constexpr,
    E2M1: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of gate and up together
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile)
    if expert == num_experts:
        return
    pair = tile_pairs(pairs_ptr, tile, num_pairs, ROWS)
    is_pair = pair < num_pairs
    line = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)  # a column of the gate, the same column of up, and so on
    weight_row = line // 2 + line % 2 * inner_size
    acc = _tile_product(
        x_ptr,
        (weight_ptr, scales_ptr, zeros_ptr),
        pair // num_choices,
        is_pair,
        expert,
        weight_row,
        x_row_stride,
        2 * inner_size,
        hidden_size,
        num_groups,
        E2M1,
        DEPTH,
        STAGES,
        ASM,
    )
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * (2 * inner_size) + weight_row
        acc += tl.load(bias_ptrs, mask=line < 2 * inner_size, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS // 2, 2)))
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = gated(gate, up, dtype) if bias_ptr is None else _clamped(gate, up, limit, alpha, dtype)
    column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * inner_size + column[None, :]
    tl.store(out_ptrs, out.to(dtype), mask=is_pair[:, None] & (column < inner_size)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # None: there is none
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    pair_weights_ptr,
    out_ptr,
    num_pairs,
    num_choices: tl.constexpr,
    num_experts: tl.constexpr,
    inner_size: tl.constexpr,
    hidden_size: tl.constexpr,
    num_groups: tl.constexpr,
    E2M1: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(1)
    # The kernel before began when the plan was complete, so it is there before that kernel is done.
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile)
    pair = tile_pairs(pairs_ptr, tile, num_pairs, ROWS)
    is_pair = pair < num_pairs
    pair_weight = tl.load(pair_weights_ptr + pair, mask=is_pair, other=0.0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    out_row = (pair % num_choices).to(tl.int64) * (num_pairs // num_choices) + pair // num_choices
    out_ptrs = out_ptr + out_row[:, None] * hidden_size + column[None, :]
    out_mask = is_pair[:, None] & (column < hidden_size)[None, :]
    dtype = out_ptr.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if expert == num_experts:
        tl.store(out_ptrs, tl.zeros((ROWS, COLUMNS), dtype), mask=out_mask)
        return
    acc = _tile_product(
        x_ptr,
        (weight_ptr, scales_ptr, zeros_ptr),
        pair,
        is_pair,
        expert,
        column,
        inner_size,
        hidden_size,
        inner_size,
        num_groups,
        E2M1,
        DEPTH,
        STAGES,
        ASM,
    )
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * hidden_size + column
        acc += tl.load(bias_ptrs, mask=column < hidden_size, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptrs, (acc * pair_weight[:, None]).to(dtype), mask=out_mask)


# Pairs of each expert, on average, from which on Hopper widens weights in MXFP4: 0.7 ms for a layer of gpt-oss-20b.
WIDE_PAIRS = 150


class Tiling(NamedTuple):
    """How a grouped product is cut: the tile of a program, and how much of it is read ahead."""

    rows: int  # pairs
    columns: int  # rows of the weight
    depth: int  # of the inner dimension, at a time
    stages: int
    warps: int


def expert_mlp(hidden, gate_up, down, expert_ids, weights):
    rows = tile_rows(expert_ids.numel(), len(down), hidden.dtype)
    return _expert_mlp(hidden, ExpertWeights(gate_up), ExpertWeights(down), down.shape[2], expert_ids, weights, rows)


def int4_expert_mlp(
    hidden: Tensor, gate_up: ExpertWeights, down: ExpertWeights, expert_ids: Tensor, weights: Tensor
) -> Tensor:
    """Return what `expert_mlp` does, by weights in 4 bits of whole blocks of 128 inputs; hidden in 16 bits."""
    num_experts, inner_size = len(down.values), down.values.shape[2] * 8
    rows = min(64, tile_rows(expert_ids.numel(), num_experts, hidden.dtype))
    return _expert_mlp(hidden, gate_up, down, inner_size, expert_ids, weights, rows)


def clamped_expert_mlp(hidden, gate_up, down, gate_up_bias, down_bias, expert_ids, weights, clamps):
    first, second = ExpertWeights(gate_up, bias=gate_up_bias), ExpertWeights(down, bias=down_bias)
    rows = tile_rows(expert_ids.numel(), len(down), hidden.dtype)
    return _expert_mlp(hidden, first, second, down.shape[2], expert_ids, weights, rows, clamps)


def mxfp4_expert_mlp(
    hidden: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    inner_size: int,
    expert_ids: Tensor,
    weights: Tensor,
    clamps: tuple[float, float],
) -> Tensor:
    """Return what `clamped_expert_mlp` does, by weights in MXFP4, whose depth is filled up to whole blocks of 128.

    scales: exponents in uint8. `int4_tile_product` reads those of a block at once.
    """
    num_experts, num_pairs = len(down.values), expert_ids.numel()
    if num_pairs >= WIDE_PAIRS * num_experts and _has_hopper_kernel(hidden, inner_size, 128):
        return _expert_mlp(hidden, gate_up, down, inner_size, expert_ids, weights, 128, clamps)
    gate_up, down = _with_scales_of_blocks(gate_up), _with_scales_of_blocks(down)
    rows = min(64, tile_rows(num_pairs, num_experts, hidden.dtype))
    return _expert_mlp(hidden, gate_up, down, inner_size, expert_ids, weights, rows, clamps)


def _with_scales_of_blocks(weight: ExpertWeights) -> ExpertWeights:
    """Return the same with the scales of each block of 128 inputs as one number."""
    assert weight.scales is not None, "weights in MXFP4 have scales"
    return weight._replace(scales=weight.scales.view(torch.int32))


def _has_hopper_kernel(hidden: Tensor, inner_size: int, rows: int) -> bool:
    """Return whether tiles of so many rows have the kernel for Hopper GPUs, which wants weights in 16 bits."""
    if rows < 128 or not has_hopper_kernels(hidden.device):
        return False
    from nanoinfer.ops.experts import hopper

    return hopper.serves(hidden.shape[1], inner_size, hidden.stride(0), hidden.dtype)


def _has_hopper_int4_kernel(x: Tensor, weight: ExpertWeights, rows: int) -> bool:
    """Return whether tiles of so many rows of x have the kernel for Hopper GPUs that reads weights in 4 bits."""
    if weight.scales is None or not has_hopper_kernels(x.device):
        return False
    from nanoinfer.ops.experts import hopper_int4

    return hopper_int4.serves(x, weight, rows)


def _widened(weight: ExpertWeights, dtype: torch.dtype) -> Tensor:
    """Return a weight in 16 bits, (num_experts, num_rows, depth), with what fills up rows in MXFP4."""
    if weight.scales is None:
        return weight.values
    values, scales = weight.values.flatten(0, 1), weight.scales.flatten(0, 1)
    return widen(values, scales, None, dtype, is_e2m1=True).unflatten(0, weight.values.shape[:2])


def _check(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
    for name, tensor in (("gate_up", gate_up), ("down", down), ("expert_ids", expert_ids), ("weights", weights)):
        assert tensor.is_contiguous(), f"{name} must be contiguous, strides {tensor.stride()}"
    assert hidden.stride(1) == 1, f"the rows of hidden must be contiguous, strides {hidden.stride()}"


def _results(hidden: Tensor, inner_size: int, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the activations of all pairs, and for the results."""
    num_tokens, num_choices = expert_ids.shape
    gated = hidden.new_empty(expert_ids.numel(), inner_size)
    return gated, hidden.new_empty(num_choices, num_tokens, hidden.shape[1])


def _expert_mlp(
    hidden: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    inner_size: int,
    expert_ids: Tensor,
    weights: Tensor,
    rows: int,
    clamps: tuple[float, float] | None = None,
) -> Tensor:
    num_choices, num_pairs = expert_ids.shape[1], expert_ids.numel()
    num_experts, hidden_size = down.values.shape[:2]
    _check(hidden, gate_up.values, down.values, expert_ids, weights)
    gated, out = _results(hidden, inner_size, expert_ids)
    if num_pairs == 0:
        return out
    plan = plan_tiles(expert_ids, num_experts, rows)
    if _has_hopper_kernel(hidden, inner_size, rows):
        from nanoinfer.ops.experts.hopper import grouped_product

        wide = partial(_widened, dtype=hidden.dtype)  # one after the other, in the same memory
        grouped_product(hidden, wide(gate_up), plan, weights, gated, num_choices, True, gate_up.bias, clamps)
        grouped_product(gated, wide(down), plan, weights, out, num_choices, False, down.bias)
        return out
    if _has_hopper_int4_kernel(hidden, gate_up, rows) and _has_hopper_int4_kernel(gated, down, rows):
        from nanoinfer.ops.experts import hopper_int4

        product = partial(hopper_int4.grouped_product, num_choices=num_choices, rows=rows)
        product(hidden, gate_up, plan, weights, gated, is_gated=True, clamps=clamps)
        product(gated, down, plan, weights, out, is_gated=False)
        return out
    num_slots = len(plan.tile_experts)
    options = {"ASM": hidden.is_cuda, **overlap_options(hidden.device)}
    choose = choose_tiling if gate_up.scales is None else _choose_int4_tiling
    tiling = choose(rows, num_slots, 2 * inner_size, hidden.dtype, hidden.device)
    _gate_up_kernel[(-(-(2 * inner_size) // tiling.columns), num_slots)](
        hidden,
        *gate_up[:4],
        *plan,
        gated,
        hidden.stride(0),
        *(clamps or (0.0, 0.0)),
        num_pairs,
        num_choices=num_choices,
        num_experts=num_experts,
        hidden_size=hidden_size,
        inner_size=inner_size,
        num_groups=gate_up.num_groups,
        E2M1=gate_up.is_e2m1,
        ROWS=rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **options,
    )
    tiling = choose(rows, num_slots, hidden_size, hidden.dtype, hidden.device)
    _down_kernel[(-(-hidden_size // tiling.columns), num_slots)](
        gated,
        *down[:4],
        *plan,
        weights,
        out,
        num_pairs,
        num_choices=num_choices,
        num_experts=num_experts,
        inner_size=inner_size,
        hidden_size=hidden_size,
        num_groups=down.num_groups,
        E2M1=down.is_e2m1,
        ROWS=rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **options,
    )
    return out


def choose_tiling(rows: int, num_tiles: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """Return how to cut a product of `num_tiles` tiles of rows with `num_columns` columns.

    What is read ahead has to fit into shared memory, and the sums into registers.
    """
    if dtype == torch.float32:  # for comparisons: tensor cores would round it
        return Tiling(rows, 64, 32, 2, 4)
    is_hopper_sized = has_large_shared_memory(device)
    if rows == 128:
        return Tiling(rows, 256 if is_hopper_sized else 128, 64, 4, 8)
    if rows == 64:
        return Tiling(rows, 128, 64, 4 if is_hopper_sized else 3, 4)
    if num_tiles * -(-num_columns // 64) < num_multiprocessors(device):
        return Tiling(rows, 32, 128, 6, 4)  # few programs, which together ask for enough bytes at a time
    return Tiling(rows, 64, 128, 4, 4)


def _choose_int4_tiling(
    rows: int, num_tiles: int, num_columns: int, _dtype: torch.dtype, device: torch.device
) -> Tiling:
    """Return the same for weights in 4 bits. Blocks of 128 inputs are read at a time."""
    if num_tiles * -(-num_columns // 64) < 2 * num_multiprocessors(device):
        return Tiling(rows, 32, 128, 6, 4)
    return Tiling(rows, 128, 128, 3, 4)
