"""Token ids for the places of images, so that comparing tokens compares images.

The scheduler, the block manager and the prefix cache see an image as ordinary tokens: each of its places has an id
beyond the vocabulary, and equal content has equal ids. No device and no user sees these ids: the runner replaces them
by those of the model's own tokens (`step_images.py`), and outputs have the prompt as it came.

An id stands for its image as long as a request or a cached block has it. Requests are counted. Blocks are not: once too
many images have no request, the prefix cache is searched for ids that are still there.
"""

import collections.abc as abc
from array import array
from bisect import bisect_right, insort
from dataclasses import dataclass

MAX_ID = 2**31 - 1  # token ids are int32
MIN_IDLE = 256  # so many images may have no request before the cache is searched


@dataclass(slots=True, eq=False)
class KnownImage:
    """Describes an image that has ids: `first_id` and those after it, one for each token of its span.

    key: is equal for equal images alone. token_ids: the model's own tokens in the place of these ids. num_users: how
    many requests have the image.
    """

    first_id: int
    key: bytes
    token_ids: tuple[int, ...]
    num_users: int = 0

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + len(self.token_ids))


class VirtualIds:
    """Gives ids to images, and takes them back. first_id: the end of the vocabulary."""

    def __init__(self, first_id: int, end: int = MAX_ID) -> None:
        self._first_id, self._end, self._next = first_id, end, first_id
        self._known: dict[tuple[bytes, tuple[int, ...]], KnownImage] = {}
        self._starts: list[int] = []  # sorted
        self._by_start: dict[int, KnownImage] = {}
        self._max_idle, self.num_idle = MIN_IDLE, 0

    def __len__(self) -> int:
        return len(self._known)

    def hold(self, key: bytes, token_ids: tuple[int, ...]) -> KnownImage:
        """Return the image with this key and these tokens, after counting one more user."""
        image = self._known.get((key, token_ids))
        if image is None:
            image = KnownImage(self._free_place(len(token_ids)), key, token_ids)
            self._known[key, token_ids] = self._by_start[image.first_id] = image
            insort(self._starts, image.first_id)
        elif image.num_users == 0:
            self.num_idle -= 1
        image.num_users += 1
        return image

    def release(self, image: KnownImage) -> bool:
        """Take a user from an image; return whether it was the last one. Cached blocks may still have its ids."""
        image.num_users -= 1
        self.num_idle += image.num_users == 0
        return image.num_users == 0

    def at(self, token_id: int) -> KnownImage | None:
        """Return the image that an id belongs to; None for a token of the vocabulary."""
        if token_id < self._first_id:
            return None
        return self._by_start[self._starts[bisect_right(self._starts, token_id) - 1]]

    def forget_idle(self, cached_tokens: abc.Callable[[], abc.Iterable[bytes]]) -> None:
        """Forget the images that neither a request nor a cached block has, if many images have no request.

        cached_tokens: returns the token ids, as int32, of everything that is cached.
        """
        if self.num_idle <= self._max_idle:
            return
        cached: set[int] = set()
        for tokens in cached_tokens():
            ids = array("i", tokens)
            if max(ids, default=0) >= self._first_id:
                cached.update([image.first_id for one in {*ids} if (image := self.at(one))])
        for name, image in [*self._known.items()]:
            if image.num_users == 0 and image.first_id not in cached:
                del self._known[name], self._by_start[image.first_id]
                self.num_idle -= 1
        self._starts = sorted(self._by_start)
        self._max_idle = max(MIN_IDLE, 2 * self.num_idle)  # so that going through the cache stays rare

    def _free_place(self, num_ids: int) -> int:
        """Return the first of so many free ids in a row. Ids are reused only after all have been used."""
        for start in (self._next, self._first_id):
            index = bisect_right(self._starts, start - 1)
            if index:
                start = max(start, self._by_start[self._starts[index - 1]].ids.stop)
            while index < len(self._starts) and start + num_ids > self._starts[index]:
                start = self._by_start[self._starts[index]].ids.stop
                index += 1
            if start + num_ids <= self._end:
                self._next = start + num_ids
                return start
        raise OverflowError(f"{len(self._known)} images have taken all token ids")
