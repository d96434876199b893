"""The experts' MLPs as two grouped matrix products. `spec.py` explains pairs and tiles, with an example.

`expert_mlp` launches

1. `plan_tiles` (`ops/routing`), which sorts the pairs into tiles of one expert each.
2. `grouped_product` with gate_up: a program multiplies the tokens of a tile by some columns of their expert's weight,
   and activates the result. Each program has a column of the gate next to the same column of up, so one thread holds
   both. The result is (num_pairs, inner_size).
3. `grouped_product` with down: as before, on the pairs' rows of that result. It multiplies each by the pair's weight,
   and writes it to where the specification has it.

Rows are gathered where they are read, and nothing is copied into order. How a product is cut depends on its size:

- Decode is bound by reading the weights of the chosen experts. Most experts then have few tokens: one tile of 16 rows,
  so that each weight is read once. The columns are cut so narrow that one token keeps all multiprocessors busy.
- Prefill is bound by the tensor cores, and has tiles of 128 rows. On Hopper it has a kernel of its own (`hopper.py`).
- Weights in 4 bits are read as such by tiles of up to 64 rows (`ops/int4`, and on Hopper `hopper_int4.py`). For so many
  pairs that larger tiles pay, they are widened first: those in int4, and on Hopper those in MXFP4.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import has_hopper_kernels, has_large_shared_memory, num_multiprocessors
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import gated
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.experts.triton_fp8 import fp8_expert_mlp as fp8_expert_mlp
from nanoinfer.ops.int4.triton import WORDS, int4_tile_product, widen
from nanoinfer.ops.routing.triton import TilePlan, plan_tiles, row_of_result, tile_pairs, tile_rows

GEGLU = tl.constexpr(2)  # where True stands for SwiGLU


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
def _grouped_product_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # None: there is none, and SwiGLU is not clamped
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    pair_weights_ptr,  # None, if GATED
    out_ptr,
    x_row_stride,  # None, unless GATED: depth
    limit,
    alpha,
    num_pairs,
    num_choices: tl.constexpr,
    num_experts: tl.constexpr,
    num_rows: tl.constexpr,  # of an expert's weight
    depth: tl.constexpr,
    num_groups: tl.constexpr,
    E2M1: tl.constexpr,
    # True or GEGLU: x has the rows of tokens, and the weight those of gate and up. False: x has those of pairs.
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(1)
    # The second product need not wait for its plan: the first one began when that was complete.
    if OVERLAP and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.num_programs(1) if num_tiles_ptr is None else tl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    expert = tl.load(tile_experts_ptr + tile)
    if GATED:  # noqa: SIM102  # a constant alone chooses the code
        if expert == num_experts:
            return
    pair = tile_pairs(pairs_ptr, tile, num_pairs, ROWS)
    is_pair = pair < num_pairs
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if not GATED:
        pair_weight = tl.load(pair_weights_ptr + pair, mask=is_pair, other=0.0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = column
    if GATED:  # a column of the gate, the same column of up, and so on
        weight_row = column // 2 + column % 2 * (num_rows // 2)
    else:
        out_row = row_of_result(pair, num_pairs, num_choices)
        out_ptrs = out_ptr + out_row[:, None] * num_rows + column[None, :]
        out_mask = is_pair[:, None] & (column < num_rows)[None, :]
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if expert == num_experts:
            tl.store(out_ptrs, tl.zeros((ROWS, COLUMNS), dtype), mask=out_mask)
            return
    acc = _tile_product(
        x_ptr,
        (weight_ptr, scales_ptr, zeros_ptr),
        pair // num_choices if GATED else pair,
        is_pair,
        expert,
        weight_row,
        x_row_stride if GATED else depth,
        num_rows,
        depth,
        num_groups,
        E2M1,
        DEPTH,
        STAGES,
        ASM,
    )
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * num_rows + weight_row
        acc += tl.load(bias_ptrs, mask=column < num_rows, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS // 2, 2)))
        out = gated(gate, up, dtype, GATED == GEGLU) if bias_ptr is None else _clamped(gate, up, limit, alpha, dtype)
        column = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        out_ptrs = out_ptr + pair.to(tl.int64)[:, None] * (num_rows // 2) + column[None, :]
        tl.store(out_ptrs, out.to(dtype), mask=is_pair[:, None] & (column < num_rows // 2)[None, :])
    else:
        tl.store(out_ptrs, (acc * pair_weight[:, None]).to(dtype), mask=out_mask)


MAX_INT4_ROWS = 64  # pairs of a tile, at most, whose weight is read in 4 bits
# Pairs of each expert, on average, from which on weights are widened before the products: docs/kernels.md has times.
WIDE_PAIRS_INT4, WIDE_PAIRS_INT4_HOPPER = 250, 500  # by the common kernel, and by Hopper's own
# On Hopper. Unpacking MXFP4 to float16 takes about twice the instructions; its limit is not measured anew.
WIDE_PAIRS_MXFP4 = {torch.bfloat16: 600, torch.float16: 150}


class Tiling(NamedTuple):
    """Says how a grouped product is cut: the tile of a program, and how much of it is read ahead."""

    columns: int  # rows of the weight
    depth: int  # of the inner dimension, at a time
    stages: int
    warps: int


def expert_mlp(hidden, gate_up, down, expert_ids, weights, clamps=None, is_geglu=False):
    tensors = {"gate_up": gate_up.values, "down": down.values, "expert_ids": expert_ids, "weights": weights}
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} must be contiguous, strides {tensor.stride()}"
    assert hidden.stride(1) == 1, f"the rows of hidden must be contiguous, strides {hidden.stride()}"
    num_experts, num_pairs, num_terms = len(down.values), expert_ids.numel(), expert_ids.shape[1]
    if num_pairs == 0:
        return hidden.new_empty(num_terms, *hidden.shape)
    gated = hidden.new_empty(num_pairs, gate_up.values.shape[1] // 2)
    rows = tile_rows(num_pairs, num_experts, hidden.dtype)
    has_int4_kernel = _has_hopper_int4_kernel(hidden, gated, gate_up, down)
    in_4_bits = _reads_4_bits(hidden, gate_up, down, num_pairs, rows, has_int4_kernel)
    if in_4_bits:
        rows = min(MAX_INT4_ROWS, rows)
    plan = plan_tiles(expert_ids, num_experts, rows)
    product = grouped_product
    if in_4_bits and has_int4_kernel:
        from nanoinfer.ops.experts import hopper_int4

        product = hopper_int4.grouped_product
        num_terms *= hopper_int4.num_parts(down, plan, hidden.device)
    elif not in_4_bits and _has_hopper_kernel(hidden, gated.shape[1], rows):
        from nanoinfer.ops.experts import hopper

        product = hopper.grouped_product
    out = hidden.new_empty(num_terms, *hidden.shape)
    # Both weights are widened one after the other, in the same memory.
    glu = GEGLU.value if is_geglu else True
    product(hidden, _held(gate_up, in_4_bits, hidden.dtype), plan, weights, gated, is_gated=glu, clamps=clamps)
    product(gated, _held(down, in_4_bits, hidden.dtype), plan, weights, out, is_gated=False)
    return out


def _reads_4_bits(
    hidden: Tensor, gate_up: ExpertWeights, down: ExpertWeights, num_pairs: int, rows: int, has_int4_kernel: bool
) -> bool:
    """Return whether the kernels read weights in 4 bits; else these are widened first."""
    if gate_up.scales is None or down.scales is None or hidden.dtype == torch.float32:
        return False
    if gate_up.values.shape[2] % WORDS.value or down.values.shape[2] % WORDS.value:  # blocks of fewer than 128 inputs
        return False
    if not gate_up.is_e2m1:
        return num_pairs < (WIDE_PAIRS_INT4_HOPPER if has_int4_kernel else WIDE_PAIRS_INT4) * len(down.values)
    is_few = num_pairs < WIDE_PAIRS_MXFP4[hidden.dtype] * len(down.values)
    return is_few or not _has_hopper_kernel(hidden, gate_up.values.shape[1] // 2, rows)


def _has_hopper_int4_kernel(hidden: Tensor, gated: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> bool:
    """Return whether Hopper's kernel serves weights in 4 bits."""
    if gate_up.scales is None or down.scales is None or not has_hopper_kernels(hidden.device):
        return False
    from nanoinfer.ops.experts import hopper_int4

    return hopper_int4.serves(hidden, gate_up) and hopper_int4.serves(gated, down)


