"""The sum of all ranks' parts of each row, the residual's addition to it, and its RMSNorm, in one kernel on every rank.

In one shot each rank reads all ranks' parts of all rows. In two, rank t % num_ranks owns row t: it alone reads the
parts, and writes the normed row into all ranks' memory. Between more than two ranks that moves less, and takes a second
signal. The owner alone keeps its rows of the residual up to date, which is enough: all sums of a forward pass are of as
many tokens, so they have the same owners, and the first residual is complete everywhere.

Owners wait for nothing but the first program of each rank, and the others for an owner's program of the same row. A
large GPU has room for all programs at once; on a smaller one they start in the order of their rows, so that the lowest
row that is not done can always be computed.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.distributed.symmetric_memory import RankSums
from nanoinfer.kernels.programmatic_launch import overlap_options
from nanoinfer.kernels.rms_norm import normalised, num_warps


@triton.jit
def _wait(flag_ptrs, num_sums):
    """Until all of these flags, of this rank's, have come to `num_sums`."""
    while tl.min(tl.atomic_add(flag_ptrs, 0, sem="acquire", scope="sys"), axis=0) < num_sums:
        pass
    tl.debug_barrier()  # one thread looked at a flag, for all


@triton.jit
def _sum_ranks_kernel(
    part_ptrs,  # tuples, with an item for each rank
    out_ptrs,
    flags_ptr,
    flag_addresses_ptr,
    num_sums_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    residual_row_stride,
    eps,
    rank: tl.constexpr,
    turn: tl.constexpr,
    num_ranks: tl.constexpr,  # a power of two
    size: tl.constexpr,
    SIZE: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask)
    # A thread for each rank, so that all are told, or waited for, at the same time.
    ranks = tl.arange(0, num_ranks)
    flags_of_all = tl.load(flag_addresses_ptr + ranks).to(tl.pointer_type(tl.int64))
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    num_sums = tl.load(num_sums_ptr + 1 - turn) + 1
    if row == 0:  # for all: this rank's product is complete
        tl.store(num_sums_ptr + turn, num_sums)
        # Not an exchange: that might undo `SymmetricMemory.release`.
        tl.atomic_max(flags_of_all + rank, num_sums, sem="release", scope="sys")
    if TWO_SHOT and row % num_ranks != rank:
        _wait(flags_ptr + num_ranks + row + tl.arange(0, 1), num_sums)
        return
    residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
    _wait(flags_ptr + ranks, num_sums)
    wide = tl.zeros((SIZE,), tl.float32)
    for peer in tl.static_range(num_ranks):  # in the same order on all ranks, so that they have the same sum
        # Not by way of the L1 cache, which does not see what other GPUs write.
        x = tl.load(part_ptrs[peer] + row * size + column, mask=mask, other=0.0, cache_modifier=".cg")
        wide += x.to(tl.float32)
    total = (wide + residual.to(tl.float32)).to(residual.dtype)
    tl.store(total_ptr + row * size + column, total, mask=mask)
    out = normalised(total.to(tl.float32), weight, size, eps)
    for peer in tl.static_range(num_ranks):
        if TWO_SHOT or peer == rank:
            tl.store(out_ptrs[peer] + row * size + column, out, mask=mask)
    if TWO_SHOT:
        tl.debug_barrier()  # what all threads stored comes before the news of it
        tl.atomic_max(flags_of_all + num_ranks + row, num_sums, sem="release", scope="sys")


def sum_ranks_add_rms_norm(residual: Tensor, sums: RankSums, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of all ranks' parts; every rank must call it, for as many tokens, in as many shots.

    residual: (num_tokens, size) as each of the parts. weight: (size,). All of one dtype, the parts contiguous.
    The norm comes in `sums.out`. In two shots x + residual has only the rows that this rank owns.
    """
    num_rows, size = residual.shape
    total = residual.new_empty(residual.shape)
    padded_size = triton.next_power_of_2(size)
    _sum_ranks_kernel[(num_rows,)](
        sums.parts,
        sums.outs,
        sums.flags,
        sums.flag_addresses,
        sums.num_sums,
        residual,
        weight,
        total,
        residual.stride(0),
        eps,
        rank=sums.rank,
        turn=sums.turn,
        num_ranks=len(sums.parts),
        size=size,
        SIZE=padded_size,
        TWO_SHOT=sums.two_shot,
        num_warps=num_warps(padded_size),
        **overlap_options(residual.device),
    )
    return sums.out, total
