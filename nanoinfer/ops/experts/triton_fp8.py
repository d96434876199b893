"""The experts' MLPs with weights and activations in FP8.

As in `triton.py` the pairs of a token and an expert are sorted into tiles of one expert each, and each of the two
grouped products is one kernel. The first one ends in SwiGLU, or GeGLU, and rounds its result: a program has 128 columns
of the gate and the same 128 of up, a whole group of values that share a scale.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import (
    has_hopper_kernels,
    has_large_shared_memory,
    num_multiprocessors,
)
from nanoinfer.ops.common.fp8_format import GROUP_SIZE, QuantizedRows
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import e4m3_scale, gated, to_e4m3, wait_for_inputs
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.fp8.triton import scaled_tile_product
from nanoinfer.ops.routing.triton import plan_tiles, row_of_result, tile_pairs, tile_rows

MAX_ROWS = 64  # pairs in a tile; the sums of more do not fit into registers
GEGLU = tl.constexpr(2)  # where True stands for SwiGLU


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    values_ptr,
    scales_ptr,
    static_scale_ptr,
    x_row_stride,
    x_scale_stride,
    num_pairs,
    num_choices: tl.constexpr,
    num_experts: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    X_GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DTYPE: tl.constexpr,  # to which gate, up and their product are rounded
    GELU: tl.constexpr,  # whether the activation is GeGLU
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert == num_experts:
        return
    pair = tile_pairs(pairs_ptr, tile, num_pairs, ROWS)
    is_pair = pair < num_pairs
    # A group of columns of the gate, then the same columns of up.
    line = tl.arange(0, 2 * GROUP)
    line_column = tl.program_id(0) * GROUP + line % GROUP
    num_scales = 2 * inner_size
    if BLOCKS:
        num_scales = 2 * inner_size // GROUP * tl.cdiv(hidden_size, GROUP)
    acc = scaled_tile_product(
        x_ptr,
        x_scales_ptr,
        weight_ptr + expert * (2 * inner_size * hidden_size),
        weight_scales_ptr + expert * num_scales,
        pair // num_choices,
        is_pair,
        line_column + line // GROUP * inner_size,
        line_column < inner_size,
        x_row_stride,
        x_scale_stride,
        0,
        hidden_size,
        hidden_size,
        GROUP if X_GROUPS else None,
        BLOCKS,
        False,
        GROUP,
        STAGES,
    )
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, GROUP, ROWS)), (1, 2, 0)))  # (GROUP, ROWS) each
    out = gated(gate, up, DTYPE, GELU).to(DTYPE).to(tl.float32)
    if static_scale_ptr is not None:
        values = to_e4m3(out, tl.load(static_scale_ptr))
    else:
        scales = e4m3_scale(out, 0)
        tl.store(scales_ptr + pair.to(tl.int64) * tl.cdiv(inner_size, GROUP) + tl.program_id(0), scales, mask=is_pair)
        values = to_e4m3(out, scales[None, :])
    column = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    out_ptrs = values_ptr + pair.to(tl.int64)[None, :] * inner_size + column[:, None]
    tl.store(out_ptrs, values, mask=is_pair[None, :] & (column < inner_size)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    pair_weights_ptr,
    out_ptr,
    x_scale_stride,
    num_pairs,
    num_choices: tl.constexpr,
    num_experts: tl.constexpr,
    inner_size: tl.constexpr,
    hidden_size: tl.constexpr,
    X_GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(1)
    # The kernel before began when the plan was complete, so it is there before that kernel is done.
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    pair = tile_pairs(pairs_ptr, tile, num_pairs, ROWS)
    is_pair = pair < num_pairs
    pair_weight = tl.load(pair_weights_ptr + pair, mask=is_pair, other=0.0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    out_row = row_of_result(pair, num_pairs, num_choices)
    out_ptrs = out_ptr + out_row[None, :] * hidden_size + column[:, None]
    out_mask = is_pair[None, :] & (column < hidden_size)[:, None]
    dtype = out_ptr.dtype.element_ty
    wait_for_inputs(OVERLAP)
    if expert == num_experts:
        tl.store(out_ptrs, tl.zeros((COLUMNS, ROWS), dtype), mask=out_mask)
        return
    num_scales = hidden_size
    if BLOCKS:
        num_scales = tl.cdiv(hidden_size, GROUP) * tl.cdiv(inner_size, GROUP)
    acc = scaled_tile_product(
        x_ptr,
        x_scales_ptr,
        weight_ptr + expert * (hidden_size * inner_size),
        weight_scales_ptr + expert * num_scales,
        pair,
        is_pair,
        column,
        column < hidden_size,
        inner_size,
        x_scale_stride,
        0,
        inner_size,
        inner_size,
        GROUP if X_GROUPS else None,
        BLOCKS,
        False,
        GROUP,
        STAGES,
    )
    tl.store(out_ptrs, (acc * pair_weight[None, :]).to(dtype), mask=out_mask)


class Tiling(NamedTuple):
    """Says how the two grouped products are cut."""

    gate_up_stages: int
    down_columns: int
    down_stages: int
    down_warps: int


def fp8_expert_mlp(x, x_scales, gate_up, down, down_format, expert_ids, weights, dtype, is_geglu=False):
    num_tokens, num_choices = expert_ids.shape
    num_experts, hidden_size, inner_size = down.values.shape
    tensors = {"gate_up": gate_up.values, "down": down.values, "expert_ids": expert_ids, "weights": weights}
    for name, tensor in {**tensors, "gate_up's scales": gate_up.scales, "down's scales": down.scales}.items():
        assert tensor.is_contiguous(), f"{name} must be contiguous, strides {tensor.stride()}"
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert gate_up.scales.dim() == 2 or inner_size % GROUP_SIZE == 0, f"the gate's {inner_size} rows end inside a block"
    num_pairs = expert_ids.numel()
    gated = down_format.empty_rows(expert_ids.view(-1), inner_size)
    out = x.new_empty(num_choices, num_tokens, hidden_size, dtype=dtype)
    if num_pairs == 0:
        return out
    rows = tile_rows(num_pairs, num_experts, dtype)
    if _has_hopper_kernel(x, down, rows, dtype):
        from nanoinfer.ops.experts import hopper_fp8

        plan = plan_tiles(expert_ids, num_experts, rows)
        hopper_fp8.grouped_product(
            QuantizedRows(x, x_scales), gate_up, plan, weights, gated.values, GEGLU.value if is_geglu else True, dtype,
            gated.scales, down_format.scale,
        )  # fmt: skip
        hopper_fp8.grouped_product(gated, down, plan, weights, out, False, dtype)
        return out
    rows = min(MAX_ROWS, rows)
    plan = plan_tiles(expert_ids, num_experts, rows)
    num_slots = len(plan.tile_experts)
    tiling = choose_tiling(rows, num_slots, hidden_size, x.device)
    common = {
        "num_choices": num_choices,
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "inner_size": inner_size,
        "GROUP": GROUP_SIZE,
        "ROWS": rows,
        **overlap_options(x.device),
    }
    _gate_up_kernel[(ceil_div(inner_size, GROUP_SIZE), num_slots)](
        x,
        x_scales,
        *gate_up[:2],
        *plan.tensors,
        gated.values,
        gated.scales,
        down_format.scale,
        x.stride(0),
        x_scales.stride(0),
        num_pairs,
        X_GROUPS=x_scales.shape[1] > 1,
        BLOCKS=gate_up.scales.dim() == 3,
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        GELU=is_geglu,
        STAGES=tiling.gate_up_stages,
        num_warps=8,
        **common,
    )
    _down_kernel[(ceil_div(hidden_size, tiling.down_columns), num_slots)](
        gated.values,
        gated.scales,
        *down[:2],
        *plan.tensors,
        weights,
        out,
        gated.scales.stride(0),
        num_pairs,
        X_GROUPS=gated.scales.shape[1] > 1,
        BLOCKS=down.scales.dim() == 3,
        COLUMNS=tiling.down_columns,
        STAGES=tiling.down_stages,
        num_warps=tiling.down_warps,
        **common,
    )
    return out


def _has_hopper_kernel(x: Tensor, down: ExpertWeights, rows: int, dtype: torch.dtype) -> bool:
    """Return whether tiles of so many rows have the kernel for Hopper GPUs."""
    if rows < 128 or not has_hopper_kernels(x.device):
        return False
    from nanoinfer.ops.experts import hopper_fp8

    _, hidden_size, inner_size = down.values.shape
    return hopper_fp8.serves(hidden_size, inner_size, x.stride(0), dtype)


def choose_tiling(rows: int, num_tiles: int, hidden_size: int, device: torch.device) -> Tiling:
    """Return how to cut the products of `num_tiles` tiles of rows."""
    # Few programs, which together ask for enough bytes at a time, or enough of them for all multiprocessors.
    is_few = num_tiles * ceil_div(hidden_size, 128) < num_multiprocessors(device)
    columns = 64 if is_few else 128
    if not has_large_shared_memory(device):
        return Tiling(2, columns, 3, 8)
    if rows <= 32:
        return Tiling(4, columns, 5, 4 if is_few else 8)
    return Tiling(3, columns, 4, 8)
