"""Runs a replica: an engine in a process of its own, which answers the requests that the parent sends.

While steps run, one thread reads the pipe, and another compiles the grammars of requests that come. Between two steps
the main thread takes what they have ready. It waits for the parent only when it has nothing to run.
"""

import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from nanoinfer.engine.engine import Action, Recipient
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import NanoinferError, WorkerError
from nanoinfer.executor.shm_ring import Ring, RingReader
from nanoinfer.garbage import rare_collections
from nanoinfer.loading import LoadedEngine, ModelFiles, load_engine
from nanoinfer.lora.lora_request import LoRARequest
from nanoinfer.lora.registry import Adapter, Loader
from nanoinfer.outputs import RequestOutput, StreamChunk
from nanoinfer.replicas.packed_outputs import keep_states, pack_chunks, pack_outputs
from nanoinfer.replicas.replica_messages import (
    Act,
    Call,
    Changes,
    Drop,
    Listen,
    Logged,
    Ready,
    ReceivedRequest,
    Reply,
    Requests,
    unpack_requests,
)
from nanoinfer.text.arguments import Errors

logger = logging.getLogger("nanoinfer")

METRICS_SECONDS = 0.1  # the parent hears of the work this often, and whenever something has finished


def run_replica(
    rank: int,
    link: socket.socket,
    folder: Path,
    connection: Connection,
    ring: Ring,
    index: int,
    files: ModelFiles,
    num_threads: int,
    log_level: int,
) -> None:
    """Run in a process of its own: load the model, and serve the parent until it closes the pipe.

    index: which of the replicas this is. ring: brings new weights. num_threads: of PyTorch on a CPU.
    """
    torch.set_num_threads(num_threads)
    # For further ranks, which divide it by the number of ranks: see `run_worker`.
    os.environ["OMP_NUM_THREADS"] = str(num_threads * files.config.tensor_parallel_size)
    # Python lets no daemon start processes. This one ends with its parent, and its ranks with it.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sender = Sender(connection)
    logger.setLevel(max(log_level, logging.WARNING))  # the parent logs the loading, once
    logger.propagate = False
    logger.addHandler(LogSender(sender))
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            loaded = load_engine(files)
    except NanoinferError as error:  # what a user can mend is raised in the parent
        error.__cause__ = error.__context__ = None
        sender.send(Reply(error, None))
        return
    texts = [str(one.message) for one in given if one.category is UserWarning]
    sender.send(Ready(loaded.max_model_len, loaded.info, loaded.seconds, texts))
    replica = Replica(loaded, connection, sender, RingReader(ring, index, link))
    replica.run()
    loaded.engine.close()


class Sender:
    """Sends messages to the parent, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            # Of an array, `Connection.send` makes two copies; this makes one.
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class LogSender(logging.Handler):
    """Sends log records to the parent, which logs them."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the parent is gone
            self._sender.send(Logged(record.levelno, record.getMessage()))


