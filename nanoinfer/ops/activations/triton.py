"""Gated activations, and the gate of a shared expert with the sum that it scales: each in one pass over memory.

GELU after a product is no pass at all: the library that multiplies does it with what it has in registers.
"""

import torch
import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import gated, wait_for_inputs
from nanoinfer.ops.fp8.triton import MAX_TILE, store_rounded, tile_of_row
from nanoinfer.ops.norms.triton import num_warps


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,  # of the result in FP8; None, if it is not rounded
    static_scale_ptr,
    wide_ptr,  # of the result before it is rounded; None, if nobody reads it
    row_stride,
    num_groups,
    size,
    width,  # how many outputs each program has
    GELU: tl.constexpr,
    ERF: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * width
    end = tl.minimum(first + width, size)
    column = first + tl.arange(0, TILE)
    mask = column < end
    wait_for_inputs(OVERLAP)
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask)
    up = tl.load(gate_up_ptr + row * row_stride + size + column, mask=mask)
    out = gated(gate, up, gate.dtype, GELU, ERF).to(gate.dtype)
    if scales_ptr is None:
        tl.store(out_ptr + row * size + column, out, mask=mask)
    else:
        if wide_ptr is not None:
            tl.store(wide_ptr + row * size + column, out, mask=mask)
        row_scales, out = scales_ptr + row * num_groups, out.to(tl.float32)
        store_rounded(out, first, end, out_ptr + row * size, row_scales, static_scale_ptr, GROUP, TILE)


def silu_and_mul(gate_up, out_format=None):
    return _launch(gate_up, out_format)


def gelu_tanh_and_mul(gate_up, out_format=None):
    return _launch(gate_up, out_format, is_gelu=True)


def gelu_and_mul(gate_up, out_format=None):
    return _launch(gate_up, out_format, is_gelu=True, is_exact=True)


def _launch(gate_up, out_format, is_gelu=False, is_exact=False):
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, f"the rows of gate_up must be contiguous, strides {gate_up.stride()}"
    width = tile = min(MAX_TILE, next_power_of_2(size))
    rows, in_fp8 = None, {"num_groups": 1, "GROUP": None}
    if out_format is not None:
        assert out_format.group_size or out_format.scale is not None, "no program holds a row to find its largest value"
        rows = out_format.empty_rows(gate_up, size)
        width, tile = tile_of_row(size, out_format)
        in_fp8 = {"num_groups": rows.scales.shape[1], "GROUP": out_format.group_size}
    out = gate_up.new_empty(num_tokens, size) if rows is None else rows.values
    if num_tokens > 0:
        _gated_activation_kernel[(num_tokens, ceil_div(size, width))](
            gate_up,
            out,
            None if rows is None else rows.scales,
            None if out_format is None else out_format.scale,
            None if rows is None else rows.wide,
            gate_up.stride(0),
            size=size,
            width=width,
            TILE=tile,
            GELU=is_gelu,
            ERF=is_exact,
            **in_fp8,
            **overlap_options(gate_up.device),
        )
    return out if rows is None else rows


@triton.jit
def _gelu_times_kernel(
    gate_ptr,
    factors_ptr,
    out_ptr,
    gate_row_stride,
    factors_row_stride,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    wait_for_inputs(OVERLAP)
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask)
    factors = tl.load(factors_ptr + row * factors_row_stride + column, mask=mask)
    out = gated(gate, factors, gate.dtype, True).to(gate.dtype)
    tl.store(out_ptr + row * size + column, out, mask=mask)


def gelu_tanh_times(gate, factors):
    num_tokens, size = gate.shape
    for name, tensor in (("gate", gate), ("factors", factors)):
        assert tensor.stride(1) == 1, f"the rows of {name} must be contiguous, strides {tensor.stride()}"
    out = gate.new_empty(num_tokens, size)
    padded_size = next_power_of_2(size)
    if num_tokens > 0:
        _gelu_times_kernel[(num_tokens,)](
            gate,
            factors,
            out,
            gate.stride(0),
            factors.stride(0),
            size=size,
            SIZE=padded_size,
            num_warps=num_warps(padded_size),
            **overlap_options(gate.device),
        )
    return out


@triton.jit
def _sigmoid_and_mul_kernel(
    x_ptr,
    gates_ptr,
    out_ptr,
    x_row_stride,
    term_stride,
    term_row_stride,
    size,
    num_terms: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < size
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask).to(tl.float32)
    gate = tl.zeros((TILE,), tl.float32)
    for term in tl.static_range(num_terms):
        gate += tl.load(gates_ptr + term * term_stride + row * term_row_stride + column, mask=mask).to(tl.float32)
    # Rounded, as kernels of their own would leave the gate and its sigmoid.
    sigmoid = (1.0 / (1.0 + tl.exp(-gate.to(dtype).to(tl.float32)))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (x * sigmoid).to(dtype), mask=mask)


def sigmoid_and_mul(x, gates):
    (num_tokens, size), terms = x.shape, gates if gates.dim() == 3 else gates.unsqueeze(0)
    for name, tensor in (("x", x), ("gates", gates)):
        assert tensor.stride(-1) == 1, f"the rows of {name} must be contiguous, strides {tensor.stride()}"
    out, tile = x.new_empty(num_tokens, size), min(MAX_TILE, next_power_of_2(size))
    if num_tokens > 0:
        _sigmoid_and_mul_kernel[(num_tokens, ceil_div(size, tile))](
            x,
            gates,
            out,
            x.stride(0),
            terms.stride(0),
            terms.stride(1),
            size,
            num_terms=len(terms),
            TILE=tile,
            **overlap_options(x.device),
        )
    return out


@triton.jit
def _gated_sum_kernel(
    terms_ptr,
    hidden_ptr,
    gate_weight_ptr,
    out_ptr,
    term_stride,
    term_row_stride,
    hidden_row_stride,
    num_terms: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(gate_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)  # no kernel writes it
    wait_for_inputs(OVERLAP)
    hidden = tl.load(hidden_ptr + row * hidden_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-tl.sum(hidden * weight, axis=0)))
    total = tl.zeros((SIZE,), tl.float32)
    for term in tl.static_range(num_terms):
        term_ptrs = terms_ptr + term * term_stride + row * term_row_stride + column
        total += tl.load(term_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, (total * gate).to(out_ptr.dtype.element_ty), mask=mask)


def gated_sum(terms, hidden, gate_weight):
    num_terms, num_tokens, size = terms.shape
    for name, tensor in (("terms", terms), ("hidden", hidden), ("gate_weight", gate_weight)):
        assert tensor.stride(-1) == 1, f"the rows of {name} must be contiguous, strides {tensor.stride()}"
    out = hidden.new_empty(1, num_tokens, size)
    padded_size = next_power_of_2(size)
    if num_tokens > 0:
        _gated_sum_kernel[(num_tokens,)](
            terms,
            hidden,
            gate_weight,
            out,
            terms.stride(0),
            terms.stride(1),
            hidden.stride(0),
            num_terms=num_terms,
            size=size,
            SIZE=padded_size,
            num_warps=num_warps(padded_size),
            **overlap_options(terms.device),
        )
    return out


def linear_gelu_tanh(x, weight, bias):
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
