"""What a call does while only paused requests are left."""

import logging
import time

PATIENCE_SECONDS = 1.0  # after so long with only paused requests, the log says so

logger = logging.getLogger("nanoinfer")


class PausedWait:
    """Keeps a call from running empty steps, and warns once each time that only paused requests are left for long."""

    def __init__(self) -> None:
        self._since: float | None = None  # perf_counter
        self._has_warned = False

    def wait(self, num_only_paused: int, seconds: float) -> None:
        """Wait so long if only paused requests are left. num_only_paused: how many these are; 0 if there are others."""
        if not num_only_paused:
            self._since, self._has_warned = None, False
            return
        time.sleep(seconds)
        now, since = time.perf_counter(), self._since  # read once: other threads wait, too
        if since is None:
            self._since = now
        elif not self._has_warned and now - since > PATIENCE_SECONDS:
            self._has_warned = True
            logger.warning("only paused requests are left (%d); resume or abort them", num_only_paused)
