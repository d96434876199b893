"""Routing of a mixture of experts: which experts each token goes to, and which tokens each expert gets.

A pair is a token and one of its experts. Its id is token * num_experts_per_tok + choice. `plan_tiles` sorts the pairs
by expert and cuts them into tiles of one expert each. Only the device learns how many tiles there are. A kernel over
tiles is launched for the most that there can be, and the programs that have none exit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import wait_for_inputs
from nanoinfer.ops.routing import spec

MIN_CHUNK, MAX_CHUNK = 128, 2048  # pairs that a program sorts at a time
SEGMENT = 8192  # pairs that a program looks through; more are counted in segments first
# Segments whose counts a program looks up, if there are several: as many for all steps of 2**18 pairs or fewer, so that
# these run one kernel, which is compiled once.
MIN_SEGMENTS = 32
MANY_EXPERTS = 256  # for more, the pairs are counted once, and not by the program of each expert
MIN_BINS = 32  # of a histogram: one for each thread of a warp
EPS = tl.constexpr(spec.EPS)
SMALLEST = tl.constexpr(-(2**31))  # of int32: after all others


@triton.jit
def _in_order(x):
    """Return integers in the order of float32 values. A warp reduces integers by one instruction."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _of_expert(x, is_it):
    """Return the value of one expert, float32."""
    return tl.sum(tl.where(is_it, x.to(tl.int32, bitcast=True), 0), axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _route_kernel(
    terms_ptr,
    bias_ptr,  # None: there is none
    expert_scales_ptr,  # None: weights are not multiplied by a scale of their expert
    row_mask_ptr,  # None: all rows have tokens
    expert_ids_ptr,
    weights_ptr,
    term_stride,
    row_stride,
    scaling_factor,  # of the weights
    num_terms: tl.constexpr,
    num_experts: tl.constexpr,
    num_choices: tl.constexpr,
    SIGMOID: tl.constexpr,  # scores are sigmoids, whose order alone the bias changes; else a softmax with the bias
    NORMALISED: tl.constexpr,
    SHARED: tl.constexpr,  # whether an expert for all tokens, num_experts, is appended to the choices
    GATED: tl.constexpr,  # whether the terms have a column for it, whose sigmoid is its weight; else that is 1
    EXPERTS: tl.constexpr,  # num_experts, padded
    CHOICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    is_expert = expert < num_experts
    bias = tl.zeros((EXPERTS,), tl.float32)
    if bias_ptr is not None:  # before the wait: no kernel writes it
        bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    if expert_scales_ptr is not None:
        expert_scales = tl.load(expert_scales_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    logits = tl.where(is_expert, 0.0, float("-inf"))
    gate = 0.0
    for term in tl.static_range(num_terms):
        row_ptr = terms_ptr + term * term_stride + row.to(tl.int64) * row_stride
        logits += tl.load(row_ptr + expert, mask=is_expert, other=0.0).to(tl.float32)
        if GATED:
            gate += tl.load(row_ptr + num_experts).to(tl.float32)
    # One NaN makes all probabilities NaN. They still have to be ordered, and experts that do not exist come last.
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        order = scores + bias
        left = tl.where(is_expert, tl.where(order == order, order, float("inf")), float("-inf"))
    else:
        logits += bias
        exps = tl.exp(logits - tl.max(logits, axis=0))
        scores = exps / tl.sum(exps, axis=0)
        left = tl.where(is_expert, tl.where(scores == scores, scores, 0.0), float("-inf"))
    ids = tl.zeros((CHOICES,), tl.int32)
    weights = tl.zeros((CHOICES,), tl.float32)
    scales = weights
    left = _in_order(left)
    for index in tl.static_range(num_choices):
        best = tl.min(tl.where(left == tl.max(left, axis=0), expert, EXPERTS), axis=0)  # of equal ones the first
        ids = tl.where(choice == index, best, ids)
        weights = tl.where(choice == index, _of_expert(scores, expert == best), weights)
        left = tl.where(expert == best, SMALLEST, left)
        if expert_scales_ptr is not None:
            scales = tl.where(choice == index, _of_expert(expert_scales, expert == best), scales)
    if NORMALISED:
        weights /= tl.sum(weights, axis=0) + EPS
    if expert_scales_ptr is not None:
        weights *= scales
    if SIGMOID:
        weights *= scaling_factor
    if SHARED:
        ids = tl.where(choice == num_choices, num_experts, ids)
        weights = tl.where(choice == num_choices, 1.0 / (1.0 + tl.exp(-gate)) if GATED else 1.0, weights)
    if row_mask_ptr is not None:
        has_token = tl.load(row_mask_ptr + row)
        ids = tl.where(has_token, ids, num_experts + SHARED)
        weights = tl.where(has_token, weights, 0.0)
    width: tl.constexpr = num_choices + SHARED
    tl.store(expert_ids_ptr + row * width + choice, ids, mask=choice < width)
    tl.store(weights_ptr + row * width + choice, weights, mask=choice < width)


@triton.jit
def _count(expert_ids_ptr, start, end, num_experts: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many of the pairs [start, end) each expert has, (BINS,)."""
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(start, end, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        ids = tl.load(expert_ids_ptr + pair, mask=pair < end, other=num_experts)
        counts += tl.histogram(ids, BINS, mask=ids < num_experts)
    return counts


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    expert_ids_ptr,
    counts_ptr,
    num_pairs,
    num_experts: tl.constexpr,
    SEGMENT: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Count the pairs of each expert in one segment per program."""
    wait_for_inputs(OVERLAP)
    start = tl.program_id(0) * SEGMENT
    counts = _count(expert_ids_ptr, start, tl.minimum(start + SEGMENT, num_pairs), num_experts, BINS, CHUNK)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_pairs"])
def _plan_kernel(
    expert_ids_ptr,
    counts_ptr,  # (num_segments, BINS); None where there is one segment
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,  # pairs that a program looks through
    SEGMENTS: tl.constexpr,  # how many there are, padded
    BINS: tl.constexpr,  # num_experts, padded
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the pairs of one expert in one segment per program, after those before. The last expert is none."""
    expert, segment = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(OVERLAP)
    bins = tl.arange(0, BINS)
    start = segment * SEGMENT
    if counts_ptr is None:
        counts = _count(expert_ids_ptr, 0, num_pairs, num_experts, BINS, CHUNK)
        counts_before = tl.zeros_like(counts)
    else:
        line = tl.arange(0, SEGMENTS)[:, None]
        is_segment = line < tl.num_programs(1)
        all_counts = tl.load(counts_ptr + line * BINS + bins[None, :], mask=is_segment, other=0)
        counts = tl.sum(all_counts, axis=0)
        counts_before = tl.sum(tl.where(line < segment, all_counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < expert, tl.cdiv(counts, TILE), 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    num_before = tl.sum(tl.where(bins == expert, counts_before, 0), axis=0)
    if expert == num_experts:
        count = num_pairs - tl.sum(counts, axis=0)
        num_before = tl.minimum(start, num_pairs) - tl.sum(counts_before, axis=0)
    num_tiles = tl.cdiv(count, TILE)
    if segment == 0:
        if expert == num_experts:
            tl.store(num_tiles_ptr, first_tile + num_tiles)
        for first in range(0, num_tiles, CHUNK):
            tile = first + tl.arange(0, CHUNK)
            tl.store(tile_experts_ptr + first_tile + tile, tl.zeros_like(tile) + expert, mask=tile < num_tiles)
        padding = count + tl.arange(0, TILE)
        end = num_tiles * TILE
        tl.store(pairs_ptr + first_tile * TILE + padding, tl.zeros_like(padding) + num_pairs, mask=padding < end)
    position = first_tile * TILE + num_before
    if count > 0:
        for first in range(start, tl.minimum(start + SEGMENT, num_pairs), CHUNK):
            pair = first + tl.arange(0, CHUNK)
            ids = tl.load(expert_ids_ptr + pair, mask=pair < num_pairs, other=-1)
            is_mine = (ids == expert).to(tl.int32)
            tl.store(pairs_ptr + position + tl.cumsum(is_mine, axis=0) - 1, pair, mask=is_mine != 0)
            position += tl.sum(is_mine, axis=0)


@triton.jit
def tile_pairs(pairs_ptr, tile, num_pairs, ROWS: tl.constexpr):
    """Return the pairs of a tile; beyond its last pair, num_pairs."""
    row = tl.arange(0, ROWS)
    # Without a list, the tile has one pair, of its own number.
    return tl.where(row == 0, tile, num_pairs) if pairs_ptr is None else tl.load(pairs_ptr + tile * ROWS + row)


@triton.jit
def row_of_result(pair, num_pairs, num_choices: tl.constexpr):
    """Return the row of each pair's result, which lie by choice, then by token."""
    return (pair % num_choices).to(tl.int64) * (num_pairs // num_choices) + pair // num_choices


class TilePlan(NamedTuple):
    """Lists the pairs of a token and an expert by expert, in tiles of equal size."""

    # (max_tiles * tile_size,) int32: the pairs of each tile; beyond its last pair, num_pairs. None: tile i has pair i.
    pairs: Tensor | None
    tile_experts: Tensor  # (max_tiles,) int32: the expert of each tile; num_experts for pairs without an expert
    num_tiles: Tensor | None  # (1,) int32: what lies beyond is undefined. None: there are max_tiles.
    tile_size: int

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """What kernels are given."""
        return self.pairs, self.tile_experts, self.num_tiles


def route(terms, num_experts_per_tok, norm_topk_prob, row_mask=None, bias=None, shared_expert=None, expert_scales=None):
    return _route(
        terms, bias, num_experts_per_tok, norm_topk_prob, row_mask, shared_expert, expert_scales=expert_scales
    )


def route_by_sigmoid(
    terms, bias, num_experts_per_tok, norm_topk_prob, scaling_factor, row_mask=None, shared_expert=None
):
    return _route(terms, bias, num_experts_per_tok, norm_topk_prob, row_mask, shared_expert, scaling_factor)


def _route(terms, bias, num_choices, is_normalised, row_mask, shared_expert, scaling_factor=None, expert_scales=None):
    """Launch the kernel. scaling_factor: of weights that are sigmoids; None where they come of a softmax."""
    num_terms, num_rows, num_columns = terms.shape
    has_shared = shared_expert is not None
    num_experts = shared_expert if has_shared else num_columns
    width = num_choices + has_shared
    assert terms.stride(2) == 1, f"the rows of terms must be contiguous, strides {terms.stride()}"
    expert_ids = terms.new_empty((num_rows, width), dtype=torch.int32)
    weights = terms.new_empty((num_rows, width), dtype=torch.float32)
    if num_rows > 0:
        _route_kernel[(num_rows,)](
            terms,
            bias,
            expert_scales,
            row_mask,
            expert_ids,
            weights,
            terms.stride(0),
            terms.stride(1),
            1.0 if scaling_factor is None else scaling_factor,
            num_terms=num_terms,
            num_experts=num_experts,
            num_choices=num_choices,
            SIGMOID=scaling_factor is not None,
            NORMALISED=is_normalised,
            SHARED=has_shared,
            GATED=num_columns > num_experts,
            EXPERTS=next_power_of_2(num_experts),
            CHOICES=next_power_of_2(width),
            num_warps=1,
            **overlap_options(terms.device),
        )
    return expert_ids, weights


def tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Return how many pairs a tile has: half more than an expert gets on average, so most experts have one tile."""
    if dtype == torch.float32:
        return 16
    return min(128, max(16, next_power_of_2(3 * num_pairs // (2 * num_experts))))


def max_tiles(num_pairs: int, num_experts: int, tile_size: int) -> int:
    """Return the most tiles that there can be: the pairs without an expert, if any, have tiles of their own.

    The first pair of each expert opens a tile, and so does every further `tile_size` of its pairs.
    """
    num_opened = min(num_pairs, num_experts + 1)
    return num_opened + (num_pairs - num_opened) // tile_size


def plan_tiles(expert_ids: Tensor, num_experts: int, tile_size: int) -> TilePlan:
    """Sort all pairs by expert into tiles. expert_ids: as `route` returns them, contiguous."""
    num_pairs = expert_ids.numel()
    if len(expert_ids) == 1:  # the experts of one token differ, so nothing needs to be sorted
        return TilePlan(None, expert_ids.view(-1), None, tile_size)
    num_slots = max_tiles(num_pairs, num_experts, tile_size)
    pairs, tile_experts, num_tiles = (expert_ids.new_empty(size) for size in (num_slots * tile_size, num_slots, 1))
    plan = TilePlan(pairs, tile_experts, num_tiles, tile_size)
    num_segments = ceil_div(num_pairs, SEGMENT)
    bins = max(MIN_BINS, next_power_of_2(num_experts))
    is_counted = num_segments > 1 or num_experts > MANY_EXPERTS
    counts = expert_ids.new_empty(num_segments, bins) if is_counted else None
    common: dict[str, Any] = {
        "num_experts": num_experts,
        "SEGMENT": SEGMENT,
        "BINS": bins,
        "CHUNK": min(MAX_CHUNK, max(MIN_CHUNK, next_power_of_2(num_pairs))),
        "num_warps": 4,
        **overlap_options(expert_ids.device),
    }
    if counts is not None:
        _count_kernel[(num_segments,)](expert_ids, counts, num_pairs, **common)
    _plan_kernel[(num_experts + 1, num_segments)](
        expert_ids,
        counts,
        *plan.tensors,
        num_pairs,
        TILE=tile_size,
        SEGMENTS=1 if num_segments == 1 else max(MIN_SEGMENTS, next_power_of_2(num_segments)),
        **common,
    )
    return plan
