"""Holds what the parent knows of its replicas: processes, the work that they have done, events of their steps."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from typing import Any

from nanoinfer.executor.processes import EXIT_SECONDS, EXPLANATION_SECONDS, Failure, Workers
from nanoinfer.metrics import EngineMetrics, RequestChange, StepEvent, sum_by_place
from nanoinfer.replicas.replica_messages import Reply


@dataclass(slots=True, eq=False)
class ReplicaHandle:
    """Controls one replica, from the parent; see `Replica` in replica.py."""

    index: int
    workers: Workers
    connection: Connection
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    unready_reason: str | None = None
    is_alive: bool = True
    replies: deque[Reply] = field(default_factory=deque)
    active: float = field(default_factory=time.monotonic)  # when the last message came or went

    def send(self, message: Any) -> None:
        """Send a message; the end of a replica that takes none is noticed when it is read from."""
        self.active = time.monotonic()
        with suppress(OSError):
            self.connection.send(message)

    def hang_up(self) -> None:
        """Have the replica end, which takes a moment."""
        if self.workers.are_ours:
            self.is_alive = False
            self.connection.close()
            self.workers.hang_up()

    def explain_end(self) -> Failure:
        """Say why the replica has ended; its socket may show that a moment after its pipe."""
        deadline = time.monotonic() + EXPLANATION_SECONDS
        while self.workers.failure is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.workers.failure or Failure(f"replica {self.index} has ended")


def end_replicas(replicas: list[ReplicaHandle], patience: float = EXIT_SECONDS) -> None:
    """End these processes, and wait until they have."""
    for replica in replicas:
        replica.hang_up()
    for replica in replicas:
        replica.workers.close(patience)


@dataclass(slots=True)
class ReplicaMetrics(EngineMetrics):
    """Sums the work of all replicas, and has each one's in `replicas`.

    Seconds are the average of the replicas: they run side by side, so tokens divided by seconds are the speed of all.
    """

    replicas: list[EngineMetrics] = field(default_factory=list)


def sum_metrics(replicas: list[EngineMetrics]) -> ReplicaMetrics:
    names = [item.name for item in fields(EngineMetrics)]
    columns = {name: [getattr(one, name) for one in replicas] for name in names}
    by_place = sum_by_place(columns.pop("num_accepted_tokens_per_pos"))
    sums: dict[str, Any] = {name: sum(column) for name, column in columns.items()}
    sums["num_accepted_tokens_per_pos"] = by_place
    for name in ("prefill_seconds", "decode_seconds", "draft_seconds_saved"):
        sums[name] /= len(replicas)
    return ReplicaMetrics(**sums, replicas=replicas)


class ReplicaEvents:
    """Collects the StepEvents of all replicas. Without functions of `LLM.on_step`, replicas send none."""

    def __init__(self) -> None:
        self._arrived: deque[StepEvent] = deque()
        self._changes: dict[int, list[RequestChange]] = {}  # by replica: changes that no event has brought yet

    def arrive(self, replica: int, event: StepEvent) -> None:
        """Keep an event of a replica until the functions are called."""
        changes = (*self._changes.pop(replica, ()), *event.changes)
        self._arrived.append(replace(event, replica=replica, changes=changes))

    def add_changes(self, replica: int, changes: list[RequestChange]) -> None:
        """Keep the changes to requests of a replica since its last event, for its next event."""
        self._changes.setdefault(replica, []).extend(changes)

    def stepped(self) -> Iterator[StepEvent]:
        while self._arrived:
            yield self._arrived.popleft()

    take = stepped

    def take_rest(self) -> tuple[list[RequestChange], float]:
        changes = [change for each in self._changes.values() for change in each]
        self._changes.clear()
        return sorted(changes, key=lambda change: change.time), 0.0
