"""Request ids: a call reserves them when it begins, and queues their requests as its prompts are prepared."""

from collections.abc import Iterable
from enum import Enum, auto


class Action(Enum):
    """What can be asked of a request at any moment. The step that comes next does it, as `Scheduler` says."""

    ABORT = auto()
    PAUSE = auto()
    RESUME = auto()


class ReservedIds:
    """Numbers the requests of an engine. Those that are not queued yet count as unfinished.

    What is asked of them meanwhile, such as an abort, is remembered until they are queued.
    """

    def __init__(self) -> None:
        self._next = 0
        self._deferred: dict[int, list[Action]] = {}  # by reserved id

    def __len__(self) -> int:
        return len(self._deferred)

    def reserve(self, count: int) -> range:
        """Return the ids of so many new requests, which follow each other."""
        first, self._next = self._next, self._next + count
        ids = range(first, self._next)
        self._deferred |= {request_id: [] for request_id in ids}
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Forget those of these ids whose requests were never queued."""
        for request_id in ids:
            self._deferred.pop(request_id, None)

    def take(self, request_id: int) -> list[Action]:
        """Take out the id of a request that is queued, or has ended; return what was asked of it before."""
        return self._deferred.pop(request_id, [])

    def defer(self, action: Action, request_id: int) -> bool:
        """Remember an action on a request that is yet to be queued; False for any other. Safe at any moment."""
        deferred = self._deferred.get(request_id)
        if deferred is None:
            return False
        deferred.append(action)
        return request_id in self._deferred  # another thread may have queued it just now
