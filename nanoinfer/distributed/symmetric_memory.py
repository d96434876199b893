"""Memory on each rank's GPU that the others reach over NVLink, so that sums of a few tokens need no NCCL.

It is shared by CUDA's interprocess communication (CUDA Runtime API, "Device Management", cudaIpc*).
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_TURNS = 2
# From so many bytes on, and for more than two ranks, a sum takes two shots (`kernels/sum_ranks.py`).
MIN_BYTES_IN_TWO_SHOTS = 256 * 2**10
RELEASED = 2**62  # a number of sums that nobody waits for
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PeerTensor:
    """What a Triton kernel needs to know of a tensor: where it is, on whichever GPU, and of what."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class RankSums:
    """The sum of all ranks' parts, which is still to be computed, and normalised.

    two_shot: each rank computes a share of the rows, for all.
    part: (num_tokens, hidden_size), this rank's. out: the same, where its norm of the sum comes to lie.
    parts, outs: (max_tokens, hidden_size) of each rank, of which the first `num_tokens` lines count.
    flags: (num_ranks + max_tokens,) int64: the number of sums that each rank has announced to this one, and for each
        row the sum, by number, that was last written for this rank.
    flag_addresses: (num_ranks,) int64, where the flags of each rank are.
    num_sums: (NUM_TURNS,) int64, the number of sums that this rank had announced, at the end of each turn.
    """

    rank: int
    turn: int
    two_shot: bool
    part: Tensor
    out: Tensor
    parts: tuple[Tensor | PeerTensor, ...]
    outs: tuple[Tensor | PeerTensor, ...]
    flags: Tensor
    flag_addresses: Tensor
    num_sums: Tensor


class SymmetricMemory:
    """Each rank's parts and results of two sums, which take turns, and the flags that say what is there.

    A rank that has filled in its part announces the sum to all ranks, and reads theirs when they have announced it. In
    two shots it waits for the results where others compute them, who have waited for all ranks' announcements.

    Two turns are enough. When a rank is done with sum k + 1, all ranks have announced it, so all have read the parts of
    sum k, whose place it may fill. And results of sum k + 2 come to a rank only after it has announced that sum, when
    whatever used its results of sum k has run.

    As a CUDA graph keeps its turns, every step has an even number of sums.

    all_gather: all ranks' tensors of the same shape. shape: (max_tokens, hidden_size).
    All ranks make one at the same time, with their own GPU as the current one. Raises RuntimeError on all of them where
    CUDA refuses it to one.
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
        self._two_shot_tokens = -(-MIN_BYTES_IN_TWO_SHOTS // row_bytes) if num_ranks > 2 else self.max_tokens + 1
        buffer_bytes = -(-self.max_tokens * row_bytes // 16) * 16
        offset = 2 * NUM_TURNS * buffer_bytes  # of the flags
        self._memories = _share(offset + 8 * (num_ranks + self.max_tokens), rank, num_ranks, all_gather)
        memory = torch.as_tensor(self._memories[rank])
        starts = [memory.address for memory in self._memories]
        # The parts of each turn, then the results of each.
        self._on_all_ranks = [
            tuple(PeerTensor(start + index * buffer_bytes, dtype) for start in starts) for index in range(2 * NUM_TURNS)
        ]
        buffers = memory[:offset].view(2 * NUM_TURNS, buffer_bytes)[:, : self.max_tokens * row_bytes]
        self._on_this_rank = [buffer.view(dtype).view(shape) for buffer in buffers]
        self._flags = memory[offset:].view(torch.int64)
        self._flag_addresses = torch.tensor([start + offset for start in starts], device="cuda")
        self._num_sums = torch.zeros(NUM_TURNS, dtype=torch.int64, device="cuda")
        self._turn = 0
        # For `release`, which must not load a kernel, nor wait, while one hangs.
        self._released = torch.full(self._flags.shape, RELEASED).pin_memory()
        self._stream = torch.cuda.Stream()
        self._lock = threading.Lock()

    def next_turn(self, num_tokens: int) -> RankSums:
        """The buffers of the next sum, of at most `max_tokens` tokens."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_TURNS
        return RankSums(
            self._rank,
            turn,
            two_shot=num_tokens >= self._two_shot_tokens,
            part=self._on_this_rank[turn][:num_tokens],
            out=self._on_this_rank[NUM_TURNS + turn][:num_tokens],
            parts=self._on_all_ranks[turn],
            outs=self._on_all_ranks[NUM_TURNS + turn],
            flags=self._flags,
            flag_addresses=self._flag_addresses,
            num_sums=self._num_sums,
        )

    def release(self) -> None:
        """Have no kernel of this rank wait any more: another rank has gone. Any thread may call it."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._memories:
                self._flags.copy_(self._released, non_blocking=True)

    def close(self) -> None:
        """Give the memory back, which nothing on this GPU may use any more."""
        with self._lock:
            self._stream.synchronize()
            while self._memories:
                self._memories.pop().close()


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class _OwnMemory:
    """`num_bytes` on the current GPU that other processes can open, as `torch.as_tensor` understands it."""

    def __init__(self, num_bytes: int) -> None:
        address = ctypes.c_void_p()
        _cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value or 0
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def handle(self) -> bytes:
        handle = _Handle()
        _cuda("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.address))
        return bytes(handle)

    def close(self) -> None:
        _cuda("cudaFree", ctypes.c_void_p(self.address))


class _PeerMemory:
    """Another rank's, as this process sees it."""

    def __init__(self, handle: bytes) -> None:
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        _cuda("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        self.address = address.value or 0

    def close(self) -> None:
        _cuda("cudaIpcCloseMemHandle", ctypes.c_void_p(self.address))


def _share(
    num_bytes: int, rank: int, num_ranks: int, all_gather: Callable[[Tensor], Tensor]
) -> list[_OwnMemory | _PeerMemory]:
    """All ranks' memory, of zeros, as this one sees it."""
    memories: list[_OwnMemory | _PeerMemory] = []
    error: Exception | None = None
    handle = bytes(HANDLE_BYTES)
    try:
        own = _OwnMemory(num_bytes)
        memories = [own]
        torch.as_tensor(own).zero_()
        handle = own.handle()
    except (OSError, RuntimeError) as refusal:
        error = refusal
    # The others' handles come when all have zeroed theirs. Whoever was refused takes part as well.
    handles = all_gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8).cuda()).tolist()
    try:
        if error is None:
            for peer in range(num_ranks):
                if peer != rank:
                    memories.append(_PeerMemory(bytes(handles[peer])))
    except (OSError, RuntimeError) as refusal:
        error = refusal
    if all_gather(torch.tensor([error is not None], device="cuda")).any():
        for memory in memories[1:]:
            memory.close()
        all_gather(torch.zeros(1, device="cuda"))  # nobody has this rank's open any more
        for memory in memories[:1]:
            memory.close()
        raise RuntimeError(f"GPU memory cannot be shared: {error or 'another rank was refused'}") from error
    memories.insert(rank, memories.pop(0))
    return memories


def _cuda(name: str, *args: Any) -> None:
    """Call a function of the CUDA runtime that PyTorch uses and does not pass on."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    if error := getattr(runtime, name)(*args):
        runtime.cudaGetLastError()  # or PyTorch would find it, and take it for its own
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error).decode()}")
