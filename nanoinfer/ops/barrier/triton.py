"""A barrier for the GPUs of all ranks that runs beside matrix products: see `CopyEngines`. It has no specification.

One warp with few registers finds room where a matrix product takes almost all of a multiprocessor. What needs more
would wait until the product ends.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _barrier_kernel(flags_ptr, flag_addresses_ptr, epoch_ptr, rank: tl.constexpr, num_ranks: tl.constexpr):
    ranks = tl.arange(0, num_ranks)
    flags_of_all = tl.load(flag_addresses_ptr + ranks).to(tl.pointer_type(tl.int64))
    epoch = tl.load(epoch_ptr) + 1
    tl.store(epoch_ptr, epoch)
    # A maximum, since a plain store might undo `SharedGpuMemory.release`.
    tl.atomic_max(flags_of_all + rank, epoch, sem="release", scope="sys")
    while tl.min(tl.atomic_add(flags_ptr + ranks, 0, sem="acquire", scope="sys"), axis=0) < epoch:
        pass


def barrier(flags: Tensor, flag_addresses: Tensor, epoch: Tensor, rank: int) -> None:
    """Announce the next epoch to all ranks, and make the stream wait until all have announced it to this one.

    flags: (num_ranks,) int64; num_ranks is a power of two. flag_addresses: (num_ranks,) int64, where each rank's flags
    lie. epoch: (1,) int64, the last epoch that this rank has announced.
    """
    _barrier_kernel[(1,)](flags, flag_addresses, epoch, rank, len(flag_addresses), num_warps=1)
