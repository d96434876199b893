"""Steps on their way from rank 0 to the workers: a ring of slots in shared memory, which all workers read.

A message takes as many slots as it needs, one after another. For each slot that it has written, rank 0 rings every
worker's doorbell, a byte through a socket. So a worker that waits sleeps; the bytes of one that is behind wait for it,
and say that what rank 0 wrote before them is there to be seen; and the end of rank 0 is the end of the file. A slot is
written again when all workers have read it.
"""

import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS = 32
SLOT_SIZE = 16384  # numbers
SPIN_SECONDS = 100e-6  # a worker that has just finished a step looks for the next one so long before it sleeps
CACHE_LINE = 8  # int64 numbers, so that workers do not write to the same one


class MessageKind(IntEnum):
    STEP = 0  # the packet of a step to launch
    CLOSE = 1  # free everything and end; no content


class Message(NamedTuple):
    kind: MessageKind
    numbers: NDArray[np.int32]


class SharedMemory:
    """`num_bytes` of zeros. Send it to a process that is being spawned: it is the same memory there.

    It has no name that others could meet, and is gone with the last process that has it, however that one ends.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        self.num_bytes = num_bytes
        self._fd = _create(num_bytes) if fd is None else fd
        self.memory = mmap.mmap(self._fd, num_bytes)

    def __reduce__(self) -> Any:
        from multiprocessing.reduction import DupFd  # not on Windows, where one process must work all the same

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


class Ring:
    """The shared memory. Send it to a process that is being spawned.

    num_read: (num_readers,) int64, the slots that each reader has read, ever.
    headers: (num_slots, 3) int64: the number of slots ever written before it, the kind and the length of its message.
    slots: (num_slots, slot_size) int32.
    """

    def __init__(self, num_readers: int, num_slots: int = NUM_SLOTS, slot_size: int = SLOT_SIZE) -> None:
        control = CACHE_LINE * num_readers + 3 * num_slots
        self._attach(SharedMemory(8 * control + 4 * num_slots * slot_size), num_readers, num_slots)

    def _attach(self, shared: SharedMemory, num_readers: int, num_slots: int) -> None:
        self._shared = shared
        wide = np.frombuffer(shared.memory, np.int64, count=CACHE_LINE * num_readers + 3 * num_slots)
        self.num_read = wide[: CACHE_LINE * num_readers : CACHE_LINE]
        self.headers = wide[CACHE_LINE * num_readers :].reshape(num_slots, 3)
        self.slots = np.frombuffer(shared.memory, np.int32, offset=wide.nbytes).reshape(num_slots, -1)

    def __getstate__(self) -> tuple[SharedMemory, int, int]:
        return self._shared, len(self.num_read), len(self.headers)

    def __setstate__(self, state: tuple[SharedMemory, int, int]) -> None:
        self._attach(*state)


class RingWriter:
    """Rank 0's end. doorbells: one socket for each reader. check: called while a reader is waited for; may raise."""

    def __init__(self, ring: Ring, doorbells: list[socket.socket], check: Callable[[], None] = lambda: None) -> None:
        self.ring = ring
        self._doorbells = doorbells
        self._check = check
        self._num_written = 0

    def send(self, kind: MessageKind, numbers: NDArray[np.int32] | None = None) -> None:
        """Write a message; returns at once unless a reader is a whole ring behind. Raises OSError if one is gone."""
        if numbers is None:
            numbers = np.empty(0, np.int32)
        num_slots, slot_size = self.ring.slots.shape
        for start in range(0, max(1, len(numbers)), slot_size):
            while self._num_written - self.ring.num_read.min() >= num_slots:
                self._check()
                time.sleep(SPIN_SECONDS)
            part, slot = numbers[start : start + slot_size], self._num_written % num_slots
            self.ring.slots[slot, : len(part)] = part
            self.ring.headers[slot] = self._num_written, kind, len(numbers)
            self._num_written += 1
            for doorbell in self._doorbells:
                doorbell.send(b"\0")


class RingReader:
    """A worker's end: reader `index` of the ring."""

    def __init__(self, ring: Ring, index: int, doorbell: socket.socket) -> None:
        self.ring = ring
        self._index = index
        self._doorbell = doorbell
        self._num_read = 0
        self._num_rung = 0  # slots that the doorbell has announced

    def receive(self) -> Message:
        """The next message, waited for. Raises EOFError when the writer is gone."""
        self._wait()
        num_slots, slot_size = self.ring.slots.shape
        _, kind, length = self.ring.headers[self._num_read % num_slots].tolist()
        numbers = np.empty(length, np.int32)
        for start in range(0, max(1, length), slot_size):
            self._wait()
            slot = self._num_read % num_slots
            assert self.ring.headers[slot, 0] == self._num_read, f"slot {slot} was overwritten before it was read"
            part = numbers[start : start + slot_size]
            part[:] = self.ring.slots[slot, : len(part)]
            self._num_read += 1
            self.ring.num_read[self._index] = self._num_read
        return Message(MessageKind(kind), numbers)

    def _wait(self) -> None:
        """Until the slot at `_num_read` is written."""
        spin_until = time.perf_counter() + SPIN_SECONDS
        while self._num_rung == self._num_read:
            try:
                flags = socket.MSG_DONTWAIT if time.perf_counter() < spin_until else 0
                rings = self._doorbell.recv(len(self.ring.headers), flags)
            except BlockingIOError:
                continue
            if not rings:
                raise EOFError("rank 0 is gone")
            self._num_rung += len(rings)
