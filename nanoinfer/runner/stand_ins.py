"""Decides when a CUDA graph that a step of several tokens a row would need is worth its capture.

Such steps come in many sizes, most of them for a moment: at the end of a job rows become fewer, one by one. A larger
graph that has been captured already stands in, padded, until its padding has taken as long as a capture.
"""

from collections import Counter
from collections.abc import Set

CAPTURE_LINES = 2048  # of padding; a model of 8B computes them in about the time of a capture

GraphKey = tuple[int, int, bool]  # batch size, tokens of a row, whether rows share prefixes


class StandIns:
    """Counts the padding that stand-ins have computed for want of each graph."""

    def __init__(self) -> None:
        self._num_lines = Counter[GraphKey]()

    def choose(self, key: GraphKey, captured: Set[GraphKey]) -> GraphKey:
        """Return the graph that a step runs in: the one that it needs, to be captured now, or the next larger one."""
        size, num_tokens, shares_prefixes = key
        of_kind = [one for one in captured if one[0] > size and one[1:] == (num_tokens, shares_prefixes)]
        if num_tokens == 1 or not of_kind:
            return key
        larger = min(of_kind)
        self._num_lines[key] += (larger[0] - size) * num_tokens
        return larger if self._num_lines[key] <= CAPTURE_LINES else key
