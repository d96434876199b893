"""Ranks what could be proposed to the rows of a step, so that its lines go to the likeliest proposals.

Rows whose drafts have the same chances are of one kind. There are few kinds, so a step of many rows is ranked in little
time. A proposal counts only if those before it are right. So it is never likelier than they are, and whatever
comes first in the ranking is the beginning of a draft.

For example, two rows run. The proposals of the first row count with probabilities 0.9, 0.8 and 0.7, those of the second
row with 0.6 and 0.4. The ranking is 0.9, 0.8, 0.7, 0.6, 0.4. If a packed step had 5 lines, 2 would be for the newest
tokens. The likeliest 3 proposals would fill the others, and all of them are the first row's.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from nanoinfer.engine.interfaces import packed_step
from nanoinfer.integers import ceil_div
from nanoinfer.speculation.controller import Size, rounded_rows

# Rows of one kind have the same chances. A kind is: how many proposals a form forces (they come first), how many tokens
# before the draft equal those before the place that it is copied from, and how many proposals there are.
Kind = tuple[int, int, int]


class Drafted(Protocol):
    """Has a draft, the tokens that a sequence may go on with, and the kind of its chances."""

    draft: list[int]
    kind: Kind


# The probability that the first proposal of a row counts, that the second one does, and so on.
Chances = Mapping[Kind, Sequence[float]]


class Offers:
    """Holds what could be proposed to the rows of a step.

    rows: those of all num_seqs sequences, or of a few that stand for them; None where nothing may be proposed.
    chances: of each kind of row that has a draft. choices: the numbers of proposals that a row of a padded step may
    have. packs: whether steps are packed, so that rows may have different numbers of lines.
    """

    def __init__(
        self, rows: Sequence[Drafted | None], num_seqs: int, chances: Chances, choices: Sequence[int], packs: bool
    ) -> None:
        self._rows, self._num_seqs, self._chances, self._choices = rows, num_seqs, chances, choices
        self._counts = Counter([row.kind for row in rows if row and row.draft])
        self._weight = num_seqs / max(1, len(rows))  # how many sequences a row stands for
        self._ranked = _ranked(chances) if packs else None
        self.sizes = self._padded() if self._ranked is None else self._packed(self._ranked)

    def _padded(self) -> list[Size]:
        """Return the sizes of a step in which each row has as many lines as the longest one."""
        right = [0.0] * max(map(len, self._chances.values()), default=0)
        for kind, chances in self._chances.items():
            for place, chance in enumerate(chances):
                right[place] += chance * self._counts[kind] * self._weight
        num_rows, sizes = rounded_rows(self._num_seqs), list[Size]()
        for choice in self._choices if right else ():
            sizes.append(Size(num_rows * (1 + choice), sum(right[:choice])))
            if choice >= len(right):
                break  # larger steps would have no more proposals
        return sizes

    def _packed(self, ranked: list[tuple[float, Kind]]) -> list[Size]:
        """Return the sizes of a step whose rows have no padding between them. The likeliest proposals fill each."""
        sizes, step, num_right, num_taken = list[Size](), packed_step(self._num_seqs), 0.0, float(self._num_seqs)
        num_lines = ceil_div(self._num_seqs + 1, step) * step
        for chance, kind in ranked:
            num_left = self._counts[kind] * self._weight
            while num_taken + num_left > num_lines:
                num_right += (num_lines - num_taken) * chance
                num_left -= num_lines - num_taken
                num_taken = num_lines
                sizes.append(Size(num_lines, num_right))
                num_lines += step
            num_taken += num_left
            num_right += num_left * chance
        if num_taken > max(self._num_seqs, num_lines - step):
            sizes.append(Size(num_lines, num_right))
        return sizes

    def take(self, size: Size) -> list[list[int]]:
        """Return the proposals of each row, as many as a step of this size has lines for; needs all sequences' rows."""
        counts, last, num_more = Counter[Kind](), None, 0  # proposals of each row of a kind; of some rows, one more
        if self._ranked is None:
            most = size.num_lines // rounded_rows(self._num_seqs) - 1
            counts.update({kind: min(most, len(chances)) for kind, chances in self._chances.items()})
        else:
            num_free = size.num_lines - self._num_seqs
            for _, kind in self._ranked:
                if self._counts[kind] > num_free:
                    last, num_more = kind, num_free
                    break
                counts[kind] += 1
                num_free -= self._counts[kind]
        proposed = list[list[int]]()
        for row in self._rows:
            if row is None or not row.draft:
                proposed.append([])
                continue
            count = counts[row.kind]
            if num_more and row.kind == last:
                count, num_more = count + 1, num_more - 1
            proposed.append(row.draft[:count])
        return proposed


def _ranked(chances: Chances) -> list[tuple[float, Kind]]:
    """Return the chances of proposals, the likeliest first; each stands for one place in all rows of a kind."""
    return sorted([(chance, kind) for kind, of_kind in chances.items() for chance in of_kind], reverse=True)
