"""All-reduce, residual addition and RMSNorm in one kernel: a custom all-reduce over NVLink for steps of few tokens.

The ranks' buffers come from
`distributed/symmetric_memory.py`, which also says why two sets of them are enough. There are two variants, as in the
custom all-reduce kernels of TensorRT-LLM and vLLM:

- one-shot: each rank sends its partial sums of all rows to every rank, and normalises all rows for itself.
- two-shot: row r is owned by rank r % num_ranks. The partial sums go to the owner only (reduce-scatter), and it sends
  the normalised row to every rank (all-gather). With more than two ranks this moves fewer bytes, and takes a second
  trip. The residual of a row is up to date on its owner only. That is enough, because all all-reduces of a forward pass
  have the same number of tokens and so the same owners.

Nothing is signalled. The numbers themselves say that they have come: a place holds -0.0 until then, and -0.0 is sent as
0.0. (NCCL's low-latency protocol, and TensorRT-LLM's kernels named after Lamport, work in this way.)

The kernels of different ranks wait for each other by spinning, which cannot deadlock. A program sends its part before
it waits, and waits only for the others' programs of the same row. Where a GPU does not run all programs at once, it
starts them in the order of their rows, so the lowest unfinished row can always be computed.
"""

import triton
import triton.language as tl

from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.symmetric_buffers import empty_bits
from nanoinfer.ops.norms.triton import normalised, num_warps


@triton.jit
def _send(row_ptr, numbers, column, mask, EMPTY: tl.constexpr):
    bits = numbers.to(row_ptr.dtype.element_ty, bitcast=True)
    tl.store(row_ptr + column, tl.where(bits == EMPTY, 0, bits), mask=mask)


@triton.jit
def _receive(ptrs, released_ptr, mask, dtype: tl.constexpr, EMPTY: tl.constexpr):
    """Wait until all of these numbers have come, or nobody may come any more, and leave their places empty."""
    bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    while tl.max(((bits == EMPTY) & (tl.load(released_ptr, volatile=True) == 0)).to(tl.int32)) != 0:
        bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    tl.store(ptrs, tl.full(bits.shape, EMPTY, bits.dtype), mask=mask)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _all_reduce_add_rms_norm_kernel(
    x_ptr,
    parts_ptrs,  # tuples with one pointer per rank
    outputs_ptrs,
    released_ptr,
    residual_ptr,
    weight_ptr,
    sum_weight_ptr,  # None, unless the sum is normalised by itself before the addition
    out_ptr,
    total_ptr,
    term_stride,
    residual_row_stride,
    part_stride,
    eps,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,  # a power of two
    num_terms: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    EMPTY: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask)
    if sum_weight_ptr is not None:
        sum_weight = tl.load(sum_weight_ptr + column, mask=mask, other=0.0)  # what it scales stays zero beyond `size`
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    wide = tl.zeros((SIZE,), tl.float32)
    for term in tl.static_range(num_terms):
        x = tl.load(x_ptr + term * term_stride + row * size + column, mask=mask, other=0.0)
        wide += x.to(tl.float32)
    part = wide.to(dtype)
    from_here = rank * part_stride + row * size
    if TWO_SHOT:
        owner = row % num_ranks
        if owner != rank:
            for peer in tl.static_range(num_ranks):
                if owner == peer:
                    _send(parts_ptrs[peer] + from_here, part, column, mask, EMPTY)
            out = _receive(outputs_ptrs[rank] + row * size + column, released_ptr, mask, dtype, EMPTY)
            tl.store(out_ptr + row * size + column, out, mask=mask)
            return
    else:
        for peer in tl.static_range(num_ranks):
            if peer != rank:
                _send(parts_ptrs[peer] + from_here, part, column, mask, EMPTY)
    residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
    peers = tl.arange(0, num_ranks)[:, None]
    received = _receive(
        parts_ptrs[rank] + peers * part_stride + row * size + column[None, :],
        released_ptr,
        (peers != rank) & mask[None, :],
        dtype,
        EMPTY,
    )
    # Own ones stand in their place, so that all ranks add up in the same order, and get the same bits.
    wide = tl.sum(tl.where(peers == rank, part[None, :], received).to(tl.float32), axis=0)
    if sum_weight_ptr is not None:
        wide = normalised(wide.to(dtype).to(tl.float32), sum_weight, size, eps)
        wide = wide.to(dtype).to(tl.float32)
    total = (wide + residual.to(tl.float32)).to(dtype)
    out = normalised(total.to(tl.float32), weight, size, eps).to(dtype)
    if TWO_SHOT:
        for peer in tl.static_range(num_ranks):
            if peer != rank:
                _send(outputs_ptrs[peer] + row * size, out, column, mask, EMPTY)
    tl.store(total_ptr + row * size + column, total, mask=mask)
    tl.store(out_ptr + row * size + column, out, mask=mask)


def all_reduce_add_rms_norm(x, residual, buffers, weight, eps, sum_weight=None):
    num_rows, size = residual.shape
    assert x[0].is_contiguous(), f"the rows of each term must be contiguous, strides {x.stride()}"
    out, total = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    padded_size = next_power_of_2(size)
    _all_reduce_add_rms_norm_kernel[(num_rows,)](
        x,
        buffers.parts,
        buffers.outputs,
        buffers.released,
        residual,
        weight,
        sum_weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        buffers.max_tokens * size,
        eps,
        rank=buffers.rank,
        num_ranks=len(buffers.parts),
        num_terms=len(x),
        size=size,
        SIZE=padded_size,
        EMPTY=empty_bits(residual.dtype),
        TWO_SHOT=buffers.two_shot,
        num_warps=num_warps(padded_size),
        **overlap_options(residual.device),
    )
    return out, total
