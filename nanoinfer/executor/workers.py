"""Processes that work for this one: how they start, how their end is noticed, and how everything of them is cleaned up.

Each worker has a socket to us. We may write to it; it reports b"+" for each stage of its start that it has passed, and
the traceback of an error that ends it. Whichever side ends, the other finds the end of the file.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from nanoinfer.errors import ConfigError, NanoinferError, WorkerError

EXIT_SECONDS = 10.0  # of patience with a worker that was told to end
EXPLANATION_SECONDS = 2.0  # a worker's end may show in an error here before it shows in its socket
JOIN_SECONDS = 3.0
NO_MAIN_GUARD = 79  # exit code of a worker whose import of the user's script would start an engine
PASSED = b"+"


class Workers:
    """Ranks 1 to `size` - 1, each running `target(rank, link, folder, *args)` in a spawned process.

    links: a socket to each of them. folder: a private one, for all ranks; it goes with the workers.
    on_failure: called when the first worker ends before it should, from a thread that reads what they report.
    That thread keeps this object alive, so it must be closed.
    """

    def __init__(self, size: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # We are a worker that is still importing the user's script. Our parent explains.
            raise SystemExit(NO_MAIN_GUARD)
        if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
            raise ConfigError(
                f"tensor_parallel_size={size} spawns processes that import this script, which was read from stdin; run "
                "it from a file"
            )
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="nanoinfer-"))
        self.links: list[socket.socket] = []
        self.on_failure: Callable[[], object] = lambda: None
        self._owner = os.getpid()
        self._processes: list[SpawnProcess] = []
        self._reports = dict.fromkeys(range(1, size), b"")  # by rank
        self._failure = ""  # why the first worker has ended
        self._changed = threading.Condition()  # of the two above
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
        process = spawn(target=_run_worker, args=arguments, name=f"nanoinfer rank {rank}", daemon=True)
        # What is blocked here is so in the worker too, which inherits it: Ctrl-C is only ours.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._processes.append(process)

    @property
    def are_ours(self) -> bool:
        """False in a fork of the process that started them, which must leave them alone."""
        return os.getpid() == self._owner

    @property
    def have_failed(self) -> bool:
        return bool(self._failure)

    def check(self) -> None:
        """Raise WorkerError if a worker has ended."""
        if self.have_failed:
            raise WorkerError(self._failure)

    def explanation(self, error: BaseException) -> BaseException:
        """The WorkerError that is behind `error`, an error of the communication, say; or else `error` itself."""
        seconds = 0.0 if isinstance(error, (NanoinferError, KeyboardInterrupt)) else EXPLANATION_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: self.have_failed, seconds)
        if isinstance(error, WorkerError) or not self.have_failed:
            return error
        explanation = WorkerError(self._failure)
        explanation.__cause__ = error
        return explanation

    def wait_for_stage(self, stage: int) -> None:
        """Return when all workers have passed their `stage`-th stage, counted from 1. Raises WorkerError."""
        passed = stage * PASSED
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or all(report.startswith(passed) for report in self._reports.values())
            )
        self.check()

    def hang_up(self) -> None:
        """Write no more: each worker finds the end of the file when it has read all that was written, and ends."""
        self._is_closing = True
        for link in self.links:
            with suppress(OSError):  # it has ended already
                link.shutdown(socket.SHUT_WR)

    def close(self, patience: float = EXIT_SECONDS) -> None:
        """Let the workers end by themselves, and leave nothing of them; closing twice is fine.

        patience: seconds after which those that have not ended are killed; if one has failed, that is at once.
        """
        if self._is_closed or not self.are_ours:
            return
        self._is_closed = True
        self.hang_up()
        deadline = time.monotonic() + (0.0 if self.have_failed else patience)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join()
            with suppress(ValueError):  # our thread has just taken its exit code
                process.close()
        if self._thread.ident is None:  # never started
            for link in self.links:
                link.close()
        elif self._thread is not threading.current_thread():  # where the garbage collector may have called us
            self._thread.join(JOIN_SECONDS)  # `on_failure` may hang
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        """Read what workers report until all have ended, and notice the first that does so before it should."""
        ranks = {link: rank for rank, link in enumerate(self.links, start=1)}
        while ranks:
            for link in wait(list(ranks)):
                assert isinstance(link, socket.socket)
                with suppress(ConnectionResetError):  # it ended with steps unread
                    if received := link.recv(65536):
                        with self._changed:
                            self._reports[ranks[link]] += received
                            self._changed.notify_all()
                        continue
                rank = ranks.pop(link)
                link.close()
                if not (self._is_closing or self.have_failed):
                    failure = self._explain(rank)
                    with self._changed:
                        self._failure = failure
                        self._changed.notify_all()
                    self.on_failure()

    def _explain(self, rank: int) -> str:
        process, report = self._processes[rank - 1], self._reports[rank].lstrip(PASSED).decode(errors="replace")
        if not report:
            process.join(1.0)
        exitcode, details = process.exitcode, ""
        if exitcode == NO_MAIN_GUARD:
            return (
                f"tensor_parallel_size={self.size} spawns processes that import this script, and it makes an LLM when "
                'it is imported; put the code that it runs under `if __name__ == "__main__":`'
            )
        if report:
            ended, details = "failed", f". Its traceback:\n{report}"
        elif exitcode is not None and exitcode < 0:
            names = {known.value: known.name for known in signal.Signals}
            name = names.get(-exitcode, f"signal {-exitcode}")
            ended = f"was ended by {name}" + " (by the system, if it was out of memory)" * (name == "SIGKILL")
        else:
            ended = f"ended with exit code {exitcode}, for a reason that may be on stderr"
        rank_of = f"rank {rank} of tensor_parallel_size={self.size}"
        return f"{rank_of} {ended}; this engine is closed; make a new LLM{details}"


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
def postponed_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the scope is left: what several ranks do together cannot be left in the middle.

    A second Ctrl-C does not wait.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(previous) or isinstance(previous, _Postponed):
        yield  # Ctrl-C comes to another thread, or is not Python's, or a scope around this one waits already
        return
    handler = _Postponed(previous)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if handler.caught:
        previous(*handler.caught[0])


class _Postponed:
    """A signal handler that keeps the first one for later."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        self.caught: list[tuple[Any, ...]] = []
        self._handle = handle

    def __call__(self, *args: Any) -> None:
        self.caught.append(args)
        if len(self.caught) > 1:
            self._handle(*args)
