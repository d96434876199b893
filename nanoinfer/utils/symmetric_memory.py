"""Memory on each rank's GPU that the other ranks read over NVLink, so that sums of a few tokens need no NCCL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # hardly typed

NUM_TURNS = 2
RELEASED = 2**62  # a number of sums that nobody waits for


@dataclass(frozen=True, slots=True)
class RankSums:
    """What is wanted is the sum of all ranks' parts. Peers' tensors lie on their GPUs.

    parts: (num_tokens, hidden_size) of each rank; `local` is this rank's.
    announced: (num_ranks, max_tokens) int64 of each rank, the number of sums that it was told of, by rank and line.
    num_sums: (max_tokens,) int64, the number of sums that this rank has told of, by line.
    """

    rank: int
    parts: tuple[Tensor, ...]
    announced: tuple[Tensor, ...]
    num_sums: Tensor

    @property
    def local(self) -> Tensor:
        return self.parts[self.rank]


class SymmetricMemory:
    """Two buffers a rank, which take turns, and what says that they are filled.

    A rank that has filled line t of its buffer tells all ranks how many sums it has begun there, and reads theirs when
    they have told of as many. Who has come to the next sum is done with this one, so after that sum its buffer is free.

    All ranks make one at the same time. Raises RuntimeError where the GPUs cannot reach each other's memory.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: Any,
        name: str,
        shape: tuple[int, int],  # max_tokens, hidden_size
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory  # not part of every build

        self.rank = rank
        self.max_tokens = shape[0]
        num_parts = NUM_TURNS * shape[0] * shape[1]
        offset = -(-num_parts * dtype.itemsize // 8)  # of what is announced, in numbers of 8 bytes
        memory = _SymmetricMemory.empty_strided_p2p((offset + num_ranks * shape[0],), (1,), torch.int64, device).zero_()
        torch.cuda.synchronize(device)
        self._memory = memory
        with _registered_group(rank, num_ranks, store, name):
            self._handle = _SymmetricMemory.rendezvous(memory, name)  # which waits for all
        buffers = [self._handle.get_buffer(peer, (NUM_TURNS, *shape), dtype) for peer in range(num_ranks)]
        announced = tuple(
            self._handle.get_buffer(peer, (num_ranks, shape[0]), torch.int64, offset) for peer in range(num_ranks)
        )
        num_sums = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self._turns = [RankSums(rank, parts, announced, num_sums) for parts in zip(*buffers, strict=True)]
        self._turn = 0
        # For `release`, which must not load a kernel, nor wait, while one hangs.
        self._released = torch.full((num_ranks, shape[0]), RELEASED, dtype=torch.int64).pin_memory()
        self._stream = torch.cuda.Stream(device)

    def next_turn(self, num_tokens: int) -> RankSums:
        """The buffers of the next sum, of at most `max_tokens` tokens."""
        sums, self._turn = self._turns[self._turn], (self._turn + 1) % NUM_TURNS
        return RankSums(sums.rank, tuple(part[:num_tokens] for part in sums.parts), sums.announced, sums.num_sums)

    def release(self) -> None:
        """Have no kernel of this rank wait any more: another rank has gone. Any thread may call it."""
        with torch.cuda.stream(self._stream):
            self._turns[0].announced[self.rank].copy_(self._released, non_blocking=True)


@contextmanager
def _registered_group(rank: int, num_ranks: int, store: Any, name: str) -> Iterator[None]:
    """PyTorch looks for the ranks that meet among its named process groups, where an engine's is not."""
    registry, group = dist.distributed_c10d, dist.ProcessGroup(store, rank, num_ranks)
    registry._register_process_group(name, group)
    try:
        yield
    finally:
        registry._unregister_process_group(name)
