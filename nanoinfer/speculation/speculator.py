"""The engine's Proposer: proposes a draft for each row, if the controller finds that proposals pay.

The scheduler calls it once or twice for each decode step:

1. `waits`, if the step before is in flight. If proposals pay, or have paid lately, the answer is yes: the tokens of
   that step are then collected first. Until they come, the Speculator learns from earlier proposals, indexes texts, and
   drafts for the case that all of a row's proposals are right.
2. `propose`. If the step has waited, each row is drafted for (`DraftedRow.follow`), the proposals are ranked
   (`Offers`), the controller chooses how many lines the step has, and the likeliest proposals fill them.

The next call of `follow` compares the draft with the tokens that came. From this the Speculator estimates how likely
proposals are right (`Acceptance`).

A step that waits sees at once that a text begins to repeat; one that overlaps sees it a step later. So after proposals
have paid, steps go on waiting for a while, even those without proposals, until that has cost what was saved lately.

Where many rows run, only a few are watched until their texts promise a gain (`watch.py`). Watched rows are drafted for
while plain steps overlap, and their drafts are judged by the tokens that come. So text that repeats nothing costs next
to nothing, and its steps overlap as without a proposer.

A form, such as a JSON schema, leaves no choice about many tokens. These are proposed before what the text repeats.
"""

import logging
import math
import time
from array import array
from collections import Counter
from itertools import accumulate, takewhile
from operator import mul
from typing import NamedTuple

from nanoinfer.config import EngineConfig
from nanoinfer.engine.interfaces import FEW_ROWS, RunnerLimits, row_sizes
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.metrics import EngineMetrics
from nanoinfer.speculation.controller import MOST_EQUAL, Acceptance, Controller
from nanoinfer.speculation.drafts import MIN_MATCH, Ahead, EarlierAnswers, TextDrafts
from nanoinfer.speculation.offers import Kind, Offers
from nanoinfer.speculation.text_index import num_right
from nanoinfer.speculation.watch import MAX_WATCHED, Watch
from nanoinfer.speculative_config import SpeculativeOptions

logger = logging.getLogger("nanoinfer")

NUM_UNEVEN = 3  # so many plain steps after one that has waited are not measured
# Steps of many rows are bound by arithmetic, so each proposal takes time. The least chance that is worth it is
# rows / ROWS_TO_CHANCE, and at most MOST_CHANCE.
ROWS_TO_CHANCE, MOST_CHANCE = 512, 0.5
MAX_SHORT = 32  # with more rows, drafts that follow from fewer than MIN_MATCH equal tokens are not worth their lines
INDEXING_SHARE = 0.75  # the share of a plain step's time in which the host indexes texts while the device computes
MAX_SAVED = 1.0  # savings that are remembered for steps that wait in vain to use up, in plain steps
FORM_PRIOR = 0.9  # the first estimate for forced text: its characters are certain, its division into tokens is not
NOTHING = Offers([], 0, {}, [], packs=False)


class StepStart(NamedTuple):
    """Says what was known when a step began.

    num_lines: see `Controller.note`; None if the step overlaps with the one before it. num_tokens: how many tokens the
    engine had generated. num_overlapped: the length of the run of overlapping steps that this one ends.
    """

    time: float  # perf_counter
    num_rows: int
    num_lines: int | None
    num_tokens: int
    num_overlapped: int


# How many rows had a result: arguments of `Acceptance.judge`, without the number of rows.
Results = Counter[tuple[int, int, int]]
# The kind of a row, its draft, and the tokens that came in place of the draft.
Verdict = tuple[Kind, list[int], "array[int]"]


