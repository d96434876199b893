"""Sends packets from rank 0 to the workers: a ring of slots in shared memory, with one writer and several readers.

A message is an array of int32 numbers, in as many consecutive slots as it needs. For each slot that it has written,
rank 0 sends one byte through a socket to each worker, the worker's doorbell. The socket does four things for us:

- A worker that waits can sleep, and wakes within microseconds.
- The bytes queue up for a worker that is behind.
- Having received the byte, a worker sees all that rank 0 wrote before it.
- When rank 0 ends, however it does, the worker finds the end of the file.

A slot is written again once all workers have read it.
"""

import socket
import time
from collections.abc import Callable
from multiprocessing.heap import Arena
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.integers import ceil_div

NUM_SLOTS = 32
SLOT_SIZE = 16384  # int32 numbers
SPIN_SECONDS = 100e-6  # a worker polls for the next step this long before it sleeps
GIVEN_UP = 2**62  # slots read by a reader that is gone: more than will ever be written
CACHE_LINE = 8  # int64 numbers: the readers' counters lie in different cache lines


class Ring:
    """Owns the shared memory. Passed as an argument to a spawned process, it is the same memory there.

    It has no name in the file system, and is freed when the last process that maps it ends.

    num_read: (num_readers,) int64, the number of slots that each reader has read so far.
    lengths: (num_slots,) int64, the length of the message that each slot belongs to.
    slots: (num_slots, slot_size) int32.

    arena: memory that another process has allocated; None allocates it.
    """

    def __init__(
        self, num_readers: int, num_slots: int = NUM_SLOTS, slot_size: int = SLOT_SIZE, arena: Arena | None = None
    ) -> None:
        num_wide = CACHE_LINE * num_readers + num_slots
        self._arena = arena or Arena(8 * num_wide + 4 * num_slots * slot_size)
        wide = np.frombuffer(self._arena.buffer, np.int64, count=num_wide)
        self.num_read = wide[: CACHE_LINE * num_readers : CACHE_LINE]
        self.lengths = wide[CACHE_LINE * num_readers :]
        self.slots = np.frombuffer(self._arena.buffer, np.int32, offset=wide.nbytes).reshape(num_slots, slot_size)

    def give_up(self, reader: int) -> None:
        """Let the writer wait no more for a reader, which is gone."""
        self.num_read[reader] = GIVEN_UP

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (len(self.num_read), *self.slots.shape, self._arena)


class RingWriter:
    """Writes messages, at rank 0's end of the ring.

    doorbells: one socket for each reader. check: called repeatedly while `send` waits for a reader; it may raise.
    """

    def __init__(self, ring: Ring, doorbells: list[socket.socket], check: Callable[[], None] = lambda: None) -> None:
        self.ring = ring
        self._doorbells = doorbells
        self._check = check
        self._num_written = 0

    def send(self, numbers: NDArray[np.int32]) -> None:
        """Write a message. Blocks only if a reader is a whole ring behind. Raises OSError if a reader is gone."""
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

    def send_bytes(self, values: NDArray[np.uint8]) -> None:
        """Write bytes as a message, which `receive_bytes` reads."""
        padded = np.zeros(ceil_div(len(values), 4), np.int32)
        padded.view(np.uint8)[: len(values)] = values
        self.send(padded)


class RingReader:
    """Reads messages, at a worker's end of the ring. index: which of the readers it is."""

    def __init__(self, ring: Ring, index: int, doorbell: socket.socket) -> None:
        self.ring = ring
        self._index = index
        self._doorbell = doorbell
        self._num_read = 0
        self._num_announced = 0  # slots whose byte has been received

    def receive(self) -> NDArray[np.int32]:
        """Wait for the next message and return a copy of it. Raises EOFError when the writer is gone."""
        self._wait_for_slot()
        num_slots, slot_size = self.ring.slots.shape
        length = int(self.ring.lengths[self._num_read % num_slots])
        numbers = np.empty(length, np.int32)
        for start in range(0, max(1, length), slot_size):
            self._wait_for_slot()
            part = numbers[start : start + slot_size]
            part[:] = self.ring.slots[self._num_read % num_slots, : len(part)]
            self._num_read += 1
            self.ring.num_read[self._index] = self._num_read
        return numbers

    def receive_bytes(self, count: int) -> NDArray[np.uint8]:
        """Wait for a message of so many bytes and return a copy of it."""
        return self.receive().view(np.uint8)[:count]

    def _wait_for_slot(self) -> None:
        """Wait until the next slot to read has been written."""
        spin_until = time.perf_counter() + SPIN_SECONDS
        while self._num_announced == self._num_read:
            try:
                flags = socket.MSG_DONTWAIT if time.perf_counter() < spin_until else 0
                received = self._doorbell.recv(NUM_SLOTS, flags)
            except BlockingIOError:
                continue
            if not received:
                raise EOFError("rank 0 is gone")
            self._num_announced += len(received)
