"""Chooses the few rows that stand for all while proposals do not pay.

Indexing the prompts of all rows takes time. So rows take turns, as fast as steps leave time for it, and a row that has
begun to repeat its text is found sooner or later. But proposals that pay for a few rows may not pay for all. Each time
all rows were looked at in vain, twice as many promises of watched rows as before are ignored.
"""

from typing import Any

from nanoinfer.engine.sequence import Sequence, SequenceStatus

MAX_WATCHED = 8  # rows
TOKENS_A_SECOND = 20_000  # that rows whose turn comes may have: indexing these takes half a percent of the time
MAX_IGNORED = 256  # promises


class Watch:
    """Remembers which rows are watched, and whether what they promise is believed."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []  # the one that is watched longest comes first
        self._turn = 0  # which of the running sequences is next
        self._num_tokens = 0.0  # how many tokens may be indexed now
        self._num_ignored, self._num_to_ignore = 0, 1  # promises

    def choose(self, seqs: list[Sequence], rows: dict[Sequence, Any], seconds: float) -> list[Sequence]:
        """Return the sequences to watch.

        seqs: all running sequences, more than MAX_WATCHED. rows: the DraftedRow of each sequence that has one; this
        removes the row of a sequence that is no longer watched. seconds: how long a step takes.
        """
        watched = self._seqs = [seq for seq in self._seqs if seq.status is SequenceStatus.RUNNING]
        while len(watched) < MAX_WATCHED:
            watched.append(self._next(seqs))
        self._num_tokens += seconds * TOKENS_A_SECOND
        if self._num_tokens >= len(seqs[self._turn % len(seqs)].token_ids):
            without_draft = [seq for seq in watched if seq in rows and not rows[seq].draft]
            if without_draft:
                watched.remove(without_draft[0])
                del rows[without_draft[0]]
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
        """Return the next sequence that is not being watched."""
        while True:
            seq = seqs[self._turn % len(seqs)]
            self._turn += 1
            if seq not in self._seqs:
                return seq
