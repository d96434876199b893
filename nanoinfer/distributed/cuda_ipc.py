"""GPU memory that every rank of one host can read and write over NVLink, with flags that synchronise the ranks.

The memory is shared by CUDA's interprocess communication (cudaIpcGetMemHandle and cudaIpcOpenMemHandle; CUDA Runtime
API, "Device Management") rather than by `torch.distributed._symmetric_memory`. PyTorch counts rendezvous in a
global of each process, so a process that has made one cannot make another with new processes. Our rank 0 is the user's
process, and each engine starts new workers, so a second engine would be impossible. PyTorch's way also needs a process
group in its global registry, which we leave to the user.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanoinfer.integers import ceil_div

RELEASED = 2**62  # a flag beyond any that a kernel waits for
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice
HANDLE_BYTES = 64
ALIGNMENT = 256


class SharedGpuMemory:
    """Holds one rank's share of the memory, and the addresses of all ranks' shares.

    own: (num_bytes,) uint8. flags: (num_flags,) int64, zero at first. addresses: where each rank's memory begins.
    flag_addresses: (num_ranks,) int64, where each rank's flags begin.

    num_bytes, num_flags: of each rank. all_gather: returns all ranks' tensors of the same shape. All ranks must
    construct one at the same time, each with its own GPU as the current device. If CUDA refuses to share one rank's
    memory, all ranks raise RuntimeError.
    """

    def __init__(
        self, num_bytes: int, num_flags: int, rank: int, num_ranks: int, all_gather: Callable[[Tensor], Tensor]
    ) -> None:
        flags_offset = ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT
        self._memories = _share(flags_offset + 8 * num_flags, rank, num_ranks, all_gather)
        memory = torch.as_tensor(self._memories[rank])
        self.own, self.flags = memory[:num_bytes], memory[flags_offset:].view(torch.int64)
        self.addresses = [memory.address for memory in self._memories]
        self.flag_addresses = torch.tensor([start + flags_offset for start in self.addresses], device="cuda")
        # Made now, because `release` must neither load a kernel nor wait while another kernel hangs.
        self._released = torch.full(self.flags.shape, RELEASED).pin_memory()
        self._streams = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        torch.empty_like(self.flags).fill_(RELEASED)
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the waiting of all of this rank's kernels, because another rank is gone. Any thread may call it.

        It sets the flags twice: the copy may be queued behind others that wait for such a kernel, and the filling
        kernel may find no room beside the waiting ones.
        """
        copying, filling = self._streams
        with self._lock:
            if not self._memories:
                return
            with torch.cuda.stream(copying):
                self.flags.copy_(self._released, non_blocking=True)
            with torch.cuda.stream(filling):
                self.flags.fill_(RELEASED)

    def close(self) -> None:
        """Free the memory. Nothing on this rank's GPU may use it any more; closing twice is fine."""
        with self._lock:
            for stream in self._streams:
                stream.synchronize()
            while self._memories:
                self._memories.pop().close()


class _Handle(ctypes.Structure):
    """Has the layout of cudaIpcMemHandle_t."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class _OwnMemory:
    """Owns memory on the current GPU that other processes can open, and `torch.as_tensor` can view."""

    def __init__(self, num_bytes: int) -> None:
        address = ctypes.c_void_p()
        cuda("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value or 0
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def handle(self) -> bytes:
        handle = _Handle()
        cuda("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.address))
        return bytes(handle)

    def close(self) -> None:
        cuda("cudaFree", ctypes.c_void_p(self.address))


class _PeerMemory:
    """Maps another rank's memory into this process."""

    def __init__(self, handle: bytes) -> None:
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        cuda("cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        self.address = address.value or 0

    def close(self) -> None:
        cuda("cudaIpcCloseMemHandle", ctypes.c_void_p(self.address))


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


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copy memory from one address to another, of any GPUs, by a copy engine, on the current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    pointers = ctypes.c_void_p(target), ctypes.c_void_p(source)
    cuda("cudaMemcpyAsync", *pointers, ctypes.c_size_t(num_bytes), DEVICE_TO_DEVICE, stream)


def cuda(name: str, *args: Any) -> None:
    """Call a function of the CUDA runtime library that PyTorch has loaded but does not expose."""
    runtime = _runtime()
    if error := getattr(runtime, name)(*args):
        runtime.cudaGetLastError()  # clear the error, or PyTorch would report it as one of its own
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {runtime.cudaGetErrorString(error).decode()}")


@cache
def _runtime() -> Any:
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
