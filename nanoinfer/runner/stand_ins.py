"""Decides when a CUDA graph that a step of several tokens a row would need is worth its capture.

Such steps come in many sizes, most of them for a moment: at the end of a job rows become fewer, one by one. A larger
graph that has been captured already stands in, padded, until its padding has taken as long as a capture.
"""

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from nanoinfer.engine.interfaces import FEW_ROWS, packed_step
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
        step = packed_step(size)
        num_packed = min(ceil_div(batch.num_packed, step) * step, size * batch.num_tokens)
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
        if not larger:
            return key
        smallest = min(larger, key=lambda one: one.num_lines)
        self._num_lines[key] += smallest.num_lines - key.num_lines
        return smallest if self._num_lines[key] <= CAPTURE_LINES else key


def packed_graph_sizes(sizes: list[int]) -> list[int]:
    """Return those batch sizes that steps of packed lines have. They are few: rows of padding have no lines there."""
    packed = [size for size in sizes if size in (32, 64) or size % 128 == 0 or size == max(sizes)]
    return [size for size in packed if size > FEW_ROWS]  # lines of fewer rows are padded: see `Proposals.packed`


def packed_line_counts(size: int, num_tokens: int) -> list[int]:
    """Return how many packed lines the graphs of a batch size can have, in ascending order: see `GraphKey.of`.

    num_tokens: the most of a row.
    """
    step, most = packed_step(size), size * num_tokens
    return [*range(step, most, step), most]


def usual_packed_keys(sizes: list[int], num_tokens: int) -> list[GraphKey]:
    """Return the graphs of packed lines that are captured early: those for up to three proposals a row.

    num_tokens: the most of a row. The largest come first, since the smaller ones fit into their memory.
    """
    keys = []
    for size in reversed(sizes):
        step = packed_step(size)
        most = ceil_div(4 * size, step) * step
        counts = [lines for lines in packed_line_counts(size, num_tokens) if size < lines <= most]
        keys += [GraphKey(size, num_tokens, False, lines) for lines in reversed(counts)]
    return keys
