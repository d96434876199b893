"""Several engines behind the interface of one: `LLM(..., data_parallel_size=N)`.

This process computes nothing. It numbers requests as one engine would, so that their seeds and tokens are the same, and
gives them to replicas as these run short (`replicas/dispatcher.py`). What comes back goes to the inboxes of the
callers.
"""

import logging
import time
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import Action, Engine, Recipient
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.proposer import Proposer
from nanoinfer.engine.request_queue import TURN_SECONDS
from nanoinfer.errors import (
    ConfigError,
    EngineStateError,
    NanoinferError,
    RequestError,
    WorkerError,
    closed_by,
    closed_error,
)
from nanoinfer.executor.processes import Failure
from nanoinfer.executor.shm_ring import Ring
from nanoinfer.metrics import EngineMetrics, StepEvent
from nanoinfer.replicas.dispatcher import Dispatcher, QueuedRequest, expected_work
from nanoinfer.replicas.handles import ReplicaEvents, ReplicaHandle, ReplicaMetrics, end_replicas, sum_metrics
from nanoinfer.replicas.packed_outputs import unpack_chunks, unpack_outputs
from nanoinfer.replicas.replica_messages import (
    Act,
    Call,
    Changes,
    Chunks,
    Drop,
    Listen,
    Logged,
    Outputs,
    Reply,
    pack_requests,
)
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer

logger = logging.getLogger("nanoinfer")

SHORT_TURN_SECONDS = 0.001  # while a call prepares requests that replicas may lack
MAX_MESSAGES = 64  # that are taken from a replica at a time, so that none waits for another one
# A replica that has work and sends nothing for so long hangs: a working one reports after a step. A replica of several
# ranks notices after 300 s itself that one hangs, and names the rank.
MAX_STEP_SECONDS = {"cuda": 330.0, "cpu": 1800.0}
CHECK_SECONDS = 1.0  # how often that is looked at


