"""The ring in shared memory by itself: nothing is lost, repeated, mixed or overwritten, whoever is slow."""

import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.executor.shm_ring import NUM_SLOTS, SLOT_SIZE, Ring, RingReader, RingWriter


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(
    stack: ExitStack,
    num_readers: int = 1,
    num_slots: int = 4,
    slot_size: int = 8,
    check: Callable[[], None] = lambda: None,
) -> tuple[RingWriter, list[RingReader], list[socket.socket], list[socket.socket]]:
    """A writer and its readers, in one process, and the sockets of both sides."""
    ring = Ring(num_readers, num_slots, slot_size)
    pairs = [socket.socketpair() for _ in range(num_readers)]
    mine, theirs = ([stack.enter_context(pair[side]) for pair in pairs] for side in (0, 1))
    readers = [RingReader(ring, index, doorbell) for index, doorbell in enumerate(theirs)]
    return RingWriter(ring, mine, check), readers, mine, theirs


def shut_down(doorbell: socket.socket) -> None:
    doorbell.shutdown(socket.SHUT_WR)


def numbers(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, length, dtype=np.int32)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 31, 32])
def test_a_message_arrives_as_it_was_sent_and_stays_when_its_slot_is_written_again(
    stack: ExitStack, length: int
) -> None:
    writer, [reader], _, _ = connect(stack)
    messages = [numbers(length, seed) for seed in range(5)]  # more than once round the ring
    received = []
    for message in messages:
        writer.send(message)
        received.append(reader.receive())
    assert {message.dtype for message in received} == {np.dtype(np.int32)}
    assert [message.tolist() for message in received] == [message.tolist() for message in messages]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=40),
    num_slots=st.integers(1, 5),
    slot_size=st.integers(1, 20),
    num_readers=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_every_reader_gets_every_message_in_order_at_its_own_pace(
    lengths: list[int], num_slots: int, slot_size: int, num_readers: int, seed: int
) -> None:
    """The writer never waits by itself, readers pause at random, and most messages are longer than the ring."""
    sent = [numbers(length, seed + index).tolist() for index, length in enumerate(lengths)]
    received: list[list] = [[] for _ in range(num_readers)]
    with ExitStack() as stack:
        writer, readers, doorbells, _ = connect(stack, num_readers, num_slots, slot_size)

        def read(index: int) -> None:
            pause = random.Random(seed + index)
            with suppress(EOFError):
                while True:
                    received[index].append(readers[index].receive().tolist())
                    if pause.random() < 0.1:
                        time.sleep(0.001)

        threads = [threading.Thread(target=read, args=(index,)) for index in range(num_readers)]
        for thread in threads:
            thread.start()
        for content in sent:
            writer.send(np.array(content, dtype=np.int32))
        for doorbell in doorbells:
            shut_down(doorbell)
        for thread in threads:
            thread.join(timeout=30)
    assert received == [sent] * num_readers


def test_a_slot_is_not_written_again_before_the_slowest_reader_has_read_it(stack: ExitStack) -> None:
    class GaveUpError(Exception):
        pass

    def give_up() -> None:
        raise GaveUpError

    writer, [fast, slow], _, _ = connect(stack, num_readers=2, num_slots=2, check=give_up)
    for value in (1, 2):
        writer.send(np.array([value], dtype=np.int32))
        assert fast.receive().tolist() == [value]
    with pytest.raises(GaveUpError):
        writer.send(np.array([3], dtype=np.int32))
    assert slow.receive().tolist() == [1]
    writer.send(np.array([3], dtype=np.int32))
    assert [slow.receive().tolist() for _ in range(2)] == [[2], [3]]
    assert fast.receive().tolist() == [3]


@pytest.mark.parametrize("end", [shut_down, socket.socket.close], ids=["closed", "gone"])
def test_a_reader_learns_of_the_writers_end_after_all_that_it_wrote(
    stack: ExitStack, end: Callable[[socket.socket], None]
) -> None:
    writer, [reader], [doorbell], _ = connect(stack)
    writer.send(numbers(3))
    end(doorbell)
    assert reader.receive().tolist() == numbers(3).tolist()
    with pytest.raises(EOFError, match="rank 0 is gone"):
        reader.receive()


def test_a_writer_learns_that_a_reader_is_gone(stack: ExitStack) -> None:
    writer, _, _, [doorbell] = connect(stack)
    doorbell.close()
    with pytest.raises(OSError, match="Broken pipe"):
        writer.send(numbers(3))


def test_a_waiting_reader_sleeps(stack: ExitStack) -> None:
    writer, [reader], _, _ = connect(stack)
    used = []

    def read() -> None:
        before = time.thread_time()
        reader.receive()
        used.append(time.thread_time() - before)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.5)
    writer.send(numbers(3))
    thread.join(timeout=10)
    assert used[0] < 0.1, f"{used[0]:.2f} s of processor time in half a second"


def echo(ring: Ring, index: int, doorbell: socket.socket, answers: socket.socket) -> None:
    """In a process of its own: answer each message with its sum."""
    reader = RingReader(ring, index, doorbell)
    with suppress(EOFError):
        while True:
            answers.sendall(int(reader.receive().sum(dtype=np.int64)).to_bytes(8, "little", signed=True))


def named_memory() -> set[str]:
    """The shared memory that this process sees and others could open by name."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


def test_spawned_processes_read_the_same_memory_and_it_has_no_name() -> None:
    before = named_memory()
    ring = Ring(num_readers=2)
    doorbells, answers, processes = [], [], []
    context = multiprocessing.get_context("spawn")
    for index in range(2):
        (mine, theirs), (answer, answering) = socket.socketpair(), socket.socketpair()
        processes.append(context.Process(target=echo, args=(ring, index, theirs, answering), daemon=True))
        processes[-1].start()
        theirs.close()
        answering.close()
        doorbells.append(mine)
        answers.append(answer)
    assert named_memory() == before
    writer = RingWriter(ring, doorbells)
    for length in (1, 1000, SLOT_SIZE, SLOT_SIZE + 1, (NUM_SLOTS + 1) * SLOT_SIZE):
        sent = numbers(length)
        writer.send(sent)
        for answer in answers:
            received = int.from_bytes(answer.recv(8, socket.MSG_WAITALL), "little", signed=True)
            assert received == sent.sum(dtype=np.int64)
    for doorbell in doorbells:
        shut_down(doorbell)
    for process, *ends in zip(processes, doorbells, answers, strict=True):
        process.join(timeout=30)
        assert process.exitcode == 0
        process.close()
        for end in ends:
            end.close()


def test_writing_a_decode_step_of_256_rows_is_cheap(stack: ExitStack) -> None:
    """A few microseconds here; the bound leaves room for a busy machine."""
    writer, readers, _, _ = connect(stack, num_readers=3, num_slots=NUM_SLOTS, slot_size=SLOT_SIZE)
    packet, seconds = numbers(280), []
    for _ in range(200):
        started = time.perf_counter()
        writer.send(packet)
        seconds.append(time.perf_counter() - started)
        for reader in readers:
            reader.receive()
    assert sorted(seconds)[100] < 200e-6
