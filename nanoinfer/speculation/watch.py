"""Chooses the few rows that stand for all while proposals do not pay.

To index the prompts of all rows would take time. So rows take turns, as fast as steps leave time for it, and a row that
has begun to repeat its text is found wherever it is. What few rows promise may not hold for all. Where all rows were
looked at in vain, twice as many promises as the time before are ignored until all are looked at again.
"""

from typing import Any

from nanoinfer.engine.sequence import Sequence, SequenceStatus

MAX_WATCHED = 8  # rows
TOKENS_A_SECOND = 20_000  # of rows whose turn comes: to index so many takes half a percent of the time
MAX_IGNORED = 256  # promises


class Watch:
    """Remembers which rows are watched, and whether what they promise is believed."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []  # the one that is watched longest comes first
        self._turn = 0  # place among all that run
        self._num_tokens = 0.0  # that may be indexed
        self._num_ignored, self._num_to_ignore = 0, 1  # promises

    def choose(self, seqs: list[Sequence], rows: dict[Sequence, Any], seconds: float) -> list[Sequence]:
        """Return the sequences to watch.

        seqs: all that run, more than MAX_WATCHED. rows: the DraftedRow of each that has one; a sequence that is not
        watched any more leaves them. seconds: of a step.
        """
        watched = self._seqs = [seq for seq in self._seqs if seq.status is SequenceStatus.RUNNING]
        while len(watched) < MAX_WATCHED:
            watched.append(self._next(seqs))
        self._num_tokens += seconds * TOKENS_A_SECOND
        if self._num_tokens >= len(seqs[self._turn % len(seqs)].token_ids):
            dull = [seq for seq in watched if seq in rows and not rows[seq].draft]
            if dull:
                watched.remove(dull[0])
                del rows[dull[0]]
                watched.append(self._next(seqs))
                self._num_tokens = 0.0
        return watched

    def believes(self) -> bool:
        """Return whether watched rows that promise a gain are believed this time."""
        if self._num_ignored == 0:
            return True
        self._num_ignored -= 1
        return False

    def note(self, was_right: bool) -> None:
        """Note whether all rows have kept what the watched ones promised."""
        self._num_to_ignore = 1 if was_right else min(2 * self._num_to_ignore, MAX_IGNORED)
        self._num_ignored = 0 if was_right else self._num_to_ignore

    def _next(self, seqs: list[Sequence]) -> Sequence:
        """Return the next sequence that is not watched."""
        while True:
            seq = seqs[self._turn % len(seqs)]
            self._turn += 1
            if seq not in self._seqs:
                return seq
