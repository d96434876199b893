"""Finds cached blocks that begin like a prompt's next block, so that prefix hits end at a token and not at a block.

Prompts part anywhere. Where one parts from a cached text within a block, the tokens before that are copied from the
cached block to one of its own (copy on write), and only the rest is computed. So a cached prefix is found whole, as in
a radix tree over tokens (RadixAttention, Zheng et al. 2024), and blocks can still be large.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class BlockCopy(NamedTuple):
    """Says that a step begins with a copy of the first `num_tokens` tokens' keys and values from block to block."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of the prefix cache: which block it is, and what verifies a hit."""

    block_id: int
    hash: int | None  # None if the block is not full: it can be copied from, and not be shared
    serial: int
    parent_serial: int  # of the entry of the block before it
    tokens: bytes  # ids as int32, block_size of them if it is full


class PartialHits:
    """The entries of the prefix cache by their parent, in the order of their tokens.

    What a step computes can be copied by later steps only: a copy is made before the step's own keys and values are
    written. So an entry is found from the next `start_step` on.
    """

    def __init__(self) -> None:
        self._siblings: dict[int, list[CacheEntry]] = {}  # by the parent's serial, sorted by tokens
        self._new: dict[int, list[CacheEntry]] = {}  # likewise: those of the current step

    def start_step(self) -> None:
        for entries in self._new.values():
            for entry in entries:
                _insert(self._siblings, entry)
        self._new.clear()

    def add(self, entry: CacheEntry) -> None:
        _insert(self._new, entry)

    def remove(self, entry: CacheEntry) -> None:
        if not _remove(self._new, entry):
            _remove(self._siblings, entry)

    def find(self, parent_serial: int, tokens: bytes) -> tuple[CacheEntry | None, int]:
        """Return the entry after this parent that begins with the most of `tokens` (ids as int32), and how many."""
        return _longest(self._siblings.get(parent_serial, []), tokens)

    def num_found_later(self, parent_serial: int, tokens: bytes) -> int:
        """Return how many more of these tokens `find` will find from the next step on."""
        _, num_new = _longest(self._new.get(parent_serial, []), tokens)
        return max(0, num_new - self.find(parent_serial, tokens)[1]) if num_new else 0


def _insert(by_parent: dict[int, list[CacheEntry]], entry: CacheEntry) -> None:
    siblings = by_parent.setdefault(entry.parent_serial, [])
    siblings.insert(_position(siblings, entry.tokens), entry)


def _remove(by_parent: dict[int, list[CacheEntry]], entry: CacheEntry) -> bool:
    """Remove an entry if it is there; return whether it was."""
    siblings = by_parent.get(entry.parent_serial, [])
    index = _position(siblings, entry.tokens)
    while index < len(siblings) and siblings[index].tokens == entry.tokens:
        if siblings[index] is entry:
            del siblings[index]
            if not siblings:
                del by_parent[entry.parent_serial]
            return True
        index += 1
    return False


def _longest(siblings: list[CacheEntry], tokens: bytes) -> tuple[CacheEntry | None, int]:
    """Return the entry that begins with the most of `tokens`: in sorted order, a neighbour of where they belong."""
    index = _position(siblings, tokens)
    found: tuple[CacheEntry | None, int] = None, 0
    for entry in siblings[max(0, index - 1) : index + 1]:
        count = _num_common(entry.tokens, tokens)
        if count > found[1]:
            found = entry, count
    return found


def _position(siblings: list[CacheEntry], tokens: bytes) -> int:
    return bisect_left(siblings, tokens, key=lambda entry: entry.tokens)


def _num_common(one: bytes, other: bytes) -> int:
    """Return how many token ids two texts have in common before they part."""
    length = min(len(one), len(other)) // 4
    differs = np.frombuffer(one, np.int32, length) != np.frombuffer(other, np.int32, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
