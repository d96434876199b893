"""The socket for whatever layers remember of a sequence: what the block manager asks of each cache group."""

from dataclasses import dataclass, field
from typing import Protocol

from nanoinfer.engine.cache_groups.partial_hits import CacheEntry
from nanoinfer.engine.cache_groups.state_snapshots import Snapshot
from nanoinfer.engine.scheduled_batch import BlockCopy
from nanoinfer.engine.sequence import Sequence


@dataclass(slots=True)
class Hit:
    """What a sequence finds in the prefix cache.

    entries: of its first full blocks, which it shares. source: begins with the `num_copied` tokens after them, which
    are copied. snapshot: the states after all these tokens, if the model has states and a prefix is found.
    """

    entries: list[CacheEntry] = field(default_factory=list)
    source: CacheEntry | None = None
    num_copied: int = 0
    snapshot: Snapshot | None = None


class CacheGroup(Protocol):
    """What groups with block tables (`AttentionGroup`) and those with states (`StateGroup`) have in common."""

    def trim(self, seq: Sequence, hit: Hit) -> None:
        """Shorten a hit to what this group remembers too. The manager asks all groups until none shortens it more."""

    def hold(self, seq: Sequence, hit: Hit) -> None:
        """Hold what a sequence has found and needs. No group takes new blocks before all have done so."""

    def admit(self, seq: Sequence, hit: Hit) -> list[BlockCopy]:
        """Give a sequence what it begins with beside what it has found; return the copies that its step begins with."""

    def free(self, seq: Sequence) -> None:
        """Take back all that a sequence holds; it may hold nothing."""