def _has_hopper_kernel(hidden: Tensor, inner_size: int, rows: int) -> bool:
    """Return whether tiles of so many rows have the kernel for Hopper GPUs, which wants weights in 16 bits."""
    if rows < 128 or not has_hopper_kernels(hidden.device):
        return False
    from nanoinfer.ops.experts import hopper

    return hopper.serves(hidden.shape[1], inner_size, hidden.stride(0), hidden.dtype)


def _held(weight: ExpertWeights, in_4_bits: bool, dtype: torch.dtype) -> ExpertWeights:
    """Return a weight as the kernels read it: in 4 bits, or in 16, with what fills up rows in MXFP4."""
    if weight.scales is None:
        return weight
    if not in_4_bits:
        return ExpertWeights(widen(*weight[:3], dtype, weight.is_e2m1), bias=weight.bias)
    # Kernels read the four scales of a block of MXFP4 as one number.
    return weight._replace(scales=weight.scales.view(torch.int32)) if weight.is_e2m1 else weight


def grouped_product(
    x: Tensor,
    weight: ExpertWeights,
    plan: TilePlan,
    pair_weights: Tensor,
    out: Tensor,
    is_gated: bool | int,
    clamps: tuple[float, float] | None = None,
) -> None:
    """Compute one of the two products: multiply the rows of each expert's pairs, as `plan` lists them, by its weight.

    is_gated: True, or GEGLU, for the product with gate_up. Then x is (num_tokens, depth), and out becomes the
    activations, (num_pairs, num_rows / 2), by SwiGLU or GeGLU. False for the product with down. Then x is (num_pairs,
    depth), and out becomes the products times `pair_weights`, (num_choices, num_tokens, num_rows).
    The weight's rows may be longer than those of x. Scales of MXFP4 are those of blocks, int32. clamps: of SwiGLU.
    """
    (num_experts, num_rows), depth, num_slots = weight.values.shape[:2], x.shape[1], len(plan.tile_experts)
    in_4_bits = weight.scales is not None
    tiling = choose_tiling(plan.tile_size, num_slots, num_rows, x.dtype, x.device, in_4_bits)
    if not in_4_bits and weight.values.shape[2] != depth:
        weight = weight._replace(values=weight.values[..., :depth].contiguous())
    _grouped_product_kernel[(ceil_div(num_rows, tiling.columns), num_slots)](
        x,
        *weight[:4],
        *plan.tensors,
        None if is_gated else pair_weights,
        out,
        x.stride(0) if is_gated else None,
        *(clamps or (0.0, 0.0) if is_gated else (None, None)),
        pair_weights.numel(),
        num_choices=pair_weights.shape[1],
        num_experts=num_experts,
        num_rows=num_rows,
        depth=depth,
        num_groups=weight.num_groups,
        E2M1=weight.is_e2m1,
        GATED=is_gated,
        ROWS=plan.tile_size,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        STAGES=tiling.stages,
        ASM=x.is_cuda,
        num_warps=tiling.warps,
        **overlap_options(x.device),
    )


def choose_tiling(
    rows: int, num_tiles: int, num_columns: int, dtype: torch.dtype, device: torch.device, in_4_bits: bool = False
) -> Tiling:
    """Return how to cut a product of `num_tiles` tiles of rows with `num_columns` columns.

    What is read ahead has to fit into shared memory, and the sums into registers. Weights in 4 bits are read in blocks
    of 128 inputs.
    """
    num_programs = num_tiles * ceil_div(num_columns, 64)
    if in_4_bits:
        return Tiling(32, 128, 6, 4) if num_programs < 2 * num_multiprocessors(device) else Tiling(128, 128, 3, 4)
    if dtype == torch.float32:  # for comparisons: tensor cores would round it
        return Tiling(64, 32, 2, 4)
    is_hopper_sized = has_large_shared_memory(device)
    if rows == 128:
        return Tiling(256 if is_hopper_sized else 128, 64, 4, 8)
    if rows == 64:
        return Tiling(128, 64, 4 if is_hopper_sized else 3, 4)
    if num_programs < num_multiprocessors(device):
        return Tiling(32, 128, 6, 4)  # few programs, which together ask for enough bytes at a time
    return Tiling(64, 128, 4, 4)
