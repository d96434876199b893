"""Steps on their way from rank 0 to the workers: a ring of slots in shared memory, which all workers read.

A message takes as many slots as it needs, one after another. For each slot that it has written, rank 0 rings every
worker's doorbell, a byte through a socket. So a worker that waits sleeps; the bytes of one that is behind wait for it,
and say that what rank 0 wrote before them is there to be seen; and the end of rank 0 is the end of the file. A slot is
written again when all workers have read it.
"""

import socket
import time
from collections.abc import Callable
from multiprocessing.heap import Arena

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS = 32
SLOT_SIZE = 16384  # numbers
SPIN_SECONDS = 100e-6  # a worker that has just finished a step looks for the next one so long before it sleeps
CACHE_LINE = 8  # int64 numbers, so that workers do not write to the same one


class Ring:
    """The shared memory. Send it to a process that is being spawned: it is the same memory there.

    It has no name that others could meet, and is gone with the last process that has it, however that one ends.

    num_read: (num_readers,) int64, the slots that each reader has read, ever.
    lengths: (num_slots,) int64, of the message that each slot is part of.
    slots: (num_slots, slot_size) int32.
    """

    def __init__(self, num_readers: int, num_slots: int = NUM_SLOTS, slot_size: int = SLOT_SIZE) -> None:
        num_bytes = 8 * (CACHE_LINE * num_readers + num_slots) + 4 * num_slots * slot_size
        self.__setstate__((Arena(num_bytes), num_readers, num_slots))

    def __setstate__(self, state: tuple[Arena, int, int]) -> None:
        self._arena, num_readers, num_slots = state
        wide = np.frombuffer(self._arena.buffer, np.int64, count=CACHE_LINE * num_readers + num_slots)
        self.num_read = wide[: CACHE_LINE * num_readers : CACHE_LINE]
        self.lengths = wide[CACHE_LINE * num_readers :]
        self.slots = np.frombuffer(self._arena.buffer, np.int32, offset=wide.nbytes).reshape(num_slots, -1)

    def __getstate__(self) -> tuple[Arena, int, int]:
        return self._arena, len(self.num_read), len(self.lengths)


class RingWriter:
    """Rank 0's end. doorbells: one socket for each reader. check: called while a reader is waited for; may raise."""

    def __init__(self, ring: Ring, doorbells: list[socket.socket], check: Callable[[], None] = lambda: None) -> None:
        self.ring = ring
        self._doorbells = doorbells
        self._check = check
        self._num_written = 0

    def send(self, numbers: NDArray[np.int32]) -> None:
        """Write a message; returns at once unless a reader is a whole ring behind. Raises OSError if one is gone."""
        num_slots, slot_size = self.ring.slots.shape
        for start in range(0, max(1, len(numbers)), slot_size):
            while self._num_written - self.ring.num_read.min() >= num_slots:
                self._check()
                time.sleep(SPIN_SECONDS)
            part, slot = numbers[start : start + slot_size], self._num_written % num_slots
            self.ring.slots[slot, : len(part)] = part
            self.ring.lengths[slot] = len(numbers)
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

    def receive(self) -> NDArray[np.int32]:
        """The next message, waited for. Raises EOFError when the writer is gone."""
        self._wait()
        num_slots, slot_size = self.ring.slots.shape
        length = int(self.ring.lengths[self._num_read % num_slots])
        numbers = np.empty(length, np.int32)
        for start in range(0, max(1, length), slot_size):
            self._wait()
            part = numbers[start : start + slot_size]
            part[:] = self.ring.slots[self._num_read % num_slots, : len(part)]
            self._num_read += 1
            self.ring.num_read[self._index] = self._num_read
        return numbers

    def _wait(self) -> None:
        """Until the slot at `_num_read` is written."""
        spin_until = time.perf_counter() + SPIN_SECONDS
        while self._num_rung == self._num_read:
            try:
                flags = socket.MSG_DONTWAIT if time.perf_counter() < spin_until else 0
                rings = self._doorbell.recv(NUM_SLOTS, flags)
            except BlockingIOError:
                continue
            if not rings:
                raise EOFError("rank 0 is gone")
            self._num_rung += len(rings)
