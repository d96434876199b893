"""Buffers in the memory that all ranks of one host reach, for the custom all-reduce of small steps.

A decode step all-reduces a megabyte or less, dozens of times, and NCCL's latency is most of that time. Here each rank
leaves its partial sums where the other ranks' kernels can read them: see `kernels/all_reduce_rms_norm.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.distributed.cuda_ipc import SharedGpuMemory
from nanoinfer.kernels.symmetric_buffers import PeerTensor, SymmetricBuffers

NUM_BUFFERS = 2  # double buffering
MIN_TWO_SHOT_BYTES = 256 * 2**10  # from this size on, more than two ranks use the two-shot all-reduce


class SymmetricMemory(SharedGpuMemory):
    """One rank's two sets of input and output buffers, and the flags that synchronise the ranks.

    A rank fills its input buffer, announces the epoch to all ranks, and reads their inputs once they have announced it
    too. In two-shot it then waits for the rows of the output that other ranks compute.

    Two sets of buffers, used in turn, are enough:
    - Inputs: a rank that has finished epoch k + 1 has seen every rank announce it. So every rank has finished epoch k,
      and the input buffer of k may be filled again.
    - Outputs: other ranks write the output of epoch k + 2 only after this rank has announced it. By then this rank's
      kernels that read the output of epoch k have run.

    A CUDA graph fixes the buffers that its kernels use, so every step must have an even number of all-reduces.

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
        self._rank = rank
        self.max_tokens, hidden_size = shape
        row_bytes = hidden_size * dtype.itemsize
        self._min_two_shot_tokens = -(-MIN_TWO_SHOT_BYTES // row_bytes) if num_ranks > 2 else self.max_tokens + 1
        buffer_bytes = -(-self.max_tokens * row_bytes // 16) * 16
        num_bytes = 2 * NUM_BUFFERS * buffer_bytes
        super().__init__(num_bytes, num_ranks + self.max_tokens, rank, num_ranks, all_gather)
        # The input buffers come first, then the output buffers.
        self._on_all_ranks = [
            tuple(PeerTensor(start + index * buffer_bytes, dtype) for start in self.addresses)
            for index in range(2 * NUM_BUFFERS)
        ]
        buffers = self.own.view(2 * NUM_BUFFERS, buffer_bytes)[:, : self.max_tokens * row_bytes]
        self._on_this_rank = [buffer.view(dtype).view(shape) for buffer in buffers]
        self._epochs = torch.zeros(NUM_BUFFERS, dtype=torch.int64, device="cuda")
        self._next_index = 0

    def next_buffers(self, num_tokens: int) -> SymmetricBuffers:
        """Return the buffers of the next all-reduce, of at most `max_tokens` tokens."""
        index, self._next_index = self._next_index, (self._next_index + 1) % NUM_BUFFERS
        return SymmetricBuffers(
            self._rank,
            index,
            two_shot=num_tokens >= self._min_two_shot_tokens,
            input=self._on_this_rank[index][:num_tokens],
            output=self._on_this_rank[NUM_BUFFERS + index][:num_tokens],
            inputs=self._on_all_ranks[index],
            outputs=self._on_all_ranks[NUM_BUFFERS + index],
            flags=self.flags,
            flag_addresses=self.flag_addresses,
            epochs=self._epochs,
        )
