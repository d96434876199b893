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
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.interfaces import Action, Engine, Recipient
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.request_queue import TURN_SECONDS
from nanoinfer.errors import EngineStateError, NanoinferError, WorkerError, closed_by, closed_error
from nanoinfer.executor.processes import Failure
from nanoinfer.executor.shm_ring import Ring
from nanoinfer.outputs import CompletionOutput, RequestOutput, failed_chunks
from nanoinfer.replicas.dispatcher import Dispatcher, QueuedRequest, expected_work
from nanoinfer.replicas.handles import ReplicaCallbacks, ReplicaHandle, ReplicaMetrics, end_replicas, sum_metrics
from nanoinfer.replicas.packed_outputs import unpack_chunks, unpack_outputs
from nanoinfer.replicas.replica_messages import (
    Act,
    Call,
    Changes,
    Chunks,
    Drop,
    Event,
    Listen,
    Logged,
    Metrics,
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


@dataclass(slots=True, eq=False)
class UnfinishedRequest:
    """A request that was not returned, and where its output goes."""

    queued: QueuedRequest
    to: Recipient
    arrival_time: float = field(default_factory=time.perf_counter)
    sent: float = 0.0
    streamed: dict[int, bool] = field(default_factory=dict)  # sample -> whether the stream has its last chunk


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
        self.callbacks = ReplicaCallbacks()
        self.ring = ring
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._requests: dict[int, UnfinishedRequest] = {}
        self._paused: set[int] = set()  # unfinished requests
        self._held_back: dict[int, QueuedRequest] = {}  # paused requests that are on no replica
        self._aborting: set[int] = set()
        self._losses: deque[str] = deque()  # what is to be warned of
        self._listens = self._is_closed = False
        self._failure: NanoinferError | None = None  # what calls raise if an error has closed it
        self._checked = 0.0  # when it was looked for replicas that hang
        self._max_step_seconds = MAX_STEP_SECONDS[device_type]
        self._finalizer = weakref.finalize(self, end_replicas, replicas)

    # -------- What RequestQueue asks for ------------------------------------------------------------------------------

    def add_request(self, request_id: int, prepared: PreparedRequest, to: Recipient) -> None:
        """Queue a request; one that has an error ends with it at once."""
        self.guard.check()
        if prepared.error is not None:
            self._refuse(request_id, prepared, to)
            return
        queued = QueuedRequest(request_id, prepared, expected_work(prepared, self._max_model_len))
        self._requests[request_id] = UnfinishedRequest(queued, to)
        self.dispatcher.add(queued)
        self._pending_actions.extend((action, request_id) for action in self.reserved_ids.take(request_id))

    def step(self) -> None:
        """Send requests to replicas that run short, and hand over what has come back; wait a moment if nothing has."""
        self.check_open()
        with self.guard, self.whole_messages():
            self._listen()
            self._apply_actions()
            self._feed()
            self.receive(SHORT_TURN_SECONDS if self.reserved_ids else TURN_SECONDS)
            self._lose_hanging()
            self._feed()
        while self._losses:
            warnings.warn(self._losses.popleft(), RuntimeWarning, stacklevel=2)
        self.callbacks.call()

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop these requests at once; finished ones are ignored."""
        on_replicas: dict[int, list[int]] = {}
        for request_id in request_ids:
            found = self._requests.get(request_id)
            if found is not None:
                replica = found.queued.replica
                self._forget(found)
                if replica is not None:
                    on_replicas.setdefault(replica, []).append(request_id)
        for index, ids in on_replicas.items():
            self.replicas[index].send(Drop(ids))

    def num_only_paused(self) -> int:
        """Return how many requests are paused if no others are left, else 0."""
        is_only = len(self._paused) == len(self._requests) and not self.reserved_ids
        return len(self._paused) if is_only else 0

    def metrics(self) -> ReplicaMetrics:
        """Return the work of all replicas so far, and what they hold."""
        return sum_metrics([replica.metrics for replica in self.replicas])

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

    def settle(self) -> int:
        """Wait for the outputs of aborted requests; return how many requests are still unfinished."""
        self._apply_actions()
        while self._aborting:
            self.receive(TURN_SECONDS)
            self._lose_hanging()
            self._apply_actions()  # of a replica that has ended
        return self.num_unfinished()

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

    def _listen(self) -> None:
        """Tell replicas whether their events are wanted, if that has changed."""
        if self.callbacks.are_wanted != self._listens:
            self._listens = self.callbacks.are_wanted
            for replica in self.alive():
                replica.send(Listen(self._listens))

    # -------- Requests ------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Send requests to the replicas that run short."""
        taken: dict[int, list[UnfinishedRequest]] = {}
        while found := self.dispatcher.take():
            replica, queued = found
            taken.setdefault(replica, []).append(self._requests[queued.request_id])
        for index, requests in taken.items():
            self._send_requests(self.replicas[index], requests)

    def _send_requests(
        self, replica: ReplicaHandle, requests: list[UnfinishedRequest], are_aborted: bool = False
    ) -> None:
        now = time.perf_counter()
        for request in requests:
            request.sent = now
        queued = [request.queued for request in requests]
        replica.send(pack_requests(queued, [request.to.chunks is not None for request in requests], are_aborted))

    def _apply_actions(self) -> None:
        """Do what was asked for by `act_later`, in its order."""
        while self._pending_actions:
            action, request_id = self._pending_actions.popleft()
            found = self._requests.get(request_id)
            if found is None:
                continue
            queued = found.queued
            if action is Action.PAUSE:
                self._paused.add(request_id)
                if self.dispatcher.remove(request_id):
                    self._held_back[request_id] = queued
                elif queued.replica is not None:
                    self.dispatcher.pause(queued)
            elif action is Action.RESUME:
                self._paused.discard(request_id)
                if self._held_back.pop(request_id, None):
                    self.dispatcher.add(queued)
                elif queued.replica is not None:
                    self.dispatcher.resume(queued)
            else:
                self._aborting.add(request_id)
                self._paused.discard(request_id)
                if self._held_back.pop(request_id, None) or self.dispatcher.remove(request_id):
                    replica = self.dispatcher.give(queued)  # which makes the output of an aborted request
                    self._send_requests(self.replicas[replica], [found], are_aborted=True)
                    continue
            if queued.replica is not None:
                self.replicas[queued.replica].send(Act(action, [request_id]))

    def _take_in(self, replica: ReplicaHandle, message: Any) -> None:
        match message:
            case Outputs():
                found = [self._requests.get(request_id) for request_id in message.requests[:, 0].tolist()]
                ours = [one if one and one.queued.replica == replica.index else None for one in found]
                queued = [one.queued if one else None for one in ours]
                waited = [one.sent - one.arrival_time if one else 0.0 for one in ours]
                for one, output in zip(ours, unpack_outputs(message, queued, waited, self._tokenizer), strict=True):
                    if one is not None and output is not None:
                        one.to.outputs.append(output)
                        self._forget(one)  # now: until its output is there, it counts as unfinished
            case Chunks():
                self._hand_on(message)
            case Metrics(metrics):
                replica.metrics = metrics
            case Reply():
                replica.replies.append(message)
            case Event(event):
                self.callbacks.arrive(replica.index, event)
            case Changes(changes):
                self.callbacks.add_changes(replica.index, changes)
            case Logged(level, text):
                logger.log(level, "replica %d: %s", replica.index, text)

    def _hand_on(self, message: Chunks) -> None:
        """Give the chunks of a replica to the streams that wait for them."""
        ids = {*message.columns[:, 0].tolist()} & self._requests.keys()
        index_of = {request_id: self._requests[request_id].to.prompt_index for request_id in ids}
        for chunk in unpack_chunks(message, index_of):
            found = self._requests[chunk.request_id]
            found.streamed[chunk.sample] = chunk.finish_reason is not None
            if found.to.chunks is not None:
                found.to.chunks.append(chunk)

    def _forget(self, request: UnfinishedRequest) -> None:
        request_id = request.queued.request_id
        del self._requests[request_id]
        self._paused.discard(request_id)
        self._aborting.discard(request_id)
        self._held_back.pop(request_id, None)
        if self.dispatcher.remove(request_id) is None and request.queued.replica is not None:
            self.dispatcher.finish(request.queued)

    # -------- The end of a replica ------------------------------------------------------------------------------------

    def _lose_hanging(self) -> None:
        """End replicas that have work and are silent for too long."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        working = {one.queued.replica for request_id, one in self._requests.items() if request_id not in self._paused}
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
        lost = [one for one in self._requests.values() if one.queued.replica == replica.index]
        self.dispatcher.close(replica.index)
        num_ended = 0
        for request in lost:
            queued = request.queued
            self.dispatcher.finish(queued)
            if request.streamed:
                num_ended += 1
                self._end_with_error(request, end.ended)
            elif queued.request_id in self._paused:
                self._held_back[queued.request_id] = queued
            else:
                self.dispatcher.add(queued)
                if queued.request_id in self._aborting:
                    self._pending_actions.append((Action.ABORT, queued.request_id))
        ended = f", and {num_ended} streams end with an error" if num_ended else ""
        others = "the other one" if len(self.alive()) == 1 else f"the {len(self.alive())} others"
        loss = f"{end.ended}; {len(lost) - num_ended} of its requests go to {others}{ended}{end.details}"
        logger.warning("%s", loss)
        self._losses.append(loss)

    def _end_with_error(self, request: UnfinishedRequest, error: str) -> None:
        prepared, request_id = request.queued.prepared, request.queued.request_id
        samples = range(prepared.sampling_params.n)
        if request.to.chunks is not None:
            left = (sample for sample in samples if not request.streamed.get(sample))
            request.to.chunks.extend(failed_chunks(request_id, request.to.prompt_index, left))
        outputs = [
            CompletionOutput(sample, "", [], "error", error=error, error_kind="worker_ended") for sample in samples
        ]
        request.to.outputs.append(RequestOutput(request_id, prepared.prompt, prepared.token_ids, 0, outputs))
        self._forget(request)
