"""All-reduces of many tokens by the GPUs' copy engines, in the background of matrix products.

NCCL's kernels run on multiprocessors, which they take from the products beside them. A copy engine moves memory to and
from other GPUs without any. What is left for kernels is to add up, and to wait. docs/performance.md has the times.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.distributed.cuda_ipc import SharedGpuMemory, cuda
from nanoinfer.kernels.copy_engine_all_reduce import add_parts, meet

DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


class CopyEngines(SharedGpuMemory):
    """Sums up the ranks' tensors, one after the other, on a stream of its own.

    Rank r owns a share of the rows. An all-reduce has five steps:
    1. A rank copies the rows that others own into their `parts` (reduce-scatter).
    2. The ranks meet: each waits for a signal of all others.
    3. It adds up its own rows, also into its `sums`.
    4. They meet again.
    5. It copies all other rows from the others' `sums` (all-gather).

    One set of buffers is enough. A rank writes into the parts of another when that one, before step 4, has added up
    those of the all-reduce before. It overwrites its sums after step 2, when all have copied those of the one before.

    shape: (max_tokens, hidden_size) of the largest tensor. The rest is said in `SharedGpuMemory`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        max_tokens, hidden_size = shape
        self._rank, self._others = rank, [(rank + i) % num_ranks for i in range(1, num_ranks)]
        self._share = -(-max_tokens // num_ranks) * hidden_size  # entries
        super().__init__(num_ranks * self._share * dtype.itemsize, num_ranks, rank, num_ranks, all_gather)
        buffers = self.own.view(dtype).view(num_ranks, self._share)
        self._parts, self._sums = buffers[:-1], buffers[-1]
        self._epoch = self.flag_addresses.new_zeros(1)  # how often the ranks have met
        self._stream = torch.cuda.Stream(priority=-1)  # its short kernels go first

    def start(self, x: Tensor) -> torch.cuda.Event:
        """Start to sum up all ranks' `x`, (num_tokens, hidden_size), in its place. Wait for the event before you read.

        There are at least as many tokens as ranks. Keep `x` until then: its memory must not be given to others.
        """
        assert x.is_contiguous(), f"the rows must be contiguous, strides {x.stride()}"
        num_ranks = len(self._others) + 1
        shares, share_bytes = x.tensor_split(num_ranks), self._share * x.itemsize
        to_parts, from_sums = [], []
        for peer in self._others:
            rows, num_bytes, memory = shares[peer].data_ptr(), shares[peer].nbytes, self.addresses[peer]
            part = (self._rank - peer) % num_ranks - 1  # its parts are those of the ranks after it, in their order
            to_parts.append((memory + part * share_bytes, rows, num_bytes))
            from_sums.append((rows, memory + (num_ranks - 1) * share_bytes, num_bytes))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(to_parts)
            self._meet()
            add_parts(shares[self._rank], self._parts, self._sums)
            self._meet()
            self._copy(from_sums)
            done = torch.cuda.Event()
            done.record()
        return done

    def join(self) -> None:
        """Let the current stream wait for all that has been started."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _meet(self) -> None:
        meet(self.flags, self.flag_addresses, self._epoch, self._rank)

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy one after the other: target, source, bytes. On four GPUs, copies beside each other were no faster."""
        for target, source, num_bytes in copies:
            cuda(
                "cudaMemcpyAsync",
                ctypes.c_void_p(target),
                ctypes.c_void_p(source),
                ctypes.c_size_t(num_bytes),
                DEVICE_TO_DEVICE,
                ctypes.c_void_p(self._stream.cuda_stream),
            )
