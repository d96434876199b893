"""All-reduce, residual addition and RMSNorm in one kernel: a custom all-reduce over NVLink for steps of few tokens.

The PyTorch twin is `all_reduce_add_rms_norm` in `layers/layernorm.py`. The ranks' buffers and flags come from
`distributed/symmetric_memory.py`, which also says why two sets of buffers are enough. There are two variants, as in the
custom all-reduce kernels of TensorRT-LLM and vLLM:

- one-shot: each rank reads every rank's partial sums of all rows, and normalises all rows for itself.
- two-shot: row r is owned by rank r % num_ranks. Only the owner reads the partial sums (reduce-scatter), and it writes
  the normalised row into every rank's output buffer (all-gather). With more than two ranks this moves fewer bytes, and
  costs a second signal. The residual of a row is up to date on its owner only. That is enough, because all all-reduces
  of a forward pass have the same number of tokens and so the same owners.

The kernels of different ranks wait for each other by spinning on flags, which cannot deadlock. A program waits for the
first program of each rank, and in two-shot for the owner's program of the same row. A large GPU runs all programs at
once. A smaller one starts them in the order of their rows, so the lowest unfinished row can always be computed.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import next_power_of_2
from nanoinfer.kernels.programmatic_launch import overlap_options
from nanoinfer.kernels.rms_norm import normalised, num_warps
from nanoinfer.kernels.symmetric_buffers import SymmetricBuffers


@triton.jit
def _wait(flag_ptrs, epoch):
    """Spin until all of these flags of this rank have reached `epoch`."""
    while tl.min(tl.atomic_add(flag_ptrs, 0, sem="acquire", scope="sys"), axis=0) < epoch:
        pass
    tl.debug_barrier()  # one thread looked at a flag, for all


@triton.jit
def _all_reduce_add_rms_norm_kernel(
    input_ptrs,  # tuples with one pointer per rank
    output_ptrs,
    flags_ptr,
    flag_addresses_ptr,
    epochs_ptr,
    residual_ptr,
    weight_ptr,
    sum_weight_ptr,  # None, unless the sum is normalised by itself before the addition
    total_ptr,
    residual_row_stride,
    eps,
    rank: tl.constexpr,
    buffer_index: tl.constexpr,
    num_ranks: tl.constexpr,  # a power of two
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    TWO_SHOT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask)
    if sum_weight_ptr is not None:
        sum_weight = tl.load(sum_weight_ptr + column, mask=mask, other=0.0)  # what it scales stays zero beyond `size`
    # One thread per rank, so that all ranks are signalled, or waited for, at the same time.
    ranks = tl.arange(0, num_ranks)
    flags_of_all = tl.load(flag_addresses_ptr + ranks).to(tl.pointer_type(tl.int64))
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    epoch = tl.load(epochs_ptr + 1 - buffer_index) + 1
    if row == 0:  # on behalf of all rows: the matrix product before this kernel is complete
        tl.store(epochs_ptr + buffer_index, epoch)
        # A maximum, since a plain store might undo `SymmetricMemory.release`.
        tl.atomic_max(flags_of_all + rank, epoch, sem="release", scope="sys")
    if TWO_SHOT and row % num_ranks != rank:
        _wait(flags_ptr + num_ranks + row + tl.arange(0, 1), epoch)
        return
    residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
    _wait(flags_ptr + ranks, epoch)
    wide = tl.zeros((SIZE,), tl.float32)
    for peer in tl.static_range(num_ranks):  # in the same order on all ranks, so that they get the same bits
        # Bypass the L1 cache, which is not coherent with what other GPUs write.
        x = tl.load(input_ptrs[peer] + row * size + column, mask=mask, other=0.0, cache_modifier=".cg")
        wide += x.to(tl.float32)
    if sum_weight_ptr is not None:
        wide = normalised(wide.to(residual.dtype).to(tl.float32), sum_weight, size, eps)
        wide = wide.to(residual.dtype).to(tl.float32)
    total = (wide + residual.to(tl.float32)).to(residual.dtype)
    tl.store(total_ptr + row * size + column, total, mask=mask)
    out = normalised(total.to(tl.float32), weight, size, eps)
    for peer in tl.static_range(num_ranks):
        if TWO_SHOT or peer == rank:
            tl.store(output_ptrs[peer] + row * size + column, out, mask=mask)
    if TWO_SHOT:
        tl.debug_barrier()  # all threads have stored before one of them signals
        tl.atomic_max(flags_of_all + num_ranks + row, epoch, sem="release", scope="sys")


def all_reduce_add_rms_norm(
    residual: Tensor, buffers: SymmetricBuffers, weight: Tensor, eps: float, sum_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All-reduce the ranks' partial sums, add the residual, and return the RMSNorm of the total, and the total.

    Every rank must call it with the same number of tokens and the same variant. The norm is returned in
    `buffers.output`. In two-shot the total holds only the rows that this rank owns.

    residual: (num_tokens, size), like `buffers.input`. weight: (size,). All have the same dtype, except that weight may
    be in float32. sum_weight: like weight, of a norm of the sum by itself before the residual is added; None for none.
    """
    num_rows, size = residual.shape
    total = residual.new_empty(residual.shape)
    padded_size = next_power_of_2(size)
    _all_reduce_add_rms_norm_kernel[(num_rows,)](
        buffers.inputs,
        buffers.outputs,
        buffers.flags,
        buffers.flag_addresses,
        buffers.epochs,
        residual,
        weight,
        sum_weight,
        total,
        residual.stride(0),
        eps,
        rank=buffers.rank,
        buffer_index=buffers.index,
        num_ranks=len(buffers.inputs),
        size=size,
        SIZE=padded_size,
        TWO_SHOT=buffers.two_shot,
        num_warps=num_warps(padded_size),
        **overlap_options(residual.device),
    )
    return buffers.output, total