class DraftedRow:
    """Holds a sequence and its draft, the tokens that it may go on with.

    draft: what follows the tokens that `drafts` has followed. Tokens that the sequence's form forces come first, in
    place of as many of the text's. ahead: the next draft, if all proposals are right.
    """

    def __init__(self, seq: Sequence, drafts: TextDrafts) -> None:
        self.seq, self.drafts = seq, drafts
        self.num_followed = 0
        self.draft: list[int] = []
        self.kind: Kind = (0, 0, 0)
        self.ahead: Ahead | None = None

    def follow(self, most: int, takes_short: bool, catches_up: bool) -> Verdict | None:
        """Draft at most `most` tokens for what comes next; return how the last draft did, if there was one."""
        tokens, first = self.seq.token_ids, self.num_followed
        if first == len(tokens):
            return None
        verdict = (self.kind, self.draft, tokens[first : first + len(self.draft)]) if self.draft else None
        self.num_followed = len(tokens)
        if self.ahead is not None and tokens[first:] == self.ahead.expected:
            self.draft = self.drafts.follow_ahead(self.ahead)
        else:
            self.drafts.follow()
            self.draft = self.drafts.draft(most, takes_short, catches_up)
        self.ahead, num_forced = None, 0
        if self.seq.constraint is not None:
            forced = [*self.seq.constraint.forced()][:most]
            num_forced = len(forced)
            self.draft[:num_forced] = forced
        if self.draft:  # the number of equal tokens is capped, so that there are few kinds
            self.kind = num_forced, min(self.drafts.num_before, MOST_EQUAL), len(self.draft)
        return verdict