class ReplicatedEngine(Engine):
    """Does what an LLMEngine does, on several of them.

    replicas: processes that have loaded the model. ring: brings new weights to them. device_type: what they run on,
    "cuda" or "cpu". tokenizer: makes the texts of prompts' tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: list[ReplicaHandle],
        ring: Ring,
        max_model_len: int,
        device_type: str = "cpu",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(config)
        self.replicas = replicas
        self.dispatcher = Dispatcher(len(replicas), self.config.max_num_seqs)
        self.ring = ring
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._requests: dict[int, QueuedRequest] = {}
        self.events = ReplicaEvents()
        self._losses: deque[str] = deque()  # what is to be warned of
        self._listens = self._is_closed = False
        self._failure: NanoinferError | None = None  # what calls raise if an error has closed it
        self._checked = 0.0  # when it was looked for replicas that hang
        self._max_step_seconds = MAX_STEP_SECONDS[device_type]
        self._finalizer = weakref.finalize(self, end_replicas, replicas)

    # -------- What RequestQueue asks for ------------------------------------------------------------------------------

    def _queue(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> QueuedRequest:
        """Have a request wait for a replica."""
        if prepared.adapter is not None:
            prepared.adapter.enter(request_id)
        request = QueuedRequest(request_id, prepared, recipient, expected_work(prepared, self._max_model_len))
        self.dispatcher.add(request)
        return request

    def _step(self) -> None:
        """Send requests to replicas that run short, and hand over what has come back; wait a moment if nothing has."""
        self.check_open()
        with self.whole_messages():
            self._tell_whether_listening()
            self._apply_actions()
            self._feed()
            self.receive(SHORT_TURN_SECONDS if self.reserved_ids else TURN_SECONDS)
            self._lose_hanging()
            self._feed()
        while self._losses:
            warnings.warn(self._losses.popleft(), RuntimeWarning, stacklevel=4)

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop these requests at once; finished ones are ignored."""
        on_replicas: dict[int, list[int]] = {}
        for request_id in self._requests.keys() & request_ids:
            request = self._requests[request_id]
            if request.replica is not None:
                on_replicas.setdefault(request.replica, []).append(request_id)
            self._forget(request)
        for index, ids in on_replicas.items():
            self.replicas[index].send(Drop(ids))

    def num_only_paused(self) -> int:
        is_only = not self.reserved_ids and all(request.is_paused for request in self._requests.values())
        return len(self._requests) if is_only else 0

    def metrics(self) -> ReplicaMetrics:
        return sum_metrics([replica.metrics for replica in self.replicas])

    @property
    def proposer(self) -> Proposer | None:
        """None: a proposer needs the sequences, which are in the processes of the replicas."""
        return None

    @proposer.setter
    def proposer(self, proposer: Proposer | None) -> None:
        if proposer is not None:
            raise ConfigError(
                f"data_parallel_size={self.config.data_parallel_size} runs steps in other processes, where "
                f"{type(proposer).__name__} sees no sequence; use data_parallel_size=1 with a proposer"
            )

    def reset_prefix_cache(self) -> None:
        with self.whole_messages():
            self.call("reset_prefix_cache")

    def close(self) -> None:
        """End the replicas. Closing twice is fine; other calls then raise EngineClosedError."""
        self.guard.check()
        self._failure = None
        self.end()

    def check_open(self, is_for_steps: bool = True) -> None:
        """Raise what has closed the engine, or EngineClosedError; EngineStateError if no replica can run a step."""
        if self._is_closed or not self._finalizer.alive:
            raise closed_error(self._failure)
        reason = next(filter(None, (one.unready_reason for one in self.alive())), None)
        if is_for_steps and reason:
            raise EngineStateError(reason)

    def _settle(self) -> None:
        with self.whole_messages():
            self._apply_actions()
            while any(request.is_aborted for request in self._requests.values()):
                self.receive(TURN_SECONDS)
                self._lose_hanging()
                self._apply_actions()  # of a replica that has ended

    # -------- What the rest of this folder asks for -------------------------------------------------------------------

    def alive(self) -> list[ReplicaHandle]:
        return [replica for replica in self.replicas if replica.is_alive]

    def call(self, name: str, *arguments: Any) -> list[Exception]:
        """Have all replicas do something between two steps; return what they raised. See `Replica` in replica.py."""
        for replica in self.alive():
            replica.send(Call(name, arguments))
        return self.collect_replies()

    def collect_replies(self) -> list[Exception]:
        """Wait for a Reply of each replica; return the errors."""
        while waiting := [replica for replica in self.alive() if not replica.replies]:
            self.receive(TURN_SECONDS, waiting)
        errors = []
        for replica in self.alive():
            reply = replica.replies.popleft()
            replica.unready_reason = reply.unready_reason
            if reply.error is not None:
                errors.append(reply.error)
        return errors

    @contextmanager
    def whole_messages(self) -> Iterator[None]:
        """Guard a scope that sends or receives: an error in the middle of a message closes the engine."""
        with postponed_interrupt():
            try:
                yield
            except BaseException as error:
                self.end(error)
                raise

    def end(self, error: BaseException | None = None) -> None:
        """End all replicas. error: why, if not by a user's call."""
        if error is not None and not self._is_closed:
            self._failure = closed_by(error)
        self._is_closed = True
        self._finalizer()

    def receive(self, seconds: float, replicas: list[ReplicaHandle] | None = None) -> None:
        """Take in what replicas have sent; if there is nothing, wait for it at most `seconds`."""
        connections = {replica.connection: replica for replica in replicas or self.alive()}
        for connection in wait([*connections], seconds if replicas or self._requests else 0.0):
            replica = connections[connection]  # type: ignore[index]
            replica.active = time.monotonic()
            try:
                for _ in range(MAX_MESSAGES):
                    self._take_in(replica, replica.connection.recv())
                    if not replica.connection.poll():
                        break
            except (EOFError, OSError):
                self._lose(replica, replica.explain_end())

    def _tell_whether_listening(self) -> None:
        """Tell replicas whether their events are wanted, if that has changed."""
        if bool(self._callbacks) != self._listens:
            self._listens = bool(self._callbacks)
            for replica in self.alive():
                replica.send(Listen(self._listens))

    # -------- Requests ------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Send requests to the replicas that run short."""
        taken: dict[int, list[QueuedRequest]] = {}
        while placed := self.dispatcher.take():
            replica, request = placed
            taken.setdefault(replica, []).append(request)
        for index, requests in taken.items():
            self._send_requests(index, requests)

    def _send_requests(self, replica: int, requests: list[QueuedRequest], are_aborted: bool = False) -> None:
        now = time.perf_counter()
        for request in requests:
            request.sent = now
        self.replicas[replica].send(pack_requests(requests, are_aborted))

    def _apply_actions(self) -> None:
        """Do what was asked for by `act_later`, in its order."""
        for action, request_id in self._take_actions():
            request = self._requests[request_id]
            if request.is_aborted and action is not Action.ABORT:
                continue  # its output is on its way
            was_paused, request.is_paused = request.is_paused, action is Action.PAUSE
            request.is_aborted |= action is Action.ABORT
            if request.replica is not None:
                if action is Action.PAUSE:
                    self.dispatcher.pause(request)
                elif action is Action.RESUME:
                    self.dispatcher.resume(request)
                self.replicas[request.replica].send(Act(action, [request_id]))
            elif action is Action.RESUME:
                if was_paused:
                    self.dispatcher.add(request)
            else:
                self.dispatcher.remove(request_id)
                if action is Action.ABORT:  # a replica makes the output of an aborted request
                    self._send_requests(self.dispatcher.give(request), [request], are_aborted=True)

    def _take_in(self, replica: ReplicaHandle, message: Any) -> None:
        match message:
            case Outputs():
                for request, output in unpack_outputs(message, self._requests, self._tokenizer):
                    request.recipient.outputs.append(output)
                    self._forget(request)  # now: until its output is there, it counts as unfinished
            case Chunks():
                for request, chunk in unpack_chunks(message, self._requests):
                    request.streamed[chunk.sample] = chunk.finish_reason is not None
                    if request.recipient.chunks is not None:
                        request.recipient.chunks.append(chunk)
            case EngineMetrics():
                replica.metrics = message
            case StepEvent():
                self.events.arrive(replica.index, message)
            case Changes(changes):
                self.events.add_changes(replica.index, changes)
            case Reply():
                replica.replies.append(message)
            case Logged(level, text):
                logger.log(level, "replica %d: %s", replica.index, text)

    def _forget(self, request: QueuedRequest) -> None:
        del self._requests[request.request_id]
        if request.prepared.adapter is not None:
            request.prepared.adapter.users.remove(request.request_id)
        if request.replica is None:
            self.dispatcher.remove(request.request_id)
        else:
            self.dispatcher.finish(request)

    # -------- The end of a replica ------------------------------------------------------------------------------------

    def _lose_hanging(self) -> None:
        """End replicas that have work and are silent for too long."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        working = {request.replica for request in self._requests.values() if not request.is_paused}
        for replica in self.alive():
            if replica.index in working and now - replica.active > self._max_step_seconds:
                count = self.config.data_parallel_size
                seconds = f"{self._max_step_seconds:g} s"
                name = f"replica {replica.index} of data_parallel_size={count}"
                self._lose(replica, Failure(f"{name} hangs: it has not ended a step for {seconds}, and was killed"))

    def _lose(self, replica: ReplicaHandle, end: Failure) -> None:
        """Go on without a replica that has ended: others compute its requests again. Raises WorkerError without others.

        A stream that has tokens of it ends with an error, so that nothing comes twice.
        """
        replica.is_alive = False
        replica.connection.close()
        replica.workers.close(patience=0.0)
        replica.metrics.num_used_blocks = replica.metrics.num_blocks = 0
        self.ring.give_up(replica.index)
        if not self.alive():
            raise WorkerError(str(end))
        lost = [request for request in self._requests.values() if request.replica == replica.index]
        self.dispatcher.close(replica.index)
        num_ended = 0
        for request in lost:
            self.dispatcher.finish(request)
            if request.streamed:
                num_ended += 1
                ended = {sample for sample, is_ended in request.streamed.items() if is_ended}
                request.prepared.error = RequestError(end.ended, "worker_ended")
                self._refuse(request.request_id, request.prepared, request.recipient, ended)
                self._forget(request)
            elif not request.is_paused:
                self.dispatcher.add(request)
                if request.is_aborted:
                    self._pending_actions.append((Action.ABORT, request.request_id))
        streams = f", and {num_ended} streams end with an error" if num_ended else ""
        others = "the other one" if len(self.alive()) == 1 else f"the {len(self.alive())} others"
        loss = f"{end.ended}; {len(lost) - num_ended} of its requests go to {others}{streams}{end.details}"
        logger.warning("%s", loss)
        self._losses.append(loss)
