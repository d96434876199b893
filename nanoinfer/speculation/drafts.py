"""Finds what a text may go on with: copies of what followed its last tokens elsewhere.

`TextDrafts` follows one sequence. Where the text repeats another place, it points at the token that would come next
there, and moves on as tokens are drawn. A text that is rewritten differs from its source now and then. So the pointer
survives one token that differs, whether the text replaces, inserts or leaves out a token. After more such tokens the
copy has ended, and the last tokens are looked up again. If that finds nothing, a single equal token a little further on
in the source resumes the copy.

Two methods look up. "ngram" takes the place with the longest match, as prompt lookup does (Saxena, 2023). "suffix" is
suffix decoding (Oliaro et al., 2024, arXiv 2411.04975). It looks at all places with a match of some length, in the text
itself and in earlier answers. A token's probability is the share of these places that go on with it. The length whose
draft has the largest sum of probabilities wins. The published method keeps trees of all suffixes. Here the newest
`MAX_PLACES` places with the same last tokens stand for all, so a dict is enough.
"""

from array import array
from collections import Counter
from typing import NamedTuple

from nanoinfer.speculation.text_index import END, TextIndex, count_equal
from nanoinfer.speculative_config import SpeculativeOptions

MIN_MATCH = 3  # of "suffix": fewer equal tokens say little, and are found everywhere
SURE_MATCH = 8  # after so many equal tokens, one that differs does not cause a new lookup
MAX_REPLACED = 32  # within so many tokens, one equal token resumes a copy that has ended
MAX_PLACES = 16  # places that a lookup compares
MAX_CACHED_TOKENS = 2**19  # tokens of earlier answers, in both halves together: they take some 60 MB
NO_TEXT = array("i")


class Draft(NamedTuple):
    """Holds tokens that may come next. score: how many of them are expected to come."""

    token_ids: list[int]
    score: float


class Ahead(NamedTuple):
    """Holds the tokens that are expected next, and the draft for what follows them."""

    expected: "array[int]"
    token_ids: list[int]


class Match(NamedTuple):
    """Holds places in a text that follow a copy of another text's last tokens, newest first. score: see Draft."""

    places: list[int]
    num_equal: int
    score: float