class Replica:
    """Serves the parent's messages between the steps of an engine."""

    def __init__(self, loaded: LoadedEngine, connection: Connection, sender: Sender, weights: RingReader) -> None:
        self._loaded, self._weights = loaded, weights
        assert isinstance(loaded.engine, LLMEngine), "a replica has the engine of one process"
        self._engine = loaded.engine
        self._connection, self._send = connection, sender.send
        self._read_messages: SimpleQueue[Any] = SimpleQueue()  # None at the end
        self._received: SimpleQueue[Any] = SimpleQueue()  # likewise; requests are ready to be queued, errors are raised
        self._outputs: list[RequestOutput] = []
        self._chunks: deque[StreamChunk] = deque()
        self._told = 0.0  # when the parent was last told of the work
        self._end_events: Callable[[], None] | None = None
        self._adapters: dict[int, Adapter] = {}  # by the parent's numbers
        self._calls: dict[str, Callable[..., None]] = {
            "limit": self._limit,
            "reset_prefix_cache": loaded.queue.reset_prefix_cache,
            "sleep": loaded.control.sleep,
            "wake_up": loaded.control.wake_up,
            "check_weights": self._check_weights,
            "update_weights": self._update_weights,
            "end_update": lambda: None,  # of one that this replica has not begun
            "keep_adapter": self._keep_adapter,
            "drop_adapter": self._drop_adapter,
        }

    @rare_collections()
    def run(self) -> None:
        """Serve the parent until it closes the pipe."""
        for work in (self._read, self._prepare):
            threading.Thread(target=work, name="nanoinfer pipe", daemon=True).start()
        engine = self._engine
        while self._serve(wait=engine.is_finished() or engine.num_only_paused() > 0):
            if not engine.is_finished():
                is_ready = engine.check_open(is_for_steps=False).unready_reason is None
                engine.step() if is_ready else engine.settle()  # one that sleeps still ends what is aborted
            self._report()

    def _read(self) -> None:
        """Read messages until the pipe is closed, at once: the parent waits while a pipe is full."""
        try:
            while True:
                self._read_messages.put(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:  # which the main thread raises
            self._read_messages.put(error)
        self._read_messages.put(None)

    def _prepare(self) -> None:
        """Make requests ready to be queued, which may take long."""
        message: Any = ()
        while message is not None:
            message = self._read_messages.get()
            try:
                self._received.put(self._unpack(message) if isinstance(message, Requests) else message)
            except Exception as error:  # likewise
                self._received.put(error)

    def _unpack(self, message: Requests) -> list[ReceivedRequest]:
        """Unpack requests and compile what limits their tokens. The parent has found them all to be right."""
        received = unpack_requests(message, keep_states)
        requests = {index: one.prepared for index, one in enumerate(received)}
        errors: Errors = {index: one.error for index, one in requests.items() if one.error is not None}
        self._loaded.constraints.add_constraints(requests, errors)
        for index, error in errors.items():
            requests[index].error = error
            logger.warning("request %d ends in an error: %s", received[index].request_id, error)
        return received

    def _serve(self, wait: bool) -> bool:
        """Do what the received messages ask for; return False at the end. wait: whether to wait for a message."""
        while True:
            try:
                message = self._received.get(wait)
            except Empty:
                return True
            wait = False
            match message:
                case None:
                    return False
                case Exception():
                    raise message
                case list():
                    recipients = Recipient(self._outputs), Recipient(self._outputs, self._chunks)
                    for request_id, prepared, is_streamed, is_aborted in message:
                        prepared.adapter = self._adapters.get(prepared.adapter)
                        self._engine.add_request(request_id, prepared, recipients[is_streamed])
                        if is_aborted:
                            self._engine.act_later(Action.ABORT, [request_id])
                case Act(action, request_ids):
                    self._engine.act_later(action, request_ids)
                case Drop(request_ids):
                    self._engine.abort(request_ids)
                case Listen(is_wanted):
                    self._send_events(is_wanted)
                case Call(name, arguments):
                    self._answer(self._calls[name], *arguments)

    def _report(self) -> None:
        """Send the outputs and events of the last step."""
        if self._chunks:
            self._send(pack_chunks(self._chunks))
            self._chunks.clear()
        if self._end_events is not None and self._engine.is_finished():
            changes, _ = self._engine.events.take_rest()
            if changes:
                self._send(Changes(changes))
        now = time.monotonic()
        if self._outputs or self._engine.is_finished() or now - self._told > METRICS_SECONDS:
            self._send(self._engine.metrics())
            self._told = now
        if self._outputs:
            self._send(pack_outputs(self._outputs))
            self._outputs.clear()

    def _answer(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function, and send a Reply when it has ended."""
        error = None
        try:
            function(*arguments)
        except Exception as raised:
            raised.__cause__ = raised.__context__ = raised.__traceback__ = None
            error = raised
        runner = self._engine.runner
        self._send(Reply(error, None if runner is None else runner.unready_reason))

    def _limit(self, max_model_len: int) -> None:
        """Let no sequence have more tokens than the replica with the least memory can hold."""
        self._engine.scheduler.max_model_len = max_model_len

    def _send_events(self, are_wanted: bool) -> None:
        """Send a StepEvent for each step from now on, or no more."""
        if are_wanted and self._end_events is None:
            self._end_events = self._engine.on_step(self._send)
        elif not are_wanted and self._end_events is not None:
            self._end_events()
            self._end_events = None

    def _keep_adapter(self, number: int, folder: Path) -> None:
        """Read an adapter, and keep it. Raises ModelError for one that cannot be served."""
        self._engine.check_open(is_for_steps=False)
        loader = self._adapter_loader
        loader.keep_adapter(number, folder, loader.read_adapter(folder))
        self._adapters[number] = Adapter(LoRARequest(f"adapter {number}", number, str(folder)), number)

    def _drop_adapter(self, number: int) -> None:
        if adapter := self._adapters.pop(number, None):
            adapter.is_removed = True
            self._adapter_loader.drop_adapter(number)

    @property
    def _adapter_loader(self) -> Loader:
        assert self._loaded.adapters is not None, "only an engine with enable_lora has adapters"
        return self._loaded.adapters.loader

    def _check_weights(self, weights: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        """Raise ModelError for a tensor that cannot take the place of the weight of its name."""
        for name, dtype, shape in weights:
            self._engine.check_open(is_for_steps=False).weights.check(name, torch.empty(shape, dtype=dtype))

    def _update_weights(self) -> None:
        """Copy the weights that the parent sends, and send a Reply after each; the caller sends the last one."""
        self._loaded.control.update_weights(self._new_weights())

    def _new_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._answer(lambda: None)  # nothing stands in the way
        while isinstance(message := self._received.get(), Call) and message.name == "weight":
            name, dtype, shape = message.arguments
            values = torch.empty(shape, dtype=dtype)
            flat = values.view(-1).view(torch.uint8)
            flat.copy_(torch.from_numpy(self._weights.receive_bytes(len(flat))))
            yield name, values
            self._answer(lambda: None)
        # The end of the pipe, or an error of what reads it: `_serve` ends the replica.
        if not isinstance(message, Call):
            self._received.put(message)
            raise WorkerError("the update of weights was cut short")
