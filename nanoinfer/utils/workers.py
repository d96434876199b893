"""Processes that work for this one: how they start, how their end is noticed, and how everything of them is cleaned up.

Each worker has a socket to us. We may write to it; it reports b"+" for each stage of its start that it has passed, and
the traceback of an error that ends it. Whichever side ends, the other finds the end of the file.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError, WorkerError

EXIT_SECONDS = 10.0  # a worker that was told to end is killed after so long
EXPLANATION_SECONDS = 2.0  # a worker's end may show in an error here before it shows in its socket
JOIN_SECONDS = 3.0
NO_MAIN_GUARD = 79  # exit code of a worker whose import of the user's script would start an engine
PASSED = b"+"


class Workers:
    """Ranks 1 to `size` - 1, each running `target(rank, link, folder, *args)` in a spawned process.

    links: a socket to each of them. folder: a private one, for all ranks; it goes with the workers.
    watch: what notices a worker's end.
    """

    def __init__(self, size: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # We are a worker that is still importing the user's script. Our parent explains.
            raise SystemExit(NO_MAIN_GUARD)
        self.folder = Path(tempfile.mkdtemp(prefix="nanoinfer-"))
        self.links: list[socket.socket] = []
        self.watch = Watch(size)
        self._processes: list[SpawnProcess] = []
        # Not a method: that would keep this object alive.
        state = (self.watch, self._processes, self.links, self.folder)
        self.close = weakref.finalize(self, _end_workers, os.getpid(), *state)
        try:
            for rank in range(1, size):
                self._start(rank, target, args)
        except BaseException:
            self.kill()
            raise
        self.watch.start(self.links, self._processes)

    def _start(self, rank: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.links.append(ours)
        process = multiprocessing.get_context("spawn").Process(
            target=_run_worker,
            args=(target, rank, theirs, self.folder, *args),
            name=f"nanoinfer rank {rank}",
            daemon=True,
        )
        with theirs, _blocked_interrupt():  # a worker inherits the blocking, so that Ctrl-C is only ours
            process.start()
        self._processes.append(process)

    def kill(self) -> None:
        """Close, and give the workers no time to end by themselves."""
        self.watch.patience = 0.0
        self.close()

    @property
    def have_failed(self) -> bool:
        return self.watch.failed.is_set()

    def check(self) -> None:
        """Raise WorkerError if a worker has ended."""
        if self.have_failed:
            raise WorkerError(self.watch.message)

    def explanation(self, error: BaseException) -> BaseException:
        """The WorkerError that is behind `error`, an error of the communication, say; or else `error` itself."""
        seconds = 0.0 if isinstance(error, (NanoinferError, KeyboardInterrupt)) else EXPLANATION_SECONDS
        if isinstance(error, WorkerError) or not self.watch.failed.wait(seconds):
            return error
        explanation = WorkerError(self.watch.message)
        explanation.__cause__ = error
        return explanation

    def wait_for_stage(self, stage: int) -> None:
        """Return when all workers have passed their `stage`-th stage, counted from 1. Raises WorkerError."""
        with self.watch.changed:
            self.watch.changed.wait_for(lambda: self.have_failed or min(self.watch.stages.values()) >= stage)
        self.check()


class Watch:
    """A thread that reads what workers report, and notices the first that ends before it should.

    on_failure: called then, from this thread.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.stages = dict.fromkeys(range(1, size), 0)
        self.changed = threading.Condition()
        self.failed = threading.Event()
        self.message = ""
        self.on_failure: Callable[[], object] = lambda: None
        self.is_closing = False
        self.patience = EXIT_SECONDS
        self.thread: threading.Thread | None = None

    def start(self, links: list[socket.socket], processes: list[SpawnProcess]) -> None:
        self.thread = threading.Thread(
            target=self._run, args=(list(links), list(processes)), name="nanoinfer watch", daemon=True
        )
        self.thread.start()

    def _run(self, links: list[socket.socket], processes: list[SpawnProcess]) -> None:
        reports = dict.fromkeys(links, b"")
        while reports:
            for link in wait(list(reports)):
                assert isinstance(link, socket.socket)
                rank = links.index(link) + 1
                with suppress(ConnectionResetError):  # it ended with steps unread
                    if received := link.recv(65536):
                        reports[link] += received
                        self._count(rank, reports[link])
                        continue
                report = reports.pop(link)
                link.close()
                if not (self.is_closing or self.failed.is_set()):
                    self._fail(rank, report.lstrip(PASSED).decode(errors="replace"), processes[rank - 1])

    def _count(self, rank: int, report: bytes) -> None:
        with self.changed:
            self.stages[rank] = len(report) - len(report.lstrip(PASSED))
            self.changed.notify_all()

    def _fail(self, rank: int, report: str, process: SpawnProcess) -> None:
        if not report:
            process.join(1.0)
        self.message = self._explain(rank, report, process.exitcode)
        self.patience = 0.0
        with self.changed:
            self.failed.set()
            self.changed.notify_all()
        self.on_failure()

    def _explain(self, rank: int, report: str, exitcode: int | None) -> str:
        size, remedy = self.size, "this engine is closed; make a new LLM"
        if exitcode == NO_MAIN_GUARD:
            return (
                f"tensor_parallel_size={size} spawns processes that import this script, and it makes an LLM when it is "
                'imported; put the code that it runs under `if __name__ == "__main__":`'
            )
        if report:
            return f"rank {rank} of tensor_parallel_size={size} failed; {remedy}. Its traceback:\n{report}"
        if exitcode is not None and exitcode < 0:
            name = signal.Signals(-exitcode).name
            hint = " (by the system, if it was out of memory)" if name == "SIGKILL" else ""
            return f"rank {rank} of tensor_parallel_size={size} was ended by {name}{hint}; {remedy}"
        return (
            f"rank {rank} of tensor_parallel_size={size} ended with exit code {exitcode}, for a reason that may be on "
            f"stderr; {remedy}"
        )


def _end_workers(
    owner: int, watch: Watch, processes: list[SpawnProcess], links: list[socket.socket], folder: Path
) -> None:
    """Let the workers end by themselves, kill those that do not, and leave nothing of them."""
    if os.getpid() != owner:  # a fork of the owner, which has other workers or none
        return
    watch.is_closing = True
    for link in links:
        with suppress(OSError):  # it has ended already
            link.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + watch.patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
    for process in processes:
        process.join()
        process.close()
    if watch.thread is None:
        for link in links:
            link.close()
    elif watch.thread is not threading.current_thread():  # where the garbage collector may have called us
        watch.thread.join(JOIN_SECONDS)  # `on_failure` may hang
    shutil.rmtree(folder, ignore_errors=True)


def _run_worker(target: Callable[..., None], rank: int, link: socket.socket, folder: Path, *args: Any) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # rank 0 says the same
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        target(rank, link, folder, *args)
    except BaseException:
        with suppress(OSError):
            link.sendall(traceback.format_exc().encode())
        time.sleep(0.5)  # if our parent has ended, which may be why we failed, its folder is being removed
        os._exit(1)  # no clean exit, which could wait for other ranks
    os._exit(0)  # at once; there is nothing left to be freed


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a spawned process"
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@contextmanager
def _blocked_interrupt() -> Iterator[None]:
    """Ctrl-C reaches this thread, and what it starts here, only when the scope is left; what it started, never."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def postponed_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the scope is left: what several ranks do together cannot be left in the middle.

    A second Ctrl-C does not wait.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    caught: list[tuple[Any, ...]] = []

    def handle(*args: Any) -> None:
        caught.append(args)
        if len(caught) > 1:
            previous(*args)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        previous(*caught[0])
