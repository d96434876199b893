"""Finds the earlier places where a text has its last tokens.

Each n-gram leads to the place after its newest occurrence, and each occurrence leads to the one before it, as in the
hash chains of LZ77. A token costs one entry in a dict: a quarter of a microsecond, and a hundred bytes.
"""

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize
END = -1  # follows each of several texts; no text has it


class TextIndex:
    """Knows the n-grams of a text that grows.

    tokens: the text, int32; call `extend` after appending to it. size: n. newest: the place after the newest occurrence
    of each n-gram, by its `key`.
    """

    def __init__(self, tokens: "array[int]", size: int) -> None:
        self.tokens = tokens
        self.size = size
        self.newest: dict[bytes, int] = {}
        self._before = array("i")  # for each place from `size` on, the place after the previous same n-gram; -1: none

    def extend(self) -> None:
        """Index the tokens that were appended. The n-gram at the very end is added once a token follows it."""
        size, newest, before = self.size, self.newest, self._before
        first = size + len(before)
        text = self.tokens[first - size : -1].tobytes()
        width = size * TOKEN_BYTES
        for start, place in enumerate(range(first, len(self.tokens))):
            key = text[start * TOKEN_BYTES : start * TOKEN_BYTES + width]
            before.append(newest.get(key, -1))
            newest[key] = place

    def key(self, text: "array[int]") -> bytes:
        """Return the last n-gram of a text, by which indices of the same n know it."""
        return text[-self.size :].tobytes()

    def places(self, key: bytes, most: int) -> list[int]:
        """Return the places in `tokens` after an n-gram, the newest first; at most so many."""
        place = self.newest.get(key, -1)
        places: list[int] = []
        while place >= 0 and len(places) < most:
            places.append(place)
            place = self._before[place - self.size]
        return places


def count_equal(text: "array[int]", other: "array[int]", place: int, most: int) -> int:
    """Return how many tokens at the end of `text` are equal to those before `place` in `other`, counting to `most`."""
    most = min(most, len(text), place)
    end = len(text)
    for length in range(most):
        if text[end - 1 - length] != other[place - 1 - length]:
            return length
    return most


def num_right(draft: Sequence[int], came: Sequence[int]) -> int:
    """Return how many tokens of a draft are those that came, before the first that is not."""
    count = 0
    for one, other in zip(draft, came, strict=False):
        if one != other:
            break
        count += 1
    return count
