"""Holds the compiled constraint of one request, and follows each of its samples by it."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoinfer.constraints import token_sets
from nanoinfer.constraints.grammars import Grammar, explain, is_refusal
from nanoinfer.constraints.thoughts import Thinking, Thoughts
from nanoinfer.constraints.token_sets import Bits, TokenSet
from nanoinfer.engine.token_masks import UserFunction


class MaskChanges(NamedTuple):
    """Says which stop tokens are removed from what a grammar allows, and which are added to that."""

    removed: frozenset[int]
    added: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RequestConstraint:
    """Makes the constraints of one request, whose options are checked and compiled.

    stop_ids: the model's stop tokens and the request's own.
    within: changes to the grammar's mask where the text may not end: own stop tokens that are text would end it early.
    at_early_end: changes where the text may end, but has fewer than min_tokens tokens.
    at_end: changes where it may end and has enough tokens: ignore_eos removes the model's stop tokens.
    Where the text may end and nothing else is left, all stop tokens are allowed, removed ones too.
    thoughts: how they are written, if they have a budget or come before a form; else None. budget: the most tokens of a
    thought. before_form: the tokens that may come before the form begins; None if it begins at once.
    """

    grammar: Grammar | None
    token_set: TokenSet | None
    functions: tuple[UserFunction, ...]
    stop_ids: frozenset[int]
    min_tokens: int
    within: MaskChanges
    at_early_end: MaskChanges
    at_end: MaskChanges
    thoughts: Thoughts | None = None
    budget: int | None = None
    before_form: Bits | None = None

    @functools.cached_property
    def follows_tokens(self) -> bool:
        """Return whether every mask depends on the token before it."""
        has_endings = self.token_set is not None and bool(self.token_set.endings)
        return bool(self.grammar is not None or has_endings or self.functions)

    @functools.cached_property
    def start_id(self) -> int | None:
        """Return a token that begins a thought where the form could begin, unless it may be the form's; or None."""
        if self.thoughts is None or self.grammar is None or self.thoughts.answer:
            return None
        first, *others = self.thoughts.start_ids
        return None if others and token_sets.has(self.grammar.first_mask, first) else first

    def start(self, prompt: Sequence[int] = ()) -> "SampleConstraint":
        return SampleConstraint(self, prompt)


