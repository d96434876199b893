"""GPU memory that every rank of one host can read and write over NVLink, for the custom all-reduce of small steps.

A decode step all-reduces a megabyte or less, dozens of times, and NCCL's latency is most of that time. Here each rank
leaves its partial sums where the other ranks' kernels can read them: see `kernels/all_reduce_rms_norm.py`.

The memory is shared by CUDA's interprocess communication (cudaIpcGetMemHandle and cudaIpcOpenMemHandle; CUDA Runtime
API, "Device Management") rather than by `torch.distributed._symmetric_memory`. The ranks of PyTorch's rendezvous count
their rendezvous in a global of the process, so a process that has made one cannot make another with processes that have
not. Our rank 0 is the user's process, and each engine starts new workers: a second engine could not be made. PyTorch's
also needs a process group in its global registry, which we leave to the user.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_BUFFERS = 2  # double buffering
MIN_TWO_SHOT_BYTES = 256 * 2**10  # from this size on, more than two ranks use the two-shot all-reduce
RELEASED = 2**62  # an epoch beyond any that a kernel waits for
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PeerTensor:
    """Names a tensor in the memory of any GPU, with the two things that a Triton kernel asks of a tensor argument."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """Holds the buffers of an all-reduce that is still to be computed, by `layers.layernorm.all_reduce_add_rms_norm`.

    All-reduces are numbered from 1. The number is called the epoch, and a flag holds the epoch that it announces.
    """

    rank: int
    index: int  # which of the NUM_BUFFERS sets of buffers these are
    two_shot: bool  # each row is reduced and normalised by one rank, for all
    input: Tensor  # (num_tokens, hidden_size): this rank's partial sums
    output: Tensor  # (num_tokens, hidden_size): where this rank gets the result
    inputs: tuple[Tensor | PeerTensor, ...]  # one for each rank, (max_tokens, hidden_size); num_tokens rows are in use
    outputs: tuple[Tensor | PeerTensor, ...]  # likewise
    # (num_ranks + max_tokens,) int64, written by other ranks: the last epoch whose input each rank has announced, then
    # the last epoch whose output has been written, for each row.
    flags: Tensor
    flag_addresses: Tensor  # (num_ranks,) int64: the address of each rank's flags
    epochs: Tensor  # (NUM_BUFFERS,) int64: the last epoch that used each set of buffers


class SymmetricMemory:
    """Owns one rank's shared memory: two sets of input and output buffers, and the flags that synchronise the ranks.

    A rank fills its input buffer, announces the epoch to all ranks, and reads their inputs once they have announced it
    too. In two-shot it then waits for the rows of the output that other ranks compute.

    Two sets of buffers, used in turn, are enough:
    - Inputs: a rank that has finished epoch k + 1 has seen every rank announce it. So every rank has finished epoch k,
      and the input buffer of k may be filled again.
    - Outputs: other ranks write the output of epoch k + 2 only after this rank has announced it. By then this rank's
      kernels that read the output of epoch k have run.

    A CUDA graph fixes the buffers that its kernels use, so every step must have an even number of all-reduces.

    all_gather: returns all ranks' tensors of the same shape. shape: (max_tokens, hidden_size).
    All ranks must construct one at the same time, each with its own GPU as the current device. If CUDA refuses to share
    one rank's memory, all ranks raise RuntimeError.
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
        flags_offset = 2 * NUM_BUFFERS * buffer_bytes
        self._memories = _share(flags_offset + 8 * (num_ranks + self.max_tokens), rank, num_ranks, all_gather)
        memory = torch.as_tensor(self._memories[rank])
        starts = [memory.address for memory in self._memories]
        # The input buffers come first, then the output buffers.
        self._on_all_ranks = [
            tuple(PeerTensor(start + index * buffer_bytes, dtype) for start in starts)
            for index in range(2 * NUM_BUFFERS)
        ]
        buffers = memory[:flags_offset].view(2 * NUM_BUFFERS, buffer_bytes)[:, : self.max_tokens * row_bytes]
        self._on_this_rank = [buffer.view(dtype).view(shape) for buffer in buffers]
        self._flags = memory[flags_offset:].view(torch.int64)
        self._flag_addresses = torch.tensor([start + flags_offset for start in starts], device="cuda")
        self._epochs = torch.zeros(NUM_BUFFERS, dtype=torch.int64, device="cuda")
        self._next_index = 0
        # Made now, because `release` must neither load a kernel nor wait while another kernel hangs.
        self._released = torch.full(self._flags.shape, RELEASED).pin_memory()
        self._stream = torch.cuda.Stream()
        self._lock = threading.Lock()

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
            flags=self._flags,
            flag_addresses=self._flag_addresses,
            epochs=self._epochs,
        )

    def release(self) -> None:
        """End the waiting of all of this rank's kernels, because another rank is gone. Any thread may call it."""
        with self._lock, torch.cuda.stream(self._stream):
            if self._memories:
                self._flags.copy_(self._released, non_blocking=True)

    def close(self) -> None:
        """Free the memory. Nothing on this rank's GPU may use it any more; closing twice is fine."""
        with self._lock:
            self._stream.synchronize()
            while self._memories:
                self._memories.pop().close()


class _Handle(ctypes.Structure):
    """Has the layout of cudaIpcMemHandle_t."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class _OwnMemory:
    """Owns memory on the current GPU that other processes can open, and `torch.as_tensor` can view."""

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
    """Maps another rank's memory into this process."""

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
    """Allocate this rank's memory, zero it, and open that of the other ranks; return all of them by rank."""
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
    # This also waits until all ranks have zeroed their memory. A rank that was refused takes part as well.
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
        all_gather(torch.zeros(1, device="cuda"))  # by now no other rank has this one's memory open
        for memory in memories[:1]:
            memory.close()
        raise RuntimeError(f"GPU memory cannot be shared: {error or 'another rank was refused'}") from error
    memories.insert(rank, memories.pop(0))
    return memories


def _cuda(name: str, *args: Any) -> None:
    """Call a function of the CUDA runtime library that PyTorch has loaded but does not expose."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    if error := getattr(runtime, name)(*args):
        runtime.cudaGetLastError()  # clear the error, or PyTorch would report it as one of its own
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error).decode()}")