class EarlierAnswers:
    """Keeps the newest answers of the engine for "suffix".

    There are two indices: when the newer one is full, it becomes the older one, and the older one is dropped.
    min_match: n of their n-grams.
    """

    def __init__(self, max_requests: int, max_tokens: int = MAX_CACHED_TOKENS, min_match: int = MIN_MATCH) -> None:
        self._max_requests, self._max_tokens, self._min_match = max_requests, max_tokens, min_match
        self._num_answers = 0  # in the newer half
        self.halves = [TextIndex(array("i"), min_match)]

    def add(self, token_ids: "array[int]") -> None:
        half = self.halves[0]
        is_full = len(half.tokens) + len(token_ids) > self._max_tokens // 2
        if self._num_answers >= max(1, self._max_requests // 2) or (is_full and half.tokens):
            half, self._num_answers = TextIndex(array("i"), self._min_match), 0
            self.halves = [half, self.halves[0]] if self._max_requests > 1 else [half]
        if self._max_requests > 0:
            half.tokens.extend(token_ids[-self._max_tokens // 2 :])
            half.tokens.append(END)
            half.extend()
            self._num_answers += 1


class TextDrafts:
    """Follows the text of one sequence, and says what it may go on with.

    token_ids: the text. After it has grown, call `follow`. answers: other texts in which "suffix" looks up.

    A text that begins to repeat itself, then has 77 where its beginning has 5:

    >>> text = array("i", [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3])
    >>> drafts = TextDrafts(SpeculativeOptions("suffix", 8), text, EarlierAnswers(0))
    >>> drafts.draft(8)  # 3 tokens are equal, so it trusts the copy for 3 more
    [4, 5, 6]
    >>> text.extend([4, 77])
    >>> drafts.follow()
    >>> drafts.draft(8)  # 77 is taken to replace 5, and 4 tokens were equal
    [6, 7, 8, 9]
    >>> text.append(6)
    >>> drafts.follow()
    >>> drafts.draft(8)
    [7, 8, 9, 0, 1]
    """

    def __init__(self, options: SpeculativeOptions, token_ids: "array[int]", answers: EarlierAnswers) -> None:
        self._is_suffix = options.method == "suffix"
        self._options, self._answers = options, answers
        self._max_match = options.suffix_decoding_max_tree_depth if self._is_suffix else options.prompt_lookup_max
        min_match = min(MIN_MATCH, self._max_match) if self._is_suffix else options.prompt_lookup_min
        self._index = TextIndex(token_ids, min_match)
        self._index.extend()
        self._token_index: TextIndex | None = None  # of single tokens, once they are looked up
        self._num_followed = len(token_ids)
        # What the text copies: places in one source text, the newest first, each at the token that would come next.
        self._source, self._places = NO_TEXT, list[int]()
        self._num_matched = 0  # equal tokens of this copy, not counting those that differed
        self.num_equal = self.num_before = 0  # equal tokens since one differed; the same when the last draft was made
        self._num_trusted = 0  # equal tokens, with those before a copy was resumed, up to _max_match
        self._has_missed = False  # whether the newest token differed from the source's
        self._left_at = self._ended_at = 0  # where the copy ended: in the source, and in the text
        self._near: frozenset[int] | None = None  # the source's next tokens from there on, once `_resume` has asked

    def follow(self) -> None:
        """Take in the tokens that were appended to the text."""
        tokens = self._index.tokens
        position, end = self._num_followed, len(tokens)
        self._num_followed = end
        while self._places and position < end:
            if len(self._places) == 1:
                position = self._move_along(position, end)
                if position == end:
                    return
            self._move(position)
            position += 1

    def _move_along(self, position: int, end: int) -> int:
        """Follow the only place by the tokens of the text from `position` to `end`; return the first that differs."""
        source, tokens, first = self._source, self._index.tokens, position
        [place] = self._places
        end = min(end, position + len(source) - place)
        while position < end and source[place] == tokens[position]:
            place, position = place + 1, position + 1
        if position > first:
            self._advance([place], position - first)
        return position

    def _advance(self, places: list[int], num_equal: int) -> None:
        """Move the pointer to these places, since the text had `num_equal` more tokens of the source."""
        self._places, self._has_missed = places, False
        self._num_matched += num_equal
        self.num_equal += num_equal
        self._num_trusted = min(self._num_trusted + num_equal, self._max_match)

    def catch_up(self) -> None:
        """Add the newest tokens of the text to its index, so that lookups find them."""
        self._index.extend()

    def draft(self, most: int, takes_short: bool = True, catches_up: bool = True) -> list[int]:
        """Return at most `most` tokens that may come next. `num_before` says how many tokens before them are equal.

        takes_short: whether "suffix" may go by fewer than MIN_MATCH equal tokens if nothing else is found. catches_up:
        whether the index is extended to the end of the text first; otherwise lookups see it as of the last `catch_up`.
        """
        if not self._places or (self._has_missed and self._num_trusted < SURE_MATCH):
            if catches_up:
                self._index.extend()
            self._look_up(most)
        if not self._places:
            self._resume()
        self.num_before = self.num_equal
        if len(self._places) == 1:
            return self._read(self._source, self._places[0], self._max_proposals(most, self._num_trusted), [])
        if self._places:
            return self._draft_from(self._source, self._places, self._max_proposals(most, self._num_trusted)).token_ids
        return self._draft_from_last_token(most) if takes_short and self._is_suffix else []

    def look_ahead(self, num_proposed: int, most: int) -> Ahead | None:
        """Return the tokens to expect, and the draft after them: what `draft` will return if all of them come.

        The tokens to expect are `num_proposed` proposals and the one after them. None if there are several places or
        none, or if the source ends too early.
        """
        if len(self._places) != 1:
            return None
        start = self._places[0] + num_proposed + 1
        trusted = min(self._num_trusted + num_proposed + 1, self._max_match)
        end = start + self._max_proposals(most, trusted)
        tokens = self._source[self._places[0] : end]
        if len(self._source) < end or END in tokens:
            return None
        return Ahead(tokens[: num_proposed + 1], tokens[num_proposed + 1 :].tolist())

    def follow_ahead(self, ahead: Ahead) -> list[int]:
        """Take in the expected tokens, which have been appended to the text; return the draft after them."""
        count = len(ahead.expected)
        self._num_followed += count
        self._advance([self._places[0] + count], count)
        self.num_before = self.num_equal
        return ahead.token_ids

    def _draft_from_last_token(self, most: int) -> list[int]:
        """Return what follows the newest token elsewhere in the text. This begins no copy for `follow` to follow."""
        self._token_index = self._token_index or TextIndex(self._index.tokens, 1)
        self._token_index.extend()
        tokens = self._index.tokens
        if not (places := self._token_index.places(self._token_index.key(tokens), MAX_PLACES)):
            return []
        match = self._best_match(tokens, places, most)
        self.num_before = match.num_equal
        return self._draft_from(tokens, match.places, self._max_proposals(most, match.num_equal)).token_ids

    def _max_proposals(self, most: int, num_matched: int) -> int:
        """Return how many tokens may be proposed after `num_matched` equal ones."""
        factor = self._options.suffix_decoding_max_spec_factor
        return min(most, int(num_matched * factor)) if self._is_suffix else most

    def _move(self, position: int) -> None:
        """Move the places on by the token at this position of the text."""
        source, places, tokens = self._source, self._places, self._index.tokens
        token_id = tokens[position]
        end = position if source is tokens else len(source)  # the text itself is a source as far as it came before
        if moved := [place + 1 for place in places if place < end and source[place] == token_id]:
            self._advance(moved, 1)
            return
        place, missed_before = places[0], self._has_missed
        self._has_missed = False
        self.num_equal = 0
        if not missed_before and self._num_matched > 1:
            self._left_at, self._ended_at, self._near = place, position, None
        if place + 1 < end and source[place + 1] == token_id:  # the text leaves out a token of the source
            self._places = [place + 2]
        elif not missed_before and self._num_matched > 1:  # take it as a replaced token
            self._places, self._has_missed = [place + 1], True
        elif missed_before and source[place - 1] == token_id:  # the token before was inserted
            self._places = [place]
        else:
            self._places = []

    def _resume(self) -> None:
        """Resume a copy that has ended, if the newest token stands in the source a little after that place."""
        source, tokens = self._source, self._index.tokens
        if not self._num_trusted or len(tokens) - 1 - self._ended_at > MAX_REPLACED:
            return
        if (near := self._near) is None:
            end = min(self._left_at + MAX_REPLACED, len(source) - (source is tokens))
            near = frozenset(source[self._left_at : end])
            if end == self._left_at + MAX_REPLACED:  # else the source may still grow
                self._near = near
        if tokens[-1] in near:
            self._places = [source.index(tokens[-1], self._left_at) + 1]
            self._num_matched, self.num_equal, self._has_missed = 1, 1, False

    def _look_up(self, most: int) -> None:
        """Point to the best places that follow a copy of the text's last tokens; if there are none, change nothing."""
        key, best = self._index.key(self._index.tokens), 0.0
        for index in (self._index, *self._answers.halves):
            if key in index.newest:  # mostly not, and a call takes longer
                match = self._best_match(index.tokens, index.places(key, MAX_PLACES), most)
                if match.score > best:
                    best = match.score
                    self._begin_copy(index.tokens, match.places, match.num_equal)

    def _best_match(self, other: "array[int]", places: list[int], most: int) -> Match:
        """Return the longest match of the text's last tokens before these places; for "suffix", the best in score."""
        text = self._index.tokens
        matched = [count_equal(text, other, place, self._max_match) for place in places]
        if not self._is_suffix:
            return Match([places[matched.index(max(matched))]], max(matched), 1.0)
        best = Match([], 0, 0.0)
        for length in sorted({*matched}, reverse=True):
            equal = [place for place, its in zip(places, matched, strict=True) if its >= length]
            score = self._draft_from(other, equal, self._max_proposals(most, length)).score
            if score > best.score:
                best = Match(equal, length, score)
        return best

    def _begin_copy(self, source: "array[int]", places: list[int], num_matched: int) -> None:
        self._source, self._places, self._has_missed, self._near = source, places, False, None
        self._num_matched = self._num_trusted = self.num_equal = num_matched

    def _draft_from(self, source: "array[int]", places: list[int], most: int) -> Draft:
        """Return what most of these places in a text go on with, as long as it is likely."""
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        if len(places) == 1:
            token_ids = self._read(source, places[0], most, token_ids)
            return Draft(token_ids, float(len(token_ids)))
        if len(places) > 1 and len({source[place : place + most].tobytes() for place in places}) == 1:
            places = places[:1]
        while len(places) > 1 and len(token_ids) < most:
            nexts = Counter(source[place] for place in places if place < len(source) and source[place] != END)
            token_id, count = nexts.most_common(1)[0] if nexts else (END, 0)
            probability *= count / len(places)
            if probability == 0.0 or probability < self._options.suffix_decoding_min_token_prob:
                return Draft(token_ids, score)
            token_ids.append(token_id)
            score += probability
            places = [place + 1 for place in places if place < len(source) and source[place] == token_id]
        if places and (num_left := most - len(token_ids)) > 0:
            rest = self._read(source, places[0], num_left, token_ids)
            token_ids += rest
            score += probability * len(rest)
        return Draft(token_ids, score)

    def _read(self, source: "array[int]", place: int, most: int, before: list[int]) -> list[int]:
        """Return what follows a place. Past the end of the text itself, the draft for that text (`before`) goes on."""
        token_ids = source[place : place + most].tolist()
        if END in token_ids:
            return token_ids[: token_ids.index(END)]
        if len(token_ids) < most and source is self._index.tokens and token_ids:
            num_read, whole = len(token_ids), before + token_ids
            for index in range(most - num_read):
                whole.append(whole[index])
            token_ids = whole[len(before) :]
        return token_ids