class Speculator:
    """Proposes tokens that the sequences of an engine may go on with. See `Proposer`.

    max_num_tokens: the most proposals of a row. overlaps: whether plain steps are launched before the tokens of the
    last one are collected. stats: the engine's metrics, which count the time that proposals save. packs_lines: see
    RunnerLimits.
    """

    def __init__(
        self,
        options: SpeculativeOptions,
        max_num_tokens: int,
        overlaps: bool,
        stats: EngineMetrics,
        packs_lines: bool = False,
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self._options, self._overlaps, self._stats = options, overlaps, stats
        min_match = min(MIN_MATCH, options.suffix_decoding_max_tree_depth)
        self._answers = EarlierAnswers(options.suffix_decoding_max_cached_requests, min_match=min_match)
        self._learns = options.method == "suffix"
        self._controller, self._packs_lines = Controller(), packs_lines
        self._choices = [size - 1 for size in row_sizes(max_num_tokens + 1)]
        self._text_acceptance, self._form_acceptance = Acceptance(), Acceptance(FORM_PRIOR, most_equal=0)
        self._rows: dict[Sequence, DraftedRow] = {}
        self._verdicts, self._unlearned = list[Verdict](), list[Sequence]()  # what `_learn` has not learned from yet
        self._drafted, self._proposed = list[DraftedRow | None](), list[list[int]]()  # of the last step
        self._watch = Watch()
        self._seqs: list[Sequence] = []  # of the last step
        self._is_asked = False  # whether a step is in flight, and the next one does not wait for it
        self._pays = False  # whether the next step is to wait, because proposals pay or have paid lately
        self._num_saved = 0.0  # plain steps: see MAX_SAVED
        self._last: StepStart | None = None

    def waits(self, seqs: list[Sequence]) -> bool:
        """Return whether the next step is to wait for the one in flight, because proposals are worth it."""
        if not (self._pays or self._proposed):
            promises = self._pay_for_watched(seqs, num_unknown=1)
            is_believed = promises and (len(seqs) <= MAX_WATCHED or self._watch.believes())
            self._pays = is_believed and self._index_all(seqs)
            if not self._pays:
                self._is_asked = True
                return False
        self._work_meanwhile(seqs)
        return True

    def _index_all(self, seqs: list[Sequence]) -> bool:
        """Index the texts of all sequences, or of as many as there is time for now; return whether all are indexed."""
        end = time.perf_counter() + INDEXING_SHARE * (self._controller.plain_seconds(len(seqs)) or 0.0)
        for seq in seqs:
            if time.perf_counter() > end:
                return False
            if (row := self._rows.get(seq)) is None:
                self._row_of(seq, catches_up=True)
            else:
                row.drafts.catch_up()
        return True

    def _work_meanwhile(self, seqs: list[Sequence]) -> None:
        """Do the work that does not depend on the tokens of the step in flight, while the device computes it."""
        self._learn()
        self._index_all(seqs)
        for row, proposed in zip(self._drafted, self._proposed or [[]] * len(self._drafted), strict=True):
            if row is not None and row.seq.constraint is None:
                row.ahead = row.drafts.look_ahead(len(proposed), self.max_num_tokens)

    def _learn(self) -> None:
        """Learn how likely proposals are, from the drafts that were followed, and the answers of ended sequences."""
        for seq in self._unlearned:
            self._answers.add(seq.token_ids[seq.num_prompt_tokens :])
        self._unlearned.clear()
        # Many rows have the same result, so equal ones are counted first.
        of_forms, of_text = Results(), Results()
        for (num_forced, num_equal, _), draft, came in self._verdicts:
            right = num_right(draft, came)
            judged = min(right + 1, len(came))
            if num_forced:
                of_forms[0, min(right, num_forced), min(judged, num_forced)] += 1
            if judged > num_forced:
                of_text[num_equal + num_forced, right - num_forced, judged - num_forced] += 1
        self._verdicts.clear()
        for acceptance, results in ((self._form_acceptance, of_forms), (self._text_acceptance, of_text)):
            for result, num_rows in results.items():
                acceptance.judge(*result, num_rows)

    def propose(self, seqs: list[Sequence]) -> list[list[int]]:
        """Return the ids of the tokens that each sequence may go on with; an empty list if none has any."""
        in_flight, self._is_asked = self._is_asked, False
        overlaps = in_flight and self._overlaps
        self._note_step(len(seqs), overlaps)
        if self._verdicts or self._unlearned:
            self._learn()
        self._notice_ends(seqs)
        num_lines, rows, self._proposed = 0, list[DraftedRow | None](), []
        if not in_flight:
            looks = self._pays or len(seqs) <= MAX_WATCHED or self._pay_for_watched(seqs)
            catches_up = len(seqs) <= MAX_SHORT or not self._overlaps  # else there was time for it
            rows = [self._row_of(seq, catches_up) for seq in seqs] if looks else []
            offers = self._offers(len(seqs), rows)
            size = self._controller.choose(len(seqs), offers.sizes, has_waited=True)
            pays = self._controller.choose(len(seqs), offers.sizes) is not None
            if self._last is not None and self._last.num_lines is None:
                self._watch.note(was_right=pays)
            is_known = self._controller.plain_seconds(len(seqs)) is not None
            self._pays = is_known and (pays or self._num_saved > 0)
            if size is not None:
                num_lines, self._proposed = size.num_lines, offers.take(size)
        self._drafted, before = rows, self._last
        self._last = StepStart(
            time=time.perf_counter(),
            num_rows=len(seqs),
            num_lines=None if overlaps else num_lines,
            num_tokens=self._stats.num_generated_tokens,
            num_overlapped=before.num_overlapped + 1 if overlaps and before is not None else int(overlaps),
        )
        return self._proposed

    def _offers(self, num_seqs: int, rows: list[DraftedRow | None], num_unknown: int = 0) -> Offers:
        """Return what could be proposed to `num_seqs` sequences. rows: those of all sequences, or of some."""
        for row in rows:
            if row is not None and row.draft:
                break
        else:
            return NOTHING
        chances, packs = self._chances(num_seqs, rows, num_unknown), self._packs_lines and num_seqs > FEW_ROWS
        return Offers(rows, num_seqs, chances, self._choices, packs)

    def _pay_for_watched(self, seqs: list[Sequence], num_unknown: int = 0) -> bool:
        """Return whether proposals would pay, as estimated from the few rows that are watched."""
        watched = seqs
        if len(seqs) > MAX_WATCHED:
            watched = self._watch.choose(seqs, self._rows, self._controller.plain_seconds(len(seqs)) or 0.0)
        rows = [self._row_of(seq, catches_up=True) for seq in watched]
        return self._controller.choose(len(seqs), self._offers(len(seqs), rows, num_unknown).sizes) is not None

    def _row_of(self, seq: Sequence, catches_up: bool) -> DraftedRow | None:
        """Return the row of a sequence, with a draft after its known tokens; None if it may have no proposals.

        catches_up: see `TextDrafts.draft`. If False, a new sequence gets None: `_index_all` makes its row later.
        """
        row = self._rows.get(seq)
        if row is None:
            if seq.sampling_params.logits_processors or not catches_up:
                return None  # a user's function would be called for tokens that are not drawn
            drafts = TextDrafts(self._options, seq.token_ids, self._answers)
            row = self._rows[seq] = DraftedRow(seq, drafts)
        verdict = row.follow(self.max_num_tokens, len(self._seqs) <= MAX_SHORT, catches_up)
        if verdict is not None:
            self._verdicts.append(verdict)
        return row

    def _chances(self, num_seqs: int, rows: list[DraftedRow | None], num_unknown: int = 0) -> dict[Kind, list[float]]:
        """Return the probability that a row's first proposal counts, its second, and so on, by the kind of the row.

        Unlikely proposals are left out. num_unknown: how many tokens come before the next step. A draft has to be right
        about these first.
        """
        least, chances = min(num_seqs / ROWS_TO_CHANCE, MOST_CHANCE), dict[Kind, list[float]]()
        for kind in {row.kind for row in rows if row and row.draft}:
            num_forced, num_equal, num_drafted = kind
            probabilities = self._form_acceptance.probabilities(0, num_forced) if num_forced else []
            if num_free := num_drafted - num_forced:
                probabilities += self._text_acceptance.probabilities(num_equal + num_forced, num_free + num_unknown)
            right = math.prod(probabilities[:num_unknown])
            products = accumulate(probabilities[num_unknown:], mul, initial=1.0)
            likely = takewhile(lambda chance: chance >= least, products)
            chances[kind] = [right * chance for chance in [*likely][1:]]
        return chances

    def _notice_ends(self, seqs: list[Sequence]) -> None:
        """Forget sequences that have finished; "suffix" learns their answers next."""
        if seqs == self._seqs:
            return
        ended = [seq for seq in (*self._seqs, *self._rows) if seq.status is SequenceStatus.FINISHED]
        for seq in dict.fromkeys(ended):
            self._rows.pop(seq, None)
            if self._learns:
                self._unlearned.append(seq)
        self._seqs = [*seqs]

    def _note_step(self, num_rows: int, overlaps: bool) -> None:
        """Measure the step before this one, if both are of one kind, so that nothing else ran between them.

        overlaps: whether this step overlaps with the one before it.
        """
        last = self._last
        if last is None or last.num_rows != num_rows or num_rows == 0:
            return
        seconds, num_lines = time.perf_counter() - last.time, last.num_lines
        # The host launches the first overlapping steps faster than the device computes them.
        if (overlaps and last.num_overlapped >= NUM_UNEVEN) or (num_lines == 0 and not self._overlaps):
            self._controller.note_plain(num_rows, seconds)
        elif num_lines is not None and not overlaps:
            self._controller.note(num_rows, num_lines, seconds)
            if (plain := self._controller.plain_seconds(num_rows)) is not None:
                num_steps = (self._stats.num_generated_tokens - last.num_tokens) / num_rows  # in plain steps
                num_saved = num_steps - self._controller.cost(num_rows, num_lines)
                self._num_saved = min(max(0.0, self._num_saved + num_saved), MAX_SAVED)
                self._stats.draft_seconds_saved += num_saved * plain


def make_speculator(config: EngineConfig, limits: RunnerLimits, stats: EngineMetrics) -> Speculator | None:
    """Return the Speculator that an engine's options ask for; None where they ask for none, or rows have no room."""
    if config.speculative_config is None:
        return None
    options = SpeculativeOptions(**config.speculative_config)
    max_num_tokens = min(options.num_speculative_tokens, limits.max_row_tokens - 1)
    if max_num_tokens < options.num_speculative_tokens:
        logger.warning(
            "num_speculative_tokens=%d is more than attention of this model has room for; it proposes %d",
            options.num_speculative_tokens,
            max_num_tokens,
        )
    if max_num_tokens == 0:
        return None
    return Speculator(options, max_num_tokens, config.overlap, stats, limits.packs_lines)
