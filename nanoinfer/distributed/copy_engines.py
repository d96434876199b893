"""Reduce-scatters and all-gathers of many tokens by the GPUs' copy engines, in the background of matrix products.

NCCL's kernels run on multiprocessors, which they take from the products beside them. A copy engine moves memory to
other GPUs without any. docs/kernels.md has the times.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.distributed.cuda_ipc import SharedGpuMemory, copy
from nanoinfer.integers import ceil_div
from nanoinfer.ops.barrier.triton import barrier


class CopyEngines(SharedGpuMemory):
    """Exchanges the slices of a step between the ranks, one exchange after the other, on a stream of its own.

    Each rank owns a share of each slice's rows. In a reduce-scatter, a rank sends every other rank its terms of the
    rows that the other one owns; the caller adds them up. In an all-gather, a rank sends its own rows to all others.
    Each exchange ends in a barrier.

    Each slice has one buffer for terms and one for gathered rows. That is enough if reduce-scatters and all-gathers
    alternate. An all-gather overwrites the rows of the last one only after a reduce-scatter, which each rank started
    when it had read those rows. In the same way, a reduce-scatter overwrites terms only after an all-gather. If two
    all-gathers follow each other, as from one step to the next, there must be another barrier between them.

    num_slices: the most slices of a step. shape: (max_tokens, hidden_size) of the largest slice. The rest is said in
    `SharedGpuMemory`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[Tensor], Tensor],
        num_slices: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        max_tokens, self._hidden_size = shape
        self._rank, self._num_ranks = rank, num_ranks
        self._others = [(rank + i) % num_ranks for i in range(1, num_ranks)]
        share = ceil_div(max_tokens, num_ranks) * self._hidden_size  # entries
        num_bytes = num_slices * (2 * num_ranks - 1) * share * dtype.itemsize
        super().__init__(num_bytes, num_ranks, rank, num_ranks, all_gather)
        buffers = self.own.view(dtype).view(num_slices, 2 * num_ranks - 1, share)
        self._terms, self._gathered = buffers[:, : num_ranks - 1], buffers[:, num_ranks - 1 :].flatten(1)
        self._epoch = self.flag_addresses.new_zeros(1)  # how many barriers there were
        self._stream = torch.cuda.Stream(priority=-1)
        self._ends: dict[int, torch.cuda.Event] = {}  # of each slice's last exchange

    def start_reduce_scatter(self, index: int, x: Tensor) -> None:
        """Start to send the terms `x`, (num_tokens, hidden_size), of a slice. Keep them until `received` is called.

        There are at least as many tokens as ranks.
        """
        assert x.is_contiguous(), f"the rows must be contiguous, strides {x.stride()}"
        shares, copies = x.tensor_split(self._num_ranks), []
        for peer in self._others:
            place = (self._rank - peer) % self._num_ranks - 1  # its terms are those of the ranks after it, in order
            copies.append((peer, shares[peer], self._terms[index, place]))
        self._start(index, copies)

    def received(self, index: int, num_rows: int) -> Tensor:
        """Return the other ranks' terms of the rows that this one owns: (num_ranks - 1, num_rows, hidden_size).

        The current stream waits for them, and not the host.
        """
        self._ends[index].wait()
        return self._terms[index, :, : num_rows * self._hidden_size].unflatten(1, (num_rows, self._hidden_size))

    def own_rows(self, index: int, num_tokens: int) -> Tensor:
        """Return the buffer of the rows that this rank owns, to be written before they are gathered."""
        return self._rows(index, num_tokens).tensor_split(self._num_ranks)[self._rank]

    def start_all_gather(self, index: int, num_tokens: int) -> None:
        """Start to send `own_rows` to all other ranks."""
        rows = self.own_rows(index, num_tokens)
        self._start(index, [(peer, rows, rows) for peer in self._others])

    def gathered(self, index: int, num_tokens: int) -> Tensor:
        """Return all rows of a slice, (num_tokens, hidden_size), for which the current stream waits."""
        self._ends[index].wait()
        return self._rows(index, num_tokens)

    def join(self) -> None:
        """Let the current stream wait for all that has been started."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # or a capture might not know of it
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _rows(self, index: int, num_tokens: int) -> Tensor:
        return self._gathered[index, : num_tokens * self._hidden_size].view(num_tokens, self._hidden_size)

    def _start(self, index: int, copies: list[tuple[int, Tensor, Tensor]]) -> None:
        """Start copies, each (rank, source, target), where the target stands for that rank's buffer at the same offset.

        They run one after the other: on four GPUs, concurrent copies were no faster.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for peer, source, target in copies:
                offset = target.data_ptr() - self.own.data_ptr()
                copy(self.addresses[peer] + offset, source.data_ptr(), source.nbytes)
            barrier(self.flags, self.flag_addresses, self._epoch, self._rank)
            self._ends[index] = torch.cuda.Event()
            self._ends[index].record()
