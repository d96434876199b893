"""The way to the engine: `LLM`, asyncio and batch jobs add requests, run steps and collect outputs.

A caller, such as `RequestQueue.complete`, does this:

    inbox = Inbox()
    queue.add_requests(preparer.prepare(["Hello"]), inbox)
    while not inbox.is_complete:
        queue.step()
    outputs = queue.collect(inbox)
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter

from nanoinfer.engine.engine import Action, Engine, Recipient, Steps
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.preparer import Portions
from nanoinfer.outputs import RequestOutput, StreamChunk
from nanoinfer.text.arguments import OnFinish
from nanoinfer.text.prompts import PreparedRequest

logger = logging.getLogger("nanoinfer")

TURN_SECONDS = 0.01  # how long a thread waits for its turn; another thread's step serves its requests too
PATIENCE_SECONDS = 1.0  # when only paused requests were left for so long, a warning is logged


class Inbox:
    """Holds the outputs of one caller's requests in the order in which they finished, and the chunks of streams.

    vLLM calls this a RequestOutputCollector. is_stream: whether chunks are wanted.
    """

    def __init__(self, is_stream: bool = False) -> None:
        self.request_ids: set[int] = set()  # added, and not collected
        self.outputs: list[RequestOutput] = []
        self.chunks: deque[StreamChunk] = deque()
        self.is_stream = is_stream
        self.is_abandoned = False  # whether its caller has stopped waiting

    @property
    def is_complete(self) -> bool:
        """Whether every request has finished."""
        return len(self.outputs) == len(self.request_ids)

    def unfinished_ids(self) -> set[int]:
        return self.request_ids - {output.request_id for output in self.outputs}


class RequestQueue:
    """Takes requests and runs them in steps. A step serves the requests of all callers, whichever thread runs it.

    Any thread may call any method. steps: runs the requests instead of the engine. lock: held for each step, and while
    requests are added or dropped; whoever holds it keeps steps waiting. All queues of an engine share one.
    """

    def __init__(self, engine: Engine, steps: Steps | None = None, lock: "threading.RLock | None" = None) -> None:
        self.engine, self._steps = engine, steps or engine
        self.lock = lock or threading.RLock()
        # A full running set, and as many requests that wait, from which free rows are refilled in one step.
        num_rows = engine.config.data_parallel_size * engine.config.max_num_seqs
        self.capacity = 2 * num_rows  # requests that are worth having here at a time
        self._only_paused_since: float | None = None  # perf_counter; None while other requests are left
        self._has_warned = False

    def complete(
        self, portions: Portions, show: Callable[[int], object], on_finish: OnFinish | None = None
    ) -> list[RequestOutput]:
        """Run the requests of a call to their end, and return the outputs in the order in which they were queued.

        show: is called after each step with the number of finished requests. on_finish: is called with each output as
        it comes. If the call fails, its requests are dropped.
        """
        inbox, ids, num_reported = Inbox(), range(0), 0
        tell = on_finish or (lambda _: None)
        try:
            with self.lock, postponed_interrupt():  # ids that are reserved must be released
                ids = self.engine.reserved_ids.reserve(portions.num_requests)
            unused_ids = iter(ids)
            with portions:
                while num_reported < portions.num_requests:
                    # A step may be under way: the device computes while these are queued.
                    if requests := portions.take(wait=inbox.is_complete):
                        self.add_requests(requests, inbox, [*islice(unused_ids, len(requests))])
                    if num_reported == len(inbox.outputs):
                        self.step()
                    show(len(inbox.outputs))
                    for output in inbox.outputs[num_reported:]:
                        num_reported += 1
                        tell(output)
        finally:
            self.engine.reserved_ids.release(ids)
            self.drop(inbox)
        return sorted(inbox.outputs, key=attrgetter("request_id"))

    def add_requests(
        self, requests: Sequence[PreparedRequest], inbox: Inbox, request_ids: Sequence[int] | None = None
    ) -> list[int]:
        """Queue requests whose outputs go to the inbox, and return their ids: the given `request_ids`, or new ones.

        Chunks of a stream have the request's place in the list as `index`. If this call is interrupted, it may have
        queued requests, so `drop` the inbox. Requests that are added to an abandoned inbox are aborted.
        """
        reserved = self.engine.reserved_ids
        self.engine.guard.check()
        with self.lock, postponed_interrupt():
            ids = reserved.reserve(len(requests)) if request_ids is None else request_ids
            chunks = inbox.chunks if inbox.is_stream else None
            recipient = Recipient(inbox.outputs, chunks, first_id=min(ids, default=0))
            try:
                for request, request_id in zip(requests, ids, strict=True):
                    self._steps.add_request(request_id, request, recipient)
                    inbox.request_ids.add(request_id)
            finally:
                reserved.release({*ids} - inbox.request_ids)  # those that an error kept from being queued
            if inbox.is_abandoned:
                self.abandon(inbox)
        return [*ids]

    def step(self) -> None:
        """Run one step, or let another thread run its own. Afterwards the outputs that finished are in the inboxes."""
        self._wait_while_paused()
        with postponed_interrupt():  # also of the lock, which has to be released
            if self.lock.acquire(timeout=TURN_SECONDS):
                try:
                    self._steps.step()
                finally:
                    self.lock.release()

    def collect(self, inbox: Inbox) -> list[RequestOutput]:
        """Take the finished outputs out of an inbox that is used further."""
        self.engine.guard.check()
        with self.lock:
            outputs = inbox.outputs.copy()
            inbox.outputs.clear()
            inbox.request_ids.difference_update(output.request_id for output in outputs)
        return outputs

    def drop(self, *inboxes: Inbox) -> None:
        """Abort the unfinished requests of these inboxes at once, and free what they hold; they get no outputs."""
        if any(not inbox.is_complete for inbox in inboxes):
            with self.lock, postponed_interrupt():
                self._steps.abort({request_id for inbox in inboxes for request_id in inbox.unfinished_ids()})

    def abandon(self, inbox: Inbox) -> None:
        """Have the next step abort the inbox's unfinished requests, and any that are still being added.

        This is safe at any moment, such as when the garbage collector closes a stream. If a call that needs an idle
        engine comes before the next step, that call aborts these requests.
        """
        inbox.is_abandoned = True  # first: `add_requests` looks at it after it has queued
        self.engine.act_later(Action.ABORT, inbox.unfinished_ids())

    def reset_prefix_cache(self) -> None:
        with self.lock:
            self.engine.check_open(is_for_steps=False)  # a trainer calls it while the cache sleeps
            self.engine.reset_prefix_cache()

    def _wait_while_paused(self) -> None:
        """Wait TURN_SECONDS if only paused requests are left; warn once after PATIENCE_SECONDS."""
        num_only_paused = self.engine.num_only_paused()
        if not num_only_paused:
            self._only_paused_since, self._has_warned = None, False
            return
        time.sleep(TURN_SECONDS)
        now, since = time.perf_counter(), self._only_paused_since  # read once: other threads wait, too
        if since is None:
            self._only_paused_since = now
        elif not self._has_warned and now - since > PATIENCE_SECONDS:
            self._has_warned = True
            logger.warning("only paused requests are left (%d); resume or abort them", num_only_paused)
