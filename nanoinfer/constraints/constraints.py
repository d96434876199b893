"""Constraints on the tokens of a request (grammars, token sets, users' functions): compiled once, then followed."""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from nanoinfer.constraints import token_sets
from nanoinfer.constraints.grammar_cache import GrammarCache
from nanoinfer.constraints.grammars import Grammar, GrammarLibrary
from nanoinfer.constraints.request_constraint import MaskChanges, RequestConstraint, SampleConstraint
from nanoinfer.constraints.thoughts import Thoughts
from nanoinfer.constraints.token_sets import Bits, TokenSet
from nanoinfer.engine.stopping import StopTokens
from nanoinfer.engine.token_masks import CompiledConstraint, Constraint, RowMasks, TokenMasks
from nanoinfer.errors import RequestError
from nanoinfer.integers import ceil_div
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.text.arguments import Errors, results_by_prompt
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer

Result = TypeVar("Result")


class Constraints:
    """Compiles what requests ask for, and says what each token of a step may be.

    vocab_size: width of the logits. stop_token_ids: the model's. new_bits: allocates the masks of a step. switches: of
    StructuredOutputsParams, those that are on for all requests. grammar_timeout: seconds that a grammar may take.
    thoughts: how the model writes them; None where nobody knows. forms_follow_thoughts: whether structured outputs
    begin after the thought also where a request has no budget.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        new_bits: Callable[[tuple[int, int]], Bits] = token_sets.new_bits,
        switches: Collection[str] = (),
        grammar_timeout: float = 60.0,
        thoughts: Thoughts | None = None,
        forms_follow_thoughts: bool = False,
    ) -> None:
        self._tokenizer, self._vocab_size, self._new_bits = tokenizer, vocab_size, new_bits
        self._thoughts, self._forms_follow_thoughts = thoughts, forms_follow_thoughts
        self._follows_thoughts = False  # whether a request has asked for that; a step of 256 rows costs less until then
        self._num_words = ceil_div(vocab_size, 32)
        self._stop_token_ids = frozenset(token_id for token_id in stop_token_ids if token_id < vocab_size)
        make_library = functools.partial(GrammarLibrary, tokenizer, vocab_size, self._stop_token_ids, switches)
        self._grammars = GrammarCache(make_library, grammar_timeout)  # sets the library up at its first use

    def compile(self, params: Sequence[SamplingParams], use_tqdm: bool = False) -> list[CompiledConstraint | None]:
        """Return the compiled constraint of each request, or None where it asks for nothing. Any thread may call it.

        Grammars are compiled in threads, each once; a bar shows that if it takes half a second. Raises RequestError for
        what is wrong, takes too long, does not fit the model's tokenizer, or leaves no token to begin with.
        """
        plans = self._compile(params, use_tqdm)
        return [_or_raise(plans.get(id(one))) for one in params]

    def is_asked(self, params: Sequence[SamplingParams]) -> bool:
        """Return whether any of these ask for something."""
        return any(map(_asks, {id(one): one for one in params}.values()))

    def takes_time(self, params: Sequence[SamplingParams]) -> bool:
        """Return whether any of these ask for something that takes time to compile."""
        return any(map(_asks_for_masks, {id(one): one for one in params}.values()))

    def add_constraints(self, requests: Mapping[int, PreparedRequest], errors: Errors, use_tqdm: bool = False) -> None:
        """Give requests their constraints; add the error of a wrong constraint to `errors`, by index."""
        params = {index: one.sampling_params for index, one in requests.items() if index not in errors}
        plans = self._compile([*params.values()], use_tqdm)
        for index, plan in results_by_prompt(plans, params, errors).items():
            requests[index].constraint = plan

    def masks(
        self, constraints: Sequence[Constraint | None], proposals: Sequence[Sequence[int]] = (), num_tokens: int = 1
    ) -> TokenMasks:
        """Return what each token of a step may be; its constraint, if it has one, knows the tokens before it.

        A constraint that leaves no token has an `error` from then on. The arrays are new ones in each step: they may
        still be copied from while the next step's are written.

        proposals: for each constraint, up to num_tokens - 1 tokens that may follow. Then the step draws `num_tokens`
        tokens of each, number i * num_tokens + j as if the first j of these were right. Those that cannot count are
        left out: what follows a token that is forbidden, or one that completes the text.
        """
        samples = cast(Sequence[SampleConstraint | None], constraints)
        followed = {index * num_tokens: sample for index, sample in enumerate(samples) if sample is not None}
        if num_tokens == 1:
            return self._masks_of(followed, self._new_bits)
        parts = [self._masks_of(followed, token_sets.new_bits)]
        ahead = {index: sample.fork() for index, sample in followed.items() if proposals[index // num_tokens]}
        for place in range(num_tokens - 1):
            its_ids = {index: proposals[index // num_tokens] for index in ahead}
            proposed = {index: token_ids[place] for index, token_ids in its_ids.items() if place < len(token_ids)}
            for index in _forbidden(proposed, parts[-1]):
                del proposed[index]
            # Each moves on to the next token, unless the text is complete with this one.
            ahead = {i + 1: ahead[i] for i, token_id in proposed.items() if not ahead[i].append(token_id)}
            if not ahead:
                break
            parts.append(self._masks_of(ahead, token_sets.new_bits))
            for index, sample in ahead.items():
                if sample.error is not None:
                    followed[index - place - 1].failure = (sample.token_ids, sample.error)
        return _joined(parts, self._new_bits)

    def _masks_of(
        self, followed: dict[int, SampleConstraint], new_bits: Callable[[tuple[int, int]], Bits]
    ) -> TokenMasks:
        """Return the masks of some tokens of a step, each by its constraint, which knows the tokens before it."""
        in_set = {index: sample for index, sample in followed.items() if sample.plan.token_set is not None}
        in_grammar = {index: sample for index, sample in followed.items() if sample.matcher is not None}
        thinking: dict[int, SampleConstraint] = {}
        if self._follows_thoughts:
            thinking = {index: sample for index, sample in followed.items() if sample.thinking is not None}
        told = {index: bits for index, sample in thinking.items() if (bits := self._told(sample)) is not None}
        sets = new_bits((len(in_set), self._num_words))
        for sample, row in zip(in_set.values(), sets, strict=True):
            sample.write_token_set(row)
        grammars = new_bits((len(in_grammar) + len(told), self._num_words))
        self._fill([*in_grammar.values()], grammars)
        set_rows = dict(zip(in_set, sets, strict=True))
        also_in_set = {row: set_rows[index] for row, index in enumerate(in_grammar) if index in set_rows}
        _place_stop_tokens([*in_grammar.values()], grammars, also_in_set)
        functions = {i: (one.plan.functions, [*one.token_ids]) for i, one in followed.items() if one.plan.functions}
        masked = [*in_grammar, *told]
        if thinking:
            _add_thoughts(thinking, told, dict(zip(masked, grammars, strict=True)), set_rows, functions)
        return TokenMasks(
            RowMasks(masked, grammars) if masked else None,
            RowMasks([*in_set], sets) if in_set else None,
            functions,
        )

    def _told(self, sample: SampleConstraint) -> Bits | None:
        """Return the tokens that may come next where no grammar says it: the forced one, or those before a form."""
        if sample.thinking is not None and sample.thinking.forced:
            return token_sets.set_of([sample.thinking.forced[0]], self._vocab_size)
        return None if sample.waiting is None else sample.plan.before_form

    def _compile(
        self, params: Sequence[SamplingParams], use_tqdm: bool
    ) -> dict[int, "RequestConstraint | RequestError"]:
        """Return the constraint of each of these that asks for one, or its error, by id."""
        asking = {id(one): one for one in params if _asks(one)}
        if not asking:
            return {}
        num_samples: Counter[StructuredOutputsParams] = Counter()  # that follow each grammar
        for one in params:
            if one.structured_outputs is not None:
                num_samples[one.structured_outputs] += one.n
        grammars = self._grammars.compile(num_samples, use_tqdm) if num_samples else {}
        make_set = functools.cache(functools.partial(token_sets.make_token_set, self._tokenizer, self._vocab_size))
        plans: dict[int, RequestConstraint | RequestError] = {}
        for key, one in asking.items():
            allowed, words = one.allowed_token_ids, tuple(one.bad_words or ())
            try:
                token_set = make_set(allowed, words) if allowed is not None or words else None
                grammar = None if one.structured_outputs is None else _or_raise(grammars[one.structured_outputs])
                plans[key] = self.plan(one, grammar, token_set)
            except RequestError as error:
                plans[key] = error
        return plans

    def _fill(self, constraints: list[SampleConstraint], masks: NDArray[np.int32]) -> None:
        """Write what the grammars allow, row by row."""
        may_wait = self._follows_thoughts
        matchers: list[tuple[int, Any, int]] = []  # by template, so that threads do not wait for each other
        for row, constraint in enumerate(constraints):
            assert constraint.plan.grammar is not None, "it was found to have one"
            if constraint.error is not None:
                masks[row] = 0
            elif not constraint.token_ids or (may_wait and len(constraint.token_ids) == constraint.form_start):
                masks[row] = constraint.plan.grammar.first_mask
            else:
                matchers.append((constraint.template, constraint.matcher, row))
        if matchers:
            matchers.sort(key=itemgetter(0))
            self._grammars.library.fill([(matcher, row) for _, matcher, row in matchers], masks)

    def plan(self, params: SamplingParams, grammar: Grammar | None, token_set: TokenSet | None) -> RequestConstraint:
        """Return the constraint of a request, given its compiled parts. Raises RequestError for a wrong one."""
        own = frozenset(token_id for token_id in params.stop_token_ids or () if token_id < self._vocab_size)
        if grammar is not None and (own or token_set is not None):
            first_mask = grammar.first_mask.copy() if token_set is None else grammar.first_mask & token_set.always
            token_sets.remove(first_mask, own)
            if not first_mask.any() and not grammar.fork()[0].is_accepting():
                raise RequestError(
                    f"{grammar.name} begins with no token that allowed_token_ids, bad_words and stop_token_ids leave; "
                    "allow more"
                )
        stop_tokens = StopTokens.of(own, params.ignore_eos, self._stop_token_ids)
        own_only = own - self._stop_token_ids  # no mask of a grammar knows of these
        thoughts = self._needed_thoughts(params, grammar, stop_tokens.ids)
        self._follows_thoughts |= thoughts is not None
        return RequestConstraint(
            grammar=grammar,
            token_set=token_set,
            functions=tuple(params.logits_processors or ()),
            stop_ids=stop_tokens.ids,
            min_tokens=params.min_tokens,
            within=MaskChanges(removed=own_only),
            at_early_end=MaskChanges(removed=stop_tokens.ids),
            at_end=MaskChanges(removed=stop_tokens.ignored, added=own_only),
            thoughts=thoughts,
            budget=params.thinking_token_budget,
            before_form=self._all_but(stop_tokens.ids) if thoughts is not None and grammar is not None else None,
        )

    def _needed_thoughts(
        self, params: SamplingParams, grammar: Grammar | None, stop_ids: frozenset[int]
    ) -> Thoughts | None:
        """Return how thoughts are written if the request depends on it. Raises RequestError where that is not known."""
        thoughts, budget = self._thoughts, params.thinking_token_budget
        form = params.structured_outputs
        includes = None if form is None else form.includes_thought
        follows = form is not None and (self._forms_follow_thoughts if includes is None else not includes)
        if budget is None and (thoughts is None or grammar is None or not follows):
            return None
        if thoughts is None:
            raise RequestError(
                f"thinking_token_budget={budget} needs the texts around a thought, and this model's are not known; "
                "give LLM(reasoning_config={'reasoning_start_str': '<think>', 'reasoning_end_str': '</think>'}), say"
            )
        if params.min_tokens and grammar is None and (forbidden := stop_ids.intersection(thoughts.closing_ids)):
            raise RequestError(
                f"min_tokens={params.min_tokens} forbids stop tokens at first, and one of them, {min(forbidden)}, "
                "closes a thought; leave out min_tokens or thinking_token_budget"
            )
        # A form that begins as a message of gpt-oss does, such as a tool call, has a place for the thought itself.
        begins_message = grammar and thoughts.answer and token_sets.has(grammar.first_mask, thoughts.start_ids[0])
        if grammar is not None and (begins_message or includes):
            if budget is None:
                return None
            raise RequestError(
                f"thinking_token_budget={budget} cannot end a thought that is a part of {grammar.name}; leave one out"
            )
        return thoughts

    def _all_but(self, token_ids: frozenset[int]) -> Bits:
        bits = token_sets.all_tokens(self._vocab_size)
        token_sets.remove(bits, token_ids)
        return bits


def _place_stop_tokens(constraints: list[SampleConstraint], masks: Bits, sets: dict[int, Bits]) -> None:
    """Add stop tokens to the grammars' masks, or remove them; find out where no token is left.

    masks: (num_constraints, num_words). sets: by row of `masks`, the mask of that row's token set, if there is one.
    """
    changes: dict[MaskChanges, list[int]] = {}  # the rows of each; usually there are one or two
    for row, constraint in enumerate(constraints):
        if constraint.find_error():
            masks[row] = 0
            sets.pop(row, None)
        elif any(stops := constraint.stop_tokens()):
            changes.setdefault(stops, []).append(row)
    for stops, rows in changes.items():
        token_sets.add(masks, stops.added, rows)
        token_sets.remove(masks, stops.removed, rows)
    # A mask that was not changed has a token: the library fails where there is none.
    for row in token_sets.find_empty(masks, [row for rows in changes.values() for row in rows if row not in sets]):
        constraints[row].end(masks[row], None)
    for row, set_row in sets.items():
        if not (masks[row] & set_row).any():
            constraints[row].end(masks[row], set_row)


def _add_thoughts(
    thinking: dict[int, SampleConstraint],
    told: dict[int, Bits],
    masks: dict[int, Bits],
    sets: dict[int, Bits],
    functions: dict[int, Any],
) -> None:
    """Write what may be drawn within thoughts, and what begins or ends one, into the masks of a step.

    All are given by their tokens' indices. told: those masks that are known already. A forced token is not forbidden by
    sets, and not shown to functions.
    """
    for index, sample in thinking.items():
        assert sample.thinking is not None, "it was found to think"
        if index in told:
            masks[index][:] = told[index]
        elif sample.start_id is not None:
            token_sets.add(masks[index], [sample.start_id])
        if sample.thinking.forced:
            functions.pop(index, None)
            if index in sets:
                sets[index][:] = told[index]


def _forbidden(token_ids: dict[int, int], masks: TokenMasks) -> set[int]:
    """Return which of these tokens, by index, the masks forbid."""
    return {
        index
        for part in (masks.grammars, masks.token_sets)
        if part is not None
        for index, bits in zip(part.batch_indices, part.bits, strict=True)
        if index in token_ids and not token_sets.has(bits, token_ids[index])
    }


def _joined(parts: list[TokenMasks], new_bits: Callable[[tuple[int, int]], Bits]) -> TokenMasks:
    """Return masks of different tokens of a step as one."""

    def join(masks: list[RowMasks]) -> RowMasks | None:
        if not masks:
            return None
        indices = [index for one in masks for index in one.batch_indices]
        bits = new_bits((len(indices), masks[0].bits.shape[1]))
        return RowMasks(indices, np.concatenate([one.bits for one in masks], out=bits))

    functions = {index: function for part in parts for index, function in part.functions.items()}
    return TokenMasks(
        join([part.grammars for part in parts if part.grammars]),
        join([part.token_sets for part in parts if part.token_sets]),
        functions,
    )


def _or_raise(result: Result | RequestError) -> Result:
    """Return a result; raise it where it is an error."""
    if isinstance(result, RequestError):
        raise result
    return result


def _asks(params: SamplingParams) -> bool:
    return params.thinking_token_budget is not None or _asks_for_masks(params)


def _asks_for_masks(params: SamplingParams) -> bool:
    """Return whether a request asks for something that limits all its tokens."""
    return bool(
        params.structured_outputs is not None
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.logits_processors
    )
