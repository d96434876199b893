"""What limits the tokens of a request beside their probability: compiled once, then followed token by token."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nanoinfer.constraints import token_sets
from nanoinfer.constraints.grammars import Grammar, GrammarCache, GrammarLibrary, explain
from nanoinfer.constraints.rules import Constraint, ConstraintPlan, RowMasks, StepRules, UserFunction
from nanoinfer.constraints.token_sets import Bits, TokenSet
from nanoinfer.errors import RequestError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.tokenizer import Tokenizer


class Constraints:
    """Compiles what requests ask for, and says what each token of a step may be.

    vocab_size: width of the logits. stop_token_ids: the model's.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._num_words = -(-vocab_size // 32)
        self._stop_token_ids = frozenset(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._grammars = GrammarCache(
            functools.partial(GrammarLibrary, tokenizer, vocab_size, self._stop_token_ids)  # set up at its first use
        )

    def compile(self, params: Sequence[SamplingParams], use_tqdm: bool = False) -> list[ConstraintPlan | None]:
        """Return a plan for each request, or None where it asks for nothing. Safe to call from several threads.

        Grammars are compiled in threads, each once; a bar shows that if it takes half a second. Raises RequestError for
        what is wrong, does not fit the model's tokenizer, or leaves no token to begin with.
        """
        asking = {id(one): one for one in params if _asks(one)}
        if not asking:
            return [None] * len(params)
        num_samples: dict[Any, int] = {}  # that follow each grammar
        for one in params:
            if id(one) in asking and one.structured_outputs is not None:
                num_samples[one.structured_outputs] = num_samples.get(one.structured_outputs, 0) + one.n
        grammars = self._grammars.compile(num_samples, use_tqdm) if num_samples else {}
        make_set = functools.cache(functools.partial(token_sets.make_token_set, self._tokenizer, self._vocab_size))
        plans = {}
        for key, one in asking.items():
            allowed, words = one.allowed_token_ids, tuple(one.bad_words or ())
            token_set = make_set(allowed, words) if allowed is not None or words else None
            grammar = None if one.structured_outputs is None else grammars[one.structured_outputs]
            plans[key] = self._plan(one, grammar, token_set)
        return [plans.get(id(one)) for one in params]

    def rules(self, constraints: Sequence[Constraint | None]) -> StepRules:
        """Return what each token of a step may be; its constraint, if it has one, knows the tokens before it.

        A constraint that leaves no token has an `error` from then on. The arrays are new ones in each step: they may
        still be copied from while the next step's are written.
        """
        followed = [
            (line, constraint)
            for line, constraint in enumerate(cast(Sequence[SampleConstraint | None], constraints))
            if constraint is not None
        ]
        in_grammar = [(line, constraint) for line, constraint in followed if constraint.matcher is not None]
        in_set = [(line, constraint) for line, constraint in followed if constraint.plan.token_set is not None]
        sets = np.empty((len(in_set), self._num_words), np.int32)
        set_rows = {line: row for (line, _), row in zip(in_set, sets, strict=True)}
        for line, constraint in in_set:
            constraint.write_token_set(set_rows[line])
        grammars = np.empty((len(in_grammar), self._num_words), np.int32)
        self._fill([constraint for _, constraint in in_grammar], grammars)
        for (line, constraint), row in zip(in_grammar, grammars, strict=True):
            constraint.finish_mask(row, set_rows.get(line))
        return StepRules(
            RowMasks([line for line, _ in in_grammar], grammars) if in_grammar else None,
            RowMasks([line for line, _ in in_set], sets) if in_set else None,
            {
                line: (constraint.plan.functions, list(constraint.token_ids))
                for line, constraint in followed
                if constraint.plan.functions
            },
        )

    def _fill(self, constraints: list["SampleConstraint"], masks: NDArray[np.int32]) -> None:
        """Write what the grammars allow, row by row."""
        matchers = []
        for row, constraint in enumerate(constraints):
            assert constraint.plan.grammar is not None, "it was found to have one"
            if constraint.error is not None:
                masks[row] = 0
            elif not constraint.token_ids:
                masks[row] = constraint.plan.grammar.first_mask
            else:
                matchers.append((constraint.matcher, row))
        if matchers:
            self._grammars.library.fill(matchers, masks)

    def _plan(self, params: SamplingParams, grammar: Grammar | None, token_set: TokenSet | None) -> "Plan":
        own = frozenset(token_id for token_id in params.stop_token_ids or () if token_id < self._vocab_size)
        if grammar is not None and (own or token_set is not None):
            first_mask = grammar.first_mask.copy() if token_set is None else grammar.first_mask & token_set.always
            token_sets.remove(first_mask, own)
            if not first_mask.any() and not grammar.fork().is_accepting():
                raise RequestError(
                    f"{grammar.name} begins with no token that allowed_token_ids, bad_words and stop_token_ids leave; "
                    "allow more"
                )
        return Plan(
            grammar=grammar,
            token_set=token_set,
            functions=tuple(params.logits_processors or ()),
            stop_ids=self._stop_token_ids | own,
            own_stop_ids=own - self._stop_token_ids,
            ignored_stop_ids=self._stop_token_ids - own if params.ignore_eos else frozenset(),
            min_tokens=params.min_tokens,
        )


@dataclass(frozen=True)
class Plan:
    """What one request asks for, checked and compiled.

    stop_ids: the model's and the request's own; own_stop_ids: those that are not the model's.
    ignored_stop_ids: those that come only where the grammar allows nothing else, as ignore_eos asks.
    min_tokens: before this many tokens, all stop ids come only there.
    """

    grammar: Grammar | None
    token_set: TokenSet | None
    functions: tuple[UserFunction, ...]
    stop_ids: frozenset[int]
    own_stop_ids: frozenset[int]
    ignored_stop_ids: frozenset[int]
    min_tokens: int

    def start(self) -> "SampleConstraint":
        return SampleConstraint(self)


class SampleConstraint:
    """Follows one sample by all that its request asks for.

    matcher: where its text is in the grammar, if it has one. token_ids: the completion's.
    """

    __slots__ = ("error", "follows_tokens", "matcher", "plan", "token_ids")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.matcher: Any = None if plan.grammar is None else plan.grammar.fork()
        self.token_ids: list[int] = []
        self.error: str | None = None
        has_endings = plan.token_set is not None and bool(plan.token_set.endings)
        self.follows_tokens = bool(plan.grammar is not None or has_endings or plan.functions)

    def append(self, token_id: int) -> bool:
        """Take the sample's newest token; return whether the text is complete with it.

        It is complete where the grammar allows nothing more, and with a stop token. Both end it over min_tokens and
        ignore_eos.
        """
        self.token_ids.append(token_id)
        if self.matcher is None or self.error is not None:
            return False
        if token_id in self.plan.stop_ids:  # which no matcher takes
            if self.matcher.is_accepting():
                return True
        elif self.matcher.consume_token(token_id):
            return bool(self.matcher.is_stopped())
        self._fail(f"token {token_id} was drawn and is not allowed", "report this as a bug")
        return False

    def write_token_set(self, row: Bits) -> None:
        """Write what the token set leaves; nothing after an error."""
        assert self.plan.token_set is not None, "rows are those of constraints with a set"
        self.plan.token_set.write(row, self.token_ids)
        if self.matcher is None and self.follows_tokens and self.error is None and not row.any():
            self._fail("allowed_token_ids and bad_words leave none", "allow more of them")
        if self.error is not None:
            row[:] = 0

    def finish_mask(self, row: Bits, set_row: Bits | None) -> None:
        """Say in what the grammar allows where stop tokens may come; find out whether any token is left.

        set_row: what the token set leaves, if there is one.
        """
        plan, matcher = self.plan, self.matcher
        if self.error is not None:
            return
        if matcher.is_error():
            self._fail(explain(matcher.get_error()), "make the grammar simpler")
            row[:] = 0
            return
        held_back = plan.stop_ids if len(self.token_ids) < plan.min_tokens else plan.ignored_stop_ids
        if not held_back and not plan.own_stop_ids and set_row is None:
            return
        may_end = matcher.is_accepting()
        token_sets.remove(row, plan.own_stop_ids)  # in the text they would end it early
        if may_end:
            token_sets.add(row, plan.own_stop_ids)
            token_sets.remove(row, held_back)
        if np.count_nonzero(row if set_row is None else row & set_row):  # twice as fast as any()
            return
        if may_end and plan.stop_ids:
            token_sets.add(row, plan.stop_ids)
            if set_row is not None:
                token_sets.add(set_row, plan.stop_ids)
            return
        self._fail("it and allowed_token_ids, bad_words or stop_token_ids leave none", "allow more of them")
        row[:] = 0

    def _fail(self, cause: str, remedy: str) -> None:
        name = "" if self.plan.grammar is None else f" by {self.plan.grammar.name}"
        self.error = f"no token may come{name} after {len(self.token_ids)} tokens: {cause}; {remedy}"


def _asks(params: SamplingParams) -> bool:
    return bool(
        params.structured_outputs is not None
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.logits_processors
    )
