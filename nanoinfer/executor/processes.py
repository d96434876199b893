"""Starts the worker processes, notices when one of them ends, and leaves nothing behind.

A socket connects each worker to this process. A worker sends b"+" for each stage of its start that it has passed, and
its traceback if an error ends it. What this process sends is up to the caller. When either side ends, for whatever
reason, the other one finds the end of the file.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from nanoinfer.errors import ConfigError, NanoinferError, WorkerError

EXIT_SECONDS = 10.0  # how long a worker that was told to end may take before it is killed
EXPLANATION_SECONDS = 2.0  # a worker's end may cause an error here before its socket shows it
JOIN_SECONDS = 3.0
NO_MAIN_GUARD = 79  # exit code of a worker in which the import of the user's script would start another engine
PASSED = b"+"


class Failure(NamedTuple):
    """Says how a worker has ended, and what it reported about that."""

    ended: str  # such as "rank 1 of tensor_parallel_size=2 was ended by SIGKILL"
    details: str = ""  # its traceback, if there is one
    remedy: str = "this engine is closed; make a new LLM"

    def __str__(self) -> str:
        return f"{self.ended}; {self.remedy}{self.details}"


class Workers:
    """Spawns ranks 1 to `size` - 1, each a process that runs `target(rank, link, folder, *args)`.

    option: what asks for the processes. name: what messages call the worker, where there is one and it is no rank.
    links: one socket for each worker. folder: a temporary folder for all ranks, removed when the workers have ended.
    on_failure: called once, when a worker ends before it should.

    A thread reads what the workers report, and calls `on_failure`. It keeps this object alive until `close` is called.
    """

    def __init__(
        self, size: int, target: Callable[..., None], args: tuple[Any, ...], option: str = "", name: str = ""
    ) -> None:
        self._option, self._name = option or f"tensor_parallel_size={size}", name
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # This is a worker that is still importing the user's script. The parent explains the exit code.
            raise SystemExit(NO_MAIN_GUARD)
        if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
            raise ConfigError(
                f"{self._option} spawns processes that import this script, which was read from stdin; run it from a "
                "file"
            )
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="nanoinfer-"))
        self.links: list[socket.socket] = []
        self.on_failure: Callable[[], object] = lambda: None
        self._owner = os.getpid()
        self._processes: list[SpawnProcess] = []
        self._reports = dict.fromkeys(range(1, size), b"")  # by rank
        self.failure: Failure | None = None  # why a worker has ended; of several workers, the first
        self._changed = threading.Condition()  # guards the two above
        self._is_closing = self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="nanoinfer watch", daemon=True)
        try:
            for rank in range(1, size):
                self._start(rank, target, args)
            self._thread.start()
        except BaseException:
            self.close(patience=0.0)
            raise

    def _start(self, rank: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.links.append(ours)
        arguments = (target, rank, theirs, self.folder, *args)
        spawn = multiprocessing.get_context("spawn").Process
        process = spawn(target=_run_worker, args=arguments, name=f"nanoinfer {self._name_of(rank)}", daemon=True)
        # The worker inherits the blocked signals: Ctrl-C, which goes to all processes, is for this one only, and so is
        # SIGTERM, which job schedulers send to all, if this one handles it.
        blocked = {signal.SIGINT, *([signal.SIGTERM] if callable(signal.getsignal(signal.SIGTERM)) else [])}
        resource_tracker.ensure_running()  # the first worker would start it, which unblocks both
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            with theirs:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._processes.append(process)

    @property
    def are_ours(self) -> bool:
        """Return whether this process started the workers. A fork of it must leave them alone."""
        return os.getpid() == self._owner

    def check(self) -> None:
        """Raise WorkerError if a worker has ended."""
        if self.failure is not None:
            raise WorkerError(str(self.failure))

    def explanation(self, error: BaseException) -> BaseException:
        """Return a WorkerError if the end of a worker has caused `error`, or else `error` itself.

        When a worker ends, rank 0 may first see an error of the communication. So this waits a moment for the report.
        """
        seconds = 0.0 if isinstance(error, (NanoinferError, KeyboardInterrupt)) else EXPLANATION_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
        if isinstance(error, WorkerError) or self.failure is None:
            return error
        explanation = WorkerError(str(self.failure))
        explanation.__cause__ = error
        return explanation

    def wait_for_stage(self, stage: int) -> None:
        """Wait until all workers have passed so many stages of their start. Raises WorkerError if one has ended."""
        passed = stage * PASSED
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure or all(report.startswith(passed) for report in self._reports.values())
            )
        self.check()

    def hang_up(self) -> None:
        """Close this side of the sockets. Each worker ends when it has read all that was sent before."""
        self._is_closing = True
        for link in self.links:
            with suppress(OSError):  # the worker has ended already
                link.shutdown(socket.SHUT_WR)

    def close(self, patience: float = EXIT_SECONDS) -> None:
        """Wait for the workers to end, and remove everything that belongs to them. Closing twice is fine.

        patience: seconds after which the workers are killed. If one has failed, they are killed at once.
        """
        if self._is_closed or not self.are_ours:
            return
        self._is_closed = True
        self.hang_up()
        deadline = time.monotonic() + (0.0 if self.failure else patience)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join()
            with suppress(ValueError):  # the thread is reading its exit code
                process.close()
        if self._thread.ident is None:  # never started
            for link in self.links:
                link.close()
        elif self._thread is not threading.current_thread():  # the garbage collector may call this in any thread
            self._thread.join(JOIN_SECONDS)  # not for ever: `on_failure` may hang
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        """Read what the workers report until all have ended."""
        ranks = {link: rank for rank, link in enumerate(self.links, start=1)}
        while ranks:
            for link in wait(list(ranks)):
                assert isinstance(link, socket.socket)
                received = b""
                with suppress(ConnectionResetError):  # the worker ended with packets unread
                    received = link.recv(65536)
                if received:
                    with self._changed:
                        self._reports[ranks[link]] += received
                        self._changed.notify_all()
                else:
                    link.close()
                    self._note_end(ranks.pop(link))

    def _note_end(self, rank: int) -> None:
        """Record the failure of a worker that has ended before it should, if it is the first."""
        if not (self._is_closing or self.failure):
            failure = self._explain(rank)
            with self._changed:
                self.failure = failure
                self._changed.notify_all()
            self.on_failure()

    def _name_of(self, rank: int) -> str:
        return self._name or f"rank {rank}"

    def _explain(self, rank: int) -> Failure:
        """Say why a worker has ended, from its report or its exit code."""
        process, report = self._processes[rank - 1], self._reports[rank].lstrip(PASSED).decode(errors="replace")
        if not report:
            process.join(1.0)
        exitcode, details = process.exitcode, ""
        if exitcode == NO_MAIN_GUARD:
            return Failure(
                f"{self._option} spawns processes that import this script, and it makes an LLM when it is imported",
                remedy='put the code that it runs under `if __name__ == "__main__":`',
            )
        if report:
            ended, details = "failed", f". Its traceback:\n{report}"
        elif exitcode is not None and exitcode < 0:
            names = {known.value: known.name for known in signal.Signals}
            name = names.get(-exitcode, f"signal {-exitcode}")
            ended = f"was ended by {name}" + " (by the system, if it was out of memory)" * (name == "SIGKILL")
        else:
            ended = f"ended with exit code {exitcode}, for a reason that may be on stderr"
        return Failure(f"{self._name_of(rank)} of {self._option} {ended}", details)


def _run_worker(target: Callable[..., None], rank: int, link: socket.socket, folder: Path, *args: Any) -> None:
    """Run in a worker from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # rank 0 gives the same warnings
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        target(rank, link, folder, *args)
    except BaseException:
        with suppress(OSError):
            link.sendall(traceback.format_exc().encode())
        time.sleep(0.5)  # if the parent's end is the cause, `_end_with_parent` is removing the folder
        os._exit(1)  # a clean exit could wait for other ranks
    os._exit(0)  # a clean exit would have nothing left to free


def _end_with_parent(folder: Path) -> None:
    """End this worker when its parent ends, and remove the folder that the parent can no longer remove."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a spawned process"
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
