"""Buffers in the memory that all ranks of one host reach, for the custom all-reduce of small steps.

A decode step all-reduces a megabyte or less, dozens of times, and NCCL's latency is most of that time. Here each rank
writes its partial sums into the memory of the others: see `ops/all_reduce_norm/triton.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanoinfer.distributed.cuda_ipc import SharedGpuMemory
from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.symmetric_buffers import BITS, PeerTensor, SymmetricBuffers, empty_bits

NUM_BUFFERS = 2  # double buffering
MIN_TWO_SHOT_BYTES = 256 * 2**10  # from this size on, more than two ranks use the two-shot all-reduce


class SymmetricMemory(SharedGpuMemory):
    """Holds one rank's two sets of buffers, in which every entry is empty until another rank has sent a number there.

    A rank that reads a row waits until none of its entries is empty, and leaves them empty again. Two sets of buffers,
    used in turn, are enough: a rank that starts all-reduce k + 2 has finished k + 1, so every other rank has started
    k + 1. That rank's kernel of k had ended before, and had read and emptied all entries sent to it.

    A CUDA graph fixes the buffers that its kernels use, so every step must have an even number of all-reduces: see
    `check_even`.

    shape: (max_tokens, hidden_size). The rest is said in `SharedGpuMemory`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self._rank, self.max_tokens, bits = rank, shape[0], BITS[dtype]
        row_bytes = shape[1] * dtype.itemsize
        self._min_two_shot_tokens = ceil_div(MIN_TWO_SHOT_BYTES, row_bytes) if num_ranks > 2 else self.max_tokens + 1
        # The others' parts and outputs lie one after the other, each of max_tokens rows.
        part_bytes = self.max_tokens * row_bytes
        set_bytes = (num_ranks + 1) * part_bytes
        super().__init__(NUM_BUFFERS * set_bytes, 1, rank, num_ranks, all_gather)
        self.own.view(bits).fill_(empty_bits(dtype))
        all_gather(torch.zeros(1, device="cuda"))  # no rank goes on before all have done so
        self._parts, self._outputs = (
            [
                tuple(PeerTensor(start + index * set_bytes + offset, bits) for start in self.addresses)
                for index in range(NUM_BUFFERS)
            ]
            for offset in (0, num_ranks * part_bytes)
        )
        self._next_index = 0
        self._is_left_out = False

    def serves(self, num_tokens: int) -> bool:
        """Return whether the sums of a step of so many tokens are all-reduced here, by the norm that follows."""
        return num_tokens <= self.max_tokens and not self._is_left_out

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Serve no step in this scope, so that all ranks hold all rows of the residual stream."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    def check_even(self) -> None:
        """Assert, at the end of a step, that the next one begins with the same buffers as this one did."""
        assert self._next_index == 0, "a step had an odd number of all-reduces: CUDA graphs would mix up their buffers"

    def next_buffers(self, num_tokens: int) -> SymmetricBuffers:
        """Return the buffers of the next all-reduce, of at most `max_tokens` tokens."""
        index, self._next_index = self._next_index, (self._next_index + 1) % NUM_BUFFERS
        return SymmetricBuffers(
            self._rank,
            self.max_tokens,
            two_shot=num_tokens >= self._min_two_shot_tokens,
            parts=self._parts[index],
            outputs=self._outputs[index],
            released=self.flags,
        )
