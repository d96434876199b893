"""Memory that a process shares with those it spawns."""

import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any


class SharedMemory:
    """`num_bytes` of zeros; sent to a process that is being spawned, it is the same memory there.

    It has no name that others could meet, and is gone with the last process that has it, however that one ends.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        self.num_bytes = num_bytes
        self._fd = _create(num_bytes) if fd is None else fd
        self.memory = mmap.mmap(self._fd, num_bytes)

    def __reduce__(self) -> Any:
        return _attach, (self.num_bytes, DupFd(self._fd))

    def __del__(self) -> None:
        if hasattr(self, "memory"):  # which has a descriptor of its own, and goes when nobody looks at it
            os.close(self._fd)


def _create(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nanoinfer")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def _attach(num_bytes: int, handle: Any) -> SharedMemory:
    return SharedMemory(num_bytes, handle.detach())
