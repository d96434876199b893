"""The gate of a shared expert: a product of one output, its sigmoid, and the expert's sum times that, in one pass.

Twin: `layers/shared_expert.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.norms.triton import num_warps


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
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    hidden = tl.load(hidden_ptr + row * hidden_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-tl.sum(hidden * weight, axis=0)))
    total = tl.zeros((SIZE,), tl.float32)
    for term in tl.static_range(num_terms):
        term_ptrs = terms_ptr + term * term_stride + row * term_row_stride + column
        total += tl.load(term_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, (total * gate).to(out_ptr.dtype.element_ty), mask=mask)


def gated_sum(terms: Tensor, hidden: Tensor, gate_weight: Tensor) -> Tensor:
    """Return the sum of the terms times the sigmoid of each token's gate, computed in float32, (1, num_tokens, size).

    terms: (num_terms, num_tokens, size). hidden: (num_tokens, size). gate_weight: (1, size). Rows are contiguous.
    """
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
