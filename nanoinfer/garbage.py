"""Makes garbage collections rare while a call runs: a full one takes as long as many steps, and finds nothing.

Python starts a full one when the process has a quarter more objects than at the last one. It looks through all objects
of PyTorch and transformers too, and the device runs out of work meanwhile. Requests and outputs are freed without it,
by reference counts.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# New objects before the youngest are looked through; how often that happens before older ones are; and before all are.
# What a call makes lives until its outputs are returned. A collection frees nothing then, and looks through all of it.
RARE = (100_000, 20, 1_000)

_lock = threading.Lock()
_calls: list[tuple[int, int, int]] = []  # what held before each call that runs; the first is the user's own


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the thresholds of the garbage collector, until the last call of all threads has ended.

    What a user has set higher stays, and so does a collector that is off. Also a decorator.
    """
    with _lock:
        _calls.append(gc.get_threshold())
        if 0 < _calls[0][0] < RARE[0]:
            gc.set_threshold(*RARE)
    try:
        yield
    finally:
        with _lock:
            before = _calls[0]
            _calls.pop()
            if not _calls:
                gc.set_threshold(*before)
