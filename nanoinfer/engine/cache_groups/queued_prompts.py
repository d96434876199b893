"""Knows the texts that wait in the queue, and so where a text that is computed parts from others that come after it.

An offline engine has its prompts beforehand. Sorted, those that begin alike are neighbours, as in a radix tree over
tokens (RadixAttention, Zheng et al. 2024) that is laid out flat.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from nanoinfer.engine.cache_groups.partial_hits import num_common

MAX_PARTINGS = 16  # that are looked for in a text, the last ones
SORTED_SHARE = 32  # if less than one in so many texts is new, each is put in its place; else all are sorted


class Parting(NamedTuple):
    """Says that `num_texts` waiting texts begin with the first `num_tokens` tokens of another one."""

    num_tokens: int
    num_texts: int


class QueuedPrompts:
    """Holds the tokens of the sequences that wait. Nobody may change them meanwhile."""

    def __init__(self) -> None:
        self._texts: list[array[int]] = []  # sorted, once `_new` is empty
        self._new: list[array[int]] = []

    def __len__(self) -> int:
        return len(self._texts) + len(self._new)

    def add(self, text: "array[int]") -> None:
        self._new.append(text)

    def remove(self, text: "array[int]") -> None:
        texts = self._sorted()
        index = bisect_left(texts, text)
        while texts[index] is not text:  # equal ones stay: each grows with its own sequence once that runs
            index += 1
        del texts[index]

    def num_beginning_with(self, prefix: "array[int]") -> int:
        """Return how many texts begin with these tokens, and go on."""
        first, end = self._range_of(prefix)
        return end - first

    def partings(self, text: "array[int]", above: int) -> list[Parting]:
        """Return where waiting texts part from this one beyond its first `above` tokens, the last place first.

        The last token of a text is always computed. So where one is all that another begins with, they part before it.
        """
        texts = self._sorted()
        first = end = bisect_left(texts, text)
        found: list[Parting] = []
        while len(found) < MAX_PARTINGS:
            neighbours = [*texts[max(0, first - 1) : first], *texts[end : end + 1]]
            length = max((_num_shared(text, other) for other in neighbours), default=0)
            if length <= above:
                break
            first, end = self._range_of(text[:length])
            found.append(Parting(length, end - first))
        return found

    def _range_of(self, prefix: "array[int]") -> tuple[int, int]:
        """Return the places of the first text that begins with these tokens, and of the first one after these texts."""
        texts, length = self._sorted(), len(prefix)
        first = bisect_left(texts, prefix)
        return first, bisect_right(texts, prefix, first, key=lambda text: text[:length])

    def _sorted(self) -> "list[array[int]]":
        if len(self._new) * SORTED_SHARE < len(self._texts):
            for text in self._new:
                insort(self._texts, text)
        elif self._new:
            self._texts += self._new
            self._texts.sort()
        self._new.clear()
        return self._texts


def _num_shared(text: "array[int]", waiting: "array[int]") -> int:
    """Return how many tokens the waiting text can take from the other one, which never are the last of either."""
    num_same = num_common(memoryview(text).cast("B"), memoryview(waiting).cast("B"))
    return min(num_same, len(text) - 1, len(waiting) - 1)
