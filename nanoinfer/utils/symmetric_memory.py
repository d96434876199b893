"""Memory on each rank's GPU that the other ranks read over NVLink, so that sums of a few tokens need no NCCL.

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
    """What is wanted is the sum of all ranks' parts.

    local: (num_tokens, hidden_size), this rank's part.
    parts: (max_tokens, hidden_size) of each rank, of which the first `num_tokens` lines count.
    announced: (num_ranks,) int64 of each rank, the number of sums that each rank has told it of.
    num_sums: (NUM_TURNS,) int64, the number of sums that this rank had told of, at the end of each turn.
    """

    rank: int
    turn: int
    local: Tensor
    parts: tuple[Tensor | PeerTensor, ...]
    announced: tuple[Tensor | PeerTensor, ...]
    num_sums: Tensor


class SymmetricMemory:
    """Two buffers a rank, which take turns, and what says that they are filled.

    A rank that has filled its buffer tells all ranks how many sums it has begun, and reads theirs when they have told
    it of as many. Who has come to the next sum is done with this one, so after that sum its buffer is free. As a CUDA
    graph keeps its turns, every step has an even number of sums.

    all_gather: all ranks' tensors of the same shape. shape: (max_tokens, hidden_size).
    All ranks make one at the same time, with their own GPU as the current one; RuntimeError where CUDA refuses.
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
        turn_bytes = -(-self.max_tokens * hidden_size * dtype.itemsize // 16) * 16
        offset = NUM_TURNS * turn_bytes  # of what is announced
        own = _OwnMemory(offset + 8 * num_ranks)
        memory = torch.as_tensor(own)
        memory.zero_()
        handle = torch.frombuffer(bytearray(own.handle()), dtype=torch.uint8)
        handles = [bytes(line) for line in all_gather(handle.cuda()).tolist()]  # after which all have zeroed theirs
        self._memories: list[_OwnMemory | _PeerMemory] = [
            own if peer == rank else _PeerMemory(handles[peer]) for peer in range(num_ranks)
        ]
        starts = [memory.address for memory in self._memories]
        self._parts = [
            tuple(PeerTensor(start + turn * turn_bytes, dtype) for start in starts) for turn in range(NUM_TURNS)
        ]
        self._announced = tuple(PeerTensor(start + offset, torch.int64) for start in starts)
        turns = memory[:offset].view(NUM_TURNS, turn_bytes)[:, : self.max_tokens * hidden_size * dtype.itemsize]
        self._local = [turn.view(dtype).view(shape) for turn in turns]
        self._own_announced = memory[offset:].view(torch.int64)
        self._num_sums = torch.zeros(NUM_TURNS, dtype=torch.int64, device="cuda")
        self._turn = 0
        # For `release`, which must not load a kernel, nor wait, while one hangs.
        self._released = torch.full(self._own_announced.shape, RELEASED).pin_memory()
        self._stream = torch.cuda.Stream()
        self._lock = threading.Lock()

    def next_turn(self, num_tokens: int) -> RankSums:
        """The buffers of the next sum, of at most `max_tokens` tokens."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_TURNS
        local, parts = self._local[turn][:num_tokens], self._parts[turn]
        return RankSums(self._rank, turn, local, parts, self._announced, self._num_sums)

    def release(self) -> None:
        """Have no kernel of this rank wait any more: another rank has gone. Any thread may call it."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._memories:
                self._own_announced.copy_(self._released, non_blocking=True)

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


def _cuda(name: str, *args: Any) -> None:
    """Call a function of the CUDA runtime that PyTorch uses and does not pass on."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    if error := getattr(runtime, name)(*args):
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error).decode()}")
