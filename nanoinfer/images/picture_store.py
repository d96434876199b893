"""Counts the host memory that processed pictures take, and keeps earlier ones while there is room."""

import threading
import weakref
from collections import OrderedDict, deque

from nanoinfer.images.processor import ProcessedPicture

MIN_AHEAD = 2**30  # bytes that pictures waiting for the model may take, even if the store may keep less


class PictureStore:
    """Keeps the most recently used processed pictures, by key. Any thread may call any method.

    max_bytes: the most that kept pictures may take. `num_bytes` counts tensors until nobody holds them any more, so it
    includes those of the engine and its queue.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_kept, self._max_alive = max_bytes, max(max_bytes, MIN_AHEAD)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, ProcessedPicture] = OrderedDict()
        self._kept_bytes = self._added_bytes = 0
        # The garbage collector may free a tensor at any moment, also while the lock is held.
        self._freed: deque[int] = deque()
        self._num_made = 0
        self._made_bytes = 0

    def get(self, key: bytes) -> ProcessedPicture | None:
        """Return the picture with this key, if it is kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def add(self, key: bytes, picture: ProcessedPicture) -> ProcessedPicture:
        """Keep a picture and return it; if another thread has added one with this key, return that one."""
        with self._lock:
            if key in self._kept:
                return self._kept[key]
            for tensor in picture.tensors.values():
                weakref.finalize(tensor, self._freed.append, tensor.nbytes).atexit = False
            self._num_made += 1
            self._made_bytes += picture.num_bytes
            self._added_bytes += picture.num_bytes
            if picture.num_bytes <= self._max_kept:
                self._kept[key] = picture
                self._kept_bytes += picture.num_bytes
                self._evict(self._kept_bytes - self._max_kept)
            return picture

    @property
    def num_bytes(self) -> int:
        """The bytes of the pictures that are kept, and of those that others hold."""
        while self._freed:
            self._added_bytes -= self._freed.popleft()
        return self._added_bytes

    def has_room(self, num_pictures: int) -> bool:
        """Return whether `num_pictures` more of the average size fit. Kept pictures are dropped for them."""
        with self._lock:
            expected = num_pictures * self._made_bytes // max(self._num_made, 1)
            while self._kept and self.num_bytes + expected > self._max_alive:
                self._evict(1)
            return self.num_bytes + expected <= self._max_alive

    def close(self) -> None:
        """Drop all pictures, and keep none of those that are still being made."""
        with self._lock:
            self._max_kept = 0
            self._evict(self._kept_bytes)

    def _evict(self, num_bytes: int) -> None:
        """Drop the least recently used pictures, until at least `num_bytes` are dropped."""
        while num_bytes > 0 and self._kept:
            _, picture = self._kept.popitem(last=False)
            self._kept_bytes -= picture.num_bytes
            num_bytes -= picture.num_bytes
