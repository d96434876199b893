"""Decides when a CUDA graph that a step of several tokens a row would need is worth its capture.

Such steps come in many sizes, most of them for a moment: at the end of a job rows become fewer, one by one. A larger
graph that has been captured already stands in, padded, until its padding has taken as long as a capture.
"""

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from nanoinfer.engine.interfaces import PACKED_LINES
from nanoinfer.integers import ceil_div
from nanoinfer.layers.attention.metadata import DecodeBatch

CAPTURE_LINES = 4096  # of padding; a model of 8B computes them in about the time of a capture


class GraphKey(NamedTuple):
    """Names a graph by the steps that it computes; see `DecodeBatch`."""

    num_rows: int
    num_tokens: int
    shares_prefixes: bool
    num_packed: int

    @classmethod
    def of(cls, batch: DecodeBatch, size: int) -> "GraphKey":
        """Return the key of the graph for a batch that is padded to so many rows."""
        num_packed = min(ceil_div(batch.num_packed, PACKED_LINES) * PACKED_LINES, size * batch.num_tokens)
        return cls(size, batch.num_tokens, batch.shared_prefixes is not None, num_packed)

    @property
    def num_all(self) -> int:
        """How many lines there are with all padding."""
        return self.num_rows * self.num_tokens

    @property
    def num_lines(self) -> int:
        return self.num_packed or self.num_all

    def holds(self, other: "GraphKey") -> bool:
        """Return whether its graph can compute what another one is for."""
        is_of_kind = self[1:3] == other[1:3] and bool(self.num_packed) == bool(other.num_packed)
        return is_of_kind and self.num_rows >= other.num_rows and self.num_lines >= other.num_lines


class StandIns:
    """Counts the padding that stand-ins have computed for want of each graph."""

    def __init__(self) -> None:
        self._num_lines = Counter[GraphKey]()

    def choose(self, key: GraphKey, captured: Set[GraphKey]) -> GraphKey:
        """Return the graph that a step runs in: the one that it needs, to be captured now, or the next larger one."""
        larger = [] if key.num_tokens == 1 else [one for one in captured if one.holds(key)]
        if not larger:  # the first of its kind is to serve others, too
            lines = min(key.num_packed and ceil_div(key.num_packed, 2 * key.num_rows) * 2 * key.num_rows, key.num_all)
            return key._replace(num_packed=lines)
        smallest = min(larger, key=lambda one: one.num_lines)
        self._num_lines[key] += smallest.num_lines - key.num_lines
        return smallest if self._num_lines[key] <= CAPTURE_LINES else key
