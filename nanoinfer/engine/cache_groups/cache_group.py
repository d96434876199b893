"""The socket for whatever layers remember of a sequence: what the block manager asks of each cache group."""

from dataclasses import dataclass, field
from typing import Protocol

from nanoinfer.engine.cache_groups.partial_hits import CacheEntry, Column
from nanoinfer.engine.cache_groups.state_snapshots import Snapshot
from nanoinfer.engine.scheduled_batch import BlockCopy
from nanoinfer.engine.sequence import Sequence


@dataclass(slots=True)
class Hit:
    """What a sequence finds in the prefix cache.

    entries: of its first full blocks, which it shares. next_block: the serial number that the entry of the block after
    them hangs under, and the tokens of this block that may come from the cache. num_common: how many of these tokens
    another cached block begins with. source: the entry of that block, if they are enough to be copied; num_copied: how
    many are. snapshot: the states after all these tokens, if the model has states and a prefix is found. columns: by
    group with block tables, those that the tokens after the hit need.
    """

    entries: list[CacheEntry] = field(default_factory=list)
    next_block: tuple[int, bytes] = (0, b"")
    num_common: int = 0
    columns: list[list[Column]] = field(default_factory=list)
    source: CacheEntry | None = None
    num_copied: int = 0
    snapshot: Snapshot | None = None


class CacheGroup(Protocol):
    """What groups with block tables (`AttentionGroup`) and those with states (`StateGroup`) have in common."""

    def trim(self, seq: Sequence, hit: Hit) -> None:
        """Shorten a hit to what this group remembers too. The manager asks all groups until none shortens it more."""

    def admit(self, seq: Sequence, hit: Hit) -> list[BlockCopy]:
        """Give a sequence what it begins with; return the copies that its step begins with. Hit pages are held."""

    def free(self, seq: Sequence) -> None:
        """Take back all that a sequence holds; it may hold nothing."""
