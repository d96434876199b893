"""What an all-reduce by copy engines leaves to kernels: the ranks meet, and each adds up its rows.

See `distributed/copy_engines.py`. Both run beside matrix products. Smaller blocks than these slow products down more.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _meet_kernel(flags_ptr, flag_addresses_ptr, epoch_ptr, rank: tl.constexpr, num_ranks: tl.constexpr):
    ranks = tl.arange(0, num_ranks)
    flags_of_all = tl.load(flag_addresses_ptr + ranks).to(tl.pointer_type(tl.int64))
    epoch = tl.load(epoch_ptr) + 1
    tl.store(epoch_ptr, epoch)
    # A maximum, since a plain store might undo `SharedGpuMemory.release`.
    tl.atomic_max(flags_of_all + rank, epoch, sem="release", scope="sys")
    while tl.min(tl.atomic_add(flags_ptr + ranks, 0, sem="acquire", scope="sys"), axis=0) < epoch:
        pass


@triton.jit
def _add_parts_kernel(rows_ptr, parts_ptr, sums_ptr, size, part_size, num_parts: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < size
    total = tl.load(rows_ptr + entry, mask=mask).to(tl.float32)
    for part in tl.static_range(num_parts):
        # Bypass the L1 cache, which is not coherent with what other GPUs write.
        x = tl.load(parts_ptr + part * part_size + entry, mask=mask, cache_modifier=".cg")
        total += x.to(tl.float32)
    total = total.to(rows_ptr.dtype.element_ty)
    tl.store(rows_ptr + entry, total, mask=mask)
    tl.store(sums_ptr + entry, total, mask=mask)


def meet(flags: Tensor, flag_addresses: Tensor, epoch: Tensor, rank: int) -> None:
    """Announce the next epoch to all ranks, and make the stream wait until all have announced it to this one.

    flags: (num_ranks,) int64, of a power of two of ranks. flag_addresses: likewise, of each rank's flags. epoch: (1,)
    int64, the last one.
    """
    _meet_kernel[(1,)](flags, flag_addresses, epoch, rank, len(flag_addresses), num_warps=1)


def add_parts(rows: Tensor, parts: Tensor, sums: Tensor) -> None:
    """Add to `rows`, (num_rows, hidden_size), the first entries of each of the parts; leave the same in `sums`.

    parts: (num_parts, part_size). sums: (part_size,). All are added up in float32.
    """
    grid = (triton.cdiv(rows.numel(), BLOCK),)
    _add_parts_kernel[grid](rows, parts, sums, rows.numel(), parts.stride(0), len(parts), BLOCK, num_warps=8)