class SampleConstraint:
    """Follows one sample by all that its request asks for.

    matcher: where its text is in the grammar, if it has one. template: what that was copied from, by number.
    token_ids: the completion's. failure: an error that was found out ahead, and the tokens after which it comes.
    thinking: where it is in its thoughts, as long as that matters. waiting: the matcher, until the form begins.
    form_start: how many tokens come before the form.
    """

    __slots__ = (
        "error",
        "failure",
        "follows_tokens",
        "form_start",
        "matcher",
        "plan",
        "template",
        "thinking",
        "token_ids",
        "waiting",
    )

    def __init__(self, plan: RequestConstraint, prompt: Sequence[int]) -> None:
        self.plan = plan
        self.matcher: Any = None
        self.template = 0
        if plan.grammar is not None:
            self.matcher, self.template = plan.grammar.fork()
        self.token_ids: list[int] = []
        self.error: str | None = None
        self.failure: tuple[list[int], str] | None = None
        self.thinking: Thinking | None = None
        self.waiting: Any = None
        self.form_start = 0
        self.follows_tokens = plan.follows_tokens
        if plan.thoughts is not None:
            self.thinking = Thinking(plan.thoughts, plan.budget, prompt)
            self.follows_tokens = plan.follows_tokens or self.thinking.needs_newest
            if not self.thinking.is_answer:
                self.waiting, self.matcher = self.matcher, None

    def append(self, token_id: int) -> bool:
        """Take the sample's newest token; return whether the text is complete with it.

        It is complete where the grammar allows nothing more, and with a stop token. Both end it over min_tokens and
        ignore_eos.
        """
        self.token_ids.append(token_id)
        if self.failure is not None and self.failure[0] == self.token_ids:
            self.error = self.failure[1]
        if self.thinking is not None and not self._is_of_form(self.thinking, token_id):
            return False
        if self.matcher is None or self.error is not None:
            return False
        if token_id in self.plan.stop_ids:  # which no matcher takes
            if self.matcher.is_accepting():
                return True
        elif self.matcher.consume_token(token_id):
            return bool(self.matcher.is_stopped())
        if not self.matcher.is_error() or is_refusal(self.matcher.get_error()):
            self._fail(f"token {token_id} was drawn and is not allowed", "report this as a bug")
        self.find_error()  # a limit of the library's, if it is not the token
        return False

    @property
    def start_id(self) -> int | None:
        """Return which token may come first, in place of the form's, and begin a thought."""
        can_begin = self.matcher is not None and self.thinking is not None and self.thinking.may_begin
        return self.plan.start_id if can_begin else None

    def _is_of_form(self, thinking: Thinking, token_id: int) -> bool:
        """Return whether the newest token is the form's; else take it as one that comes before, or has no form."""
        if self.matcher is not None:  # so this is the first token
            if token_id != self.plan.start_id or not thinking.may_begin:
                self.thinking = None  # nothing in a form is a thought
                return True
            thinking.begin()
            self.waiting, self.matcher = self.matcher, None
        thinking.append(token_id)
        self.follows_tokens = self.plan.follows_tokens or thinking.needs_newest
        if self.waiting is not None and thinking.is_answer:
            self.waiting, self.matcher, self.thinking = None, self.waiting, None
            self.form_start = len(self.token_ids)
        return False

    def num_allowed(self, proposals: Sequence[int]) -> int:
        """Return how many of these tokens, from the first one on, the grammar allows to follow."""
        if not proposals or self.matcher is None or self.thinking is not None:
            return len(proposals)
        # What the library has against a token would stay in the sample's own matcher.
        return int(self.matcher.deep_copy().validate_tokens([*proposals]))

    def forced(self) -> Sequence[int]:
        """Return the tokens that a grammar leaves no choice about, or that close a thought."""
        if self.thinking is not None:
            return self.thinking.forced
        return [] if self.matcher is None or self.error is not None else self.matcher.compute_ff_tokens()

    def fork(self) -> "SampleConstraint":
        """Return a copy that may follow tokens of which this does not know yet."""
        fork = copy.copy(self)
        fork.token_ids, fork.thinking = self.token_ids.copy(), copy.copy(self.thinking)
        if self.matcher is not None:
            fork.matcher = self.matcher.deep_copy()
        if self.waiting is not None:
            fork.waiting = self.waiting.deep_copy()
        return fork

    def write_token_set(self, row: Bits) -> None:
        """Write what the token set leaves; nothing after an error."""
        assert self.plan.token_set is not None, "rows are those of constraints with a set"
        self.plan.token_set.write(row, self.token_ids)
        if self.matcher is None and self.follows_tokens and self.error is None and not row.any():
            self._fail("allowed_token_ids and bad_words leave none", "allow more of them")
        if self.error is not None:
            row[:] = 0

    def find_error(self) -> bool:
        """Return whether no token may come any more, also if its matcher has just failed."""
        if self.error is None and self.matcher.is_error():
            self._fail(explain(self.matcher.get_error()), "make the grammar simpler")
        return self.error is not None

    def stop_tokens(self) -> MaskChanges:
        """Return what is to change in what the grammar allows."""
        plan = self.plan
        if not self.matcher.is_accepting():
            return plan.within
        return plan.at_early_end if len(self.token_ids) < plan.min_tokens else plan.at_end

    def end(self, row: Bits, set_row: Bits | None) -> None:
        """Allow stop tokens alone, as nothing else is left; where the text may not end, that is an error."""
        if self.plan.stop_ids and self.matcher.is_accepting():
            token_sets.add(row, self.plan.stop_ids)
            if set_row is not None:
                token_sets.add(set_row, self.plan.stop_ids)
            return
        self._fail("it and allowed_token_ids, bad_words or stop_token_ids leave none", "allow more of them")
        row[:] = 0

    def _fail(self, cause: str, remedy: str) -> None:
        name = "" if self.plan.grammar is None else f" by {self.plan.grammar.name}"
        self.error = f"no token may come{name} after {len(self.token_ids)} tokens: {cause}; {remedy}"
