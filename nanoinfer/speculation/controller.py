"""Decides in each step whether proposals pay, and how many, by what steps have cost so far.

A step with proposals costs more in two ways. It computes more tokens, and it waits for the tokens before it, so the
host's work is not hidden behind the device's. The time from one step's schedule to the next one's includes both costs.
It is measured for each number of rows and lines as steps come, and compared with that of plain steps, which have no
proposals and do not wait. Until a kind of step has been measured three times, its cost is a low guess that invites a
trial.
"""

from collections import Counter, defaultdict, deque
from functools import partial
from typing import NamedTuple

from nanoinfer.engine.interfaces import FEW_ROWS
from nanoinfer.integers import ceil_div

NUM_KEPT = 5  # measurements of a kind of step; their median counts
NUM_NEEDED, NUM_TRIED = 2, 3  # measurements that are enough: of plain steps, and of steps that waited
MIN_GAIN = 1.05  # the least expected ratio of tokens a second, with proposals to without
GUESSED_WAIT = 1.1  # cost of a step that waits, relative to a plain one, before one was measured
GUESSED_LINES = 1024  # a step with so many more lines is guessed to take twice as long
NUM_REMEMBERED = 512  # after so many plain steps, the cost of proposals is forgotten and measured again
NUM_TRUSTED = 4.0  # an estimate begins as if so many proposals had been judged
MOST_EQUAL = 16  # longer runs of equal tokens share an estimate


class Acceptance:
    """Estimates, from recent proposals, the probability that a proposal is right if the proposals before it are.

    A text that has just differed from its source often differs again, and a long copy often goes on. So each number of
    equal tokens before a proposal has an estimate of its own, up to `most_equal`. prior: the first estimate. decay: the
    weight that older proposals keep after one more.
    """

    def __init__(self, prior: float = 0.5, most_equal: int = MOST_EQUAL, decay: float = 0.998) -> None:
        self._num_right = [prior * NUM_TRUSTED] * (1 + most_equal)
        self._num_judged = [NUM_TRUSTED] * (1 + most_equal)
        self._decay = decay

    def judge(self, num_equal: int, num_right: int, num_judged: int, num_rows: int = 1) -> None:
        """Note that `num_judged` consecutive proposals of a row were judged, and the first `num_right` were right.

        num_equal: equal tokens before the first of them. num_rows: how many rows had this result.
        """
        rights, totals, last = self._num_right, self._num_judged, len(self._num_right) - 1
        kept = self._decay**num_rows
        added = (1.0 - kept) / (1.0 - self._decay)  # the sum of what num_rows rows add one after the other
        for place in range(num_judged):
            kind = min(num_equal + place, last)
            rights[kind] = kept * rights[kind] + added * (place < num_right)
            totals[kind] = kept * totals[kind] + added

    def probabilities(self, num_equal: int, count: int) -> list[float]:
        """Return the probability of each of `count` proposals. num_equal: equal tokens before the first of them."""
        last = len(self._num_right) - 1
        kinds = [min(num_equal + place, last) for place in range(count)]
        return [self._num_right[kind] / self._num_judged[kind] for kind in kinds]


class Size(NamedTuple):
    """Says what a step of some size would compute.

    num_lines: lines of all rows, with padding. num_right: how many proposals are expected to be right.
    """

    num_lines: int
    num_right: float


