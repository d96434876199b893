"""Defines the interface of a cache group, by which the block manager asks it for what layers remember of a sequence."""

from dataclasses import dataclass
from typing import Protocol

from nanoinfer.engine.cache_groups.partial_hits import CacheEntry
from nanoinfer.engine.cache_groups.state_snapshots import Snapshot
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence


@dataclass(slots=True)
class Hit:
    """Says what a sequence finds in the prefix cache.

    entries: of its first full blocks, which it shares. pages: of these, by group with block tables, those that the
    tokens after the hit need, block after block. source: the entry of a block that begins like the one after them;
    num_copied: how many of its tokens are copied. snapshot: the states after all these tokens, if the model has states
    and a prefix is found. num_later: how many more tokens are found once the step that is being scheduled is computed.
    """

    entries: list[CacheEntry]
    pages: list[list[int]]
    source: CacheEntry | None = None
    num_copied: int = 0
    snapshot: Snapshot | None = None
    num_later: int = 0


class CacheGroup(Protocol):
    """Keeps one kind of memory of sequences: pages (`AttentionGroup`), or recurrent states (`StateGroup`)."""

    def trim(self, seq: Sequence, hit: Hit) -> bool:
        """Shorten a hit to what this group remembers too; return whether that was needed.

        The manager asks all groups until none shortens it more.
        """

    def admit(self, batch: ScheduledBatch, seq: Sequence, hit: Hit) -> None:
        """Give a sequence what it begins with, and tell the batch of it. The pages of the hit are held."""

    def free(self, seq: Sequence) -> None:
        """Take back all that a sequence holds; it may hold nothing."""