class Controller:
    """Chooses how many lines a step computes: the newest token of each row is one, and each proposal is another.

    Numbers of rows are rounded up to a power of two, and from 32 on to a multiple of 32.
    """

    def __init__(self) -> None:
        self._plain = defaultdict[int, "deque[float]"](partial(deque, maxlen=NUM_KEPT))  # seconds, by number of rows
        self._num_plain = Counter[int]()  # plain steps so far, by number of rows
        # Seconds of steps that waited, by number of rows and then of lines; 0 lines stands for no proposals.
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        self._known: dict[int, dict[int, float]] = {}  # the time of each kind that was measured often enough

    def note_plain(self, num_rows: int, seconds: float) -> None:
        """Note the time of a plain step."""
        size = rounded_rows(num_rows)
        self._plain[size].append(seconds)
        self._num_plain[size] += 1
        if self._num_plain[size] % NUM_REMEMBERED == 0:  # a trial may have been slow for another reason
            self._seconds.pop(size, None)
            self._known.pop(size, None)

    def note(self, num_rows: int, num_lines: int, seconds: float) -> None:
        """Note the time of a step that has waited and computed `num_lines` lines; 0 if nothing was proposed.

        A plain step never takes longer than one that waits. So a shorter time counts as one of a plain step, too. It
        replaces times that were too long, such as those of steps with masks.
        """
        size = rounded_rows(num_rows)
        measured = self._seconds.setdefault(size, {}).setdefault(num_lines, deque(maxlen=NUM_KEPT))
        measured.append(seconds)
        if (known := _fast(measured)) is not None:
            self._known.setdefault(size, {})[num_lines] = known
        if (plain := self.plain_seconds(num_rows)) is not None and seconds < plain:
            self._plain[size].append(seconds)

    def plain_seconds(self, num_rows: int) -> float | None:
        """Return the seconds that a plain step of so many rows takes; None before that is known.

        If this number of rows was not measured, the time of up to twice as many rows is scaled down. Few rows take as
        long, because a step reads all weights; of many rows' time, half is taken to be in proportion to the rows. So
        proposals go on when rows become fewer.
        """
        size = rounded_rows(num_rows)
        if (known := _median(self._plain.get(size, ()))) is not None:
            return known
        for larger in sorted(one for one in self._plain if size < one <= 2 * size):
            if (known := _median(self._plain[larger])) is not None:
                return known if larger <= FEW_ROWS else known * (1 + num_rows / larger) / 2
        return None

    def cost(self, num_rows: int, num_lines: int) -> float:
        """Return the time of a step that waits, relative to that of a plain step. num_lines: as in `note`.

        The time for a number of lines that was not measured is interpolated between measured ones, or extrapolated from
        the two largest. Without these it is guessed low, to invite a trial. The guess is at most the time that as many
        lines of more rows take.
        """
        size, plain = rounded_rows(num_rows), self.plain_seconds(num_rows)
        lines = num_lines or size
        if plain is None:
            return GUESSED_WAIT + (lines - size) / GUESSED_LINES
        known = self._known.get(size, {})
        if num_lines in known:
            return known[num_lines] / plain
        first, guess = size, GUESSED_WAIT * plain
        if fewer := [one for one in known if one < num_lines]:
            first, guess = max(fewer) or size, known[max(fewer)]
        if more := [one for one in known if one > lines]:
            guess += (lines - first) / (min(more) - first) * (known[min(more)] - guess)
        else:
            slope = plain / GUESSED_LINES
            if below := [one for one in known if size < one < first]:
                slope = max(slope, (guess - known[max(below)]) / (first - max(below)))
            guess += (lines - first) * slope
        for rows, times in self._known.items():
            if rows > size:
                guess = min([guess, *(seconds for one, seconds in times.items() if (one or rows) >= lines)])
        return guess / plain

    def choose(self, num_rows: int, sizes: list[Size], has_waited: bool = False) -> Size | None:
        """Return the size of a step that promises the most tokens a second; None if nothing should be proposed.

        has_waited: whether the step has waited already, so that it would not be a plain step without proposals either.

        For example, 16 rows run, and a size has 32 lines and 8 proposals that are expected to be right. Then the step
        makes 1 + 8 / 16 = 1.5 tokens a row. If it takes 1.25 times as long as a plain step, it makes 1.2 times as many
        tokens a second. That is above MIN_GAIN, so it is chosen unless another size promises more.
        """
        if not sizes or num_rows == 0 or self.plain_seconds(num_rows) is None:
            return None
        best, best_speed = None, 1 / self.cost(num_rows, 0) if has_waited else MIN_GAIN
        for size in sizes:
            speed = (1 + size.num_right / num_rows) / self.cost(num_rows, size.num_lines)
            if speed > best_speed:
                best, best_speed = size, speed
        return best


def rounded_rows(num_rows: int) -> int:
    """Return the number of rows that stands for this one and a few smaller ones."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 32 else ceil_div(num_rows, 32) * 32


def _median(values: "deque[float] | tuple[()]") -> float | None:
    return sorted(values)[(len(values) - 1) // 2] if len(values) >= NUM_NEEDED else None


def _fast(values: "deque[float]") -> float | None:
    """Return the time of an undisturbed step: the capture of a graph, for example, makes a step slow."""
    return sorted(values)[(len(values) - 1) // 4] if len(values) >= NUM_TRIED else None
