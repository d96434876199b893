"""Grammars, compiled by llguidance for one tokenizer, and the matchers that follow a text by them."""

import itertools
import json
import os
import re
from collections.abc import Collection
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nanoinfer.constraints import lark, token_sets
from nanoinfer.constraints.schema_numbers import check_numbers
from nanoinfer.constraints.schemas import find_dead_end, forbid_additional_properties
from nanoinfer.errors import RequestError
from nanoinfer.integers import ceil_div
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.text.tokenizer import Tokenizer
from nanoinfer.text.tokenizer_class import PASSED_ON

NUM_THREADS = max(1, min(16, os.cpu_count() or 1))
HOW_TO_INSTALL = "pip install 'nanoinfer[structured]'"
# What the library may spend. Parser items: 20,000 take it a millisecond, and 8,000 optional properties need 32,000.
MAX_ITEMS, MAX_STEP_ITEMS = 100_000, 500_000  # of one place in the text; of one mask
MIN_FUEL, FUEL_A_CHARACTER = 1_000_000, 4  # for the states of a grammar; 50,000 take a millisecond

Source = str | dict[str, Any]  # a grammar in Lark, or the library's dict of several


class Grammar:
    """Holds one compiled grammar, and makes a matcher for each sample.

    source: the grammar as the library reads it. limits: what that may cost.
    first_mask: (num_words,) int32: the tokens that a text may begin with.
    """

    def __init__(self, name: str, source: Source, limits: Any, template: Any, first_mask: NDArray[np.int32]) -> None:
        self.name, self.source, self.limits, self.first_mask = name, source, limits, first_mask
        self.templates = [template]
        self.num_samples = 0  # that were to follow it so far
        self._turn = itertools.count()

    def fork(self) -> tuple[Any, int]:
        """Return an llguidance.LLMatcher at the beginning of a text, and which template it was copied from.

        Templates take turns. It takes a microsecond.
        """
        template = next(self._turn) % len(self.templates)
        return self.templates[template].deep_copy(), template


class GrammarLibrary:
    """Holds llguidance, set up for one tokenizer, which takes up to a second.

    vocab_size: width of the logits; ids without a token are never allowed.
    stop_token_ids: the model's; masks allow them where the text may end. switches: those that are on for all.
    Raises RequestError without llguidance, and for a tokenizer that it cannot read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        switches: Collection[str],
    ) -> None:
        try:
            import llguidance
            import llguidance.numpy
        except ImportError as error:
            raise RequestError(
                f"structured_outputs need the package llguidance, which cannot be imported ({error}); {HOW_TO_INSTALL}"
            ) from error
        backend = getattr(tokenizer and tokenizer.hf, "backend_tokenizer", None)
        if backend is None:
            has = "no tokenizer" if tokenizer is None else f"a {type(tokenizer.hf).__name__}, written in Python"
            raise RequestError(f"structured_outputs need a tokenizer.json, and this model has {has}; leave them out")
        if backend.truncation or backend.padding or max(backend.get_vocab().values(), default=0) >= vocab_size:
            backend = type(backend).from_str(_without_tokens(backend.to_str(), vocab_size))
            backend.no_truncation()
            backend.no_padding()
        try:
            self._tokenizer = llguidance.LLTokenizer(
                backend.to_str(), n_vocab=vocab_size, eos_token=sorted(stop_token_ids) or None
            )
        except PASSED_ON:
            raise
        except BaseException as error:  # its Rust code may panic
            raise RequestError(
                f"structured_outputs cannot be used with this model's tokenizer ({error}); leave them out"
            ) from error
        self._llguidance, self._fill = llguidance, llguidance.numpy.fill_next_token_bitmask_par
        self._switches = switches
        self._executor = llguidance.LLExecutor(num_threads=NUM_THREADS)
        self._num_words, self._stop_token_ids = ceil_div(vocab_size, 32), stop_token_ids
        added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        self._special_tokens = {text: i for text, i in added.items() if self._tokenizer.is_special_token(i)}

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Return the grammar of a form. Raises RequestError if the form is wrong or not supported."""
        try:
            source = self._to_source(wanted)
            limits = self._limits(sum(map(len, wanted.choice or [str(wanted.json or "")])))
            template = self._matcher(source, limits)
            first_mask = np.zeros((1, self._num_words), np.int32)
            self.fill([(template, 0)], first_mask)  # some faults show only here, or in the next mask
            ahead = template if template.is_error() else self._look_ahead(template, first_mask[0])
        except PASSED_ON:
            raise
        except BaseException as error:  # the library's Rust code may panic
            if isinstance(error, RequestError):
                raise
            what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            raise RequestError(f"{wanted} cannot be compiled: {what}; mend it") from error
        if ahead.is_error():
            raise RequestError(f"{wanted} cannot be compiled: {explain(ahead.get_error())}; mend it, or leave that out")
        return Grammar(str(wanted), source, limits, ahead, first_mask[0])

    def add_template(self, grammar: Grammar) -> None:
        """Let one more thread compute masks of this grammar."""
        template = self._matcher(grammar.source, grammar.limits)
        grammar.templates.append(self._look_ahead(template, grammar.first_mask))

    def fill(self, matchers: list[tuple[Any, int]], bits: NDArray[np.int32]) -> None:
        """Write the mask of each matcher into its row of `bits`, (num_rows, num_words), in threads, without the GIL.

        Each thread gets a part of the list: forks of one template should stand together there.
        """
        self._fill(self._executor, matchers, bits)
        if not self._stop_token_ids:  # the library takes a token for one even so
            token_sets.remove(bits, self._tokenizer.eos_tokens, [row for _, row in matchers])

    def _limits(self, num_characters: int) -> Any:
        """Return the limits of the library. num_characters: of choices or of a schema, which may list many."""
        return self._llguidance.LLParserLimits(
            max_items_in_row=MAX_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            initial_lexer_fuel=MIN_FUEL + FUEL_A_CHARACTER * num_characters,
            verbose_errors=False,
        )

    def _matcher(self, source: Source, limits: Any) -> Any:
        """Return a matcher at the beginning of a text; it has an error where the grammar is wrong."""
        grammar = cast(Any, source)  # its annotation does not know of dicts
        return self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)

    def _is_impossible(self, schema: dict[str, Any]) -> bool:
        """Return whether no object follows a schema, as the mask after the opening brace says."""
        matcher = self._matcher(_of_schema(schema), self._limits(len(str(schema))))
        if not matcher.consume_tokens(self._tokenizer.tokenize_str("{")):
            return False  # it cannot be compiled, which the whole schema will say
        self.fill([(matcher, 0)], np.zeros((1, self._num_words), np.int32))
        return bool(matcher.is_error())

    def _look_ahead(self, template: Any, first_mask: NDArray[np.int32]) -> Any:
        """Return a template that has the mask of the state after a first token, or an error of the library's limits.

        A matcher keeps its newest mask for as long as its state stays the same, and so do its forks. The first mask is
        kept beside the template, so the one after it may take the place; it may take a millisecond to compute.
        """
        bits = np.unpackbits(first_mask.view(np.uint8), bitorder="little")
        first = next((int(i) for i in np.flatnonzero(bits) if int(i) not in self._stop_token_ids), None)
        ahead = template.deep_copy()
        if first is None or (ahead.consume_token(first) and ahead.is_stopped()):
            return template
        if not ahead.is_error():
            self.fill([(ahead, 0)], np.zeros((1, self._num_words), np.int32))
        if ahead.is_error():
            return template if is_dead_end(ahead.get_error()) else ahead
        return ahead if ahead.rollback(1) else template

    def _to_source(self, wanted: StructuredOutputsParams) -> Source:
        is_closed = wanted.disable_additional_properties or "disable_additional_properties" in self._switches
        options: dict[str, Any] = {}
        if wanted.whitespace_pattern is not None:  # which a switch for all requests leaves as it is
            options["whitespace_pattern"] = wanted.whitespace_pattern
        elif wanted.disable_any_whitespace or "disable_any_whitespace" in self._switches:
            options["whitespace_flexible"] = False

        def with_options(schema: dict[str, Any]) -> dict[str, Any]:
            schema = check_numbers(forbid_additional_properties(schema) if is_closed else schema)
            if dead_end := find_dead_end(schema, self._is_impossible):
                raise RequestError(f"{wanted} {dead_end}")
            return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}} if options else schema

        if wanted.json is not None:
            return _of_schema(with_options(json.loads(str(wanted.json))))
        if wanted.json_object:
            return _of_schema(with_options({"type": "object"}))
        if wanted.regex is not None:
            return f"start: {lark.from_regex(wanted.regex)}\n"
        if wanted.choice is not None:
            return f"start: {lark.from_texts(wanted.choice)}\n"
        if wanted.grammar is not None:
            return lark.from_grammar(wanted.grammar)
        return lark.from_structural_tag(json.loads(str(wanted.structural_tag)), self._special_tokens, with_options)


def _without_tokens(serialized: str, vocab_size: int) -> str:
    """Return a tokenizer.json without the tokens that a model of `vocab_size` ids does not have."""
    content = json.loads(serialized)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    model = content["model"]
    if isinstance(model["vocab"], list):  # Unigram's
        model["vocab"] = model["vocab"][:vocab_size]
    else:
        known = model["vocab"] = {token: i for token, i in model["vocab"].items() if i < vocab_size}
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= known.keys()]
    return json.dumps(content)


def _of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar of JSON. It stays a dict, because the library rounds floats that it reads from a text."""
    return {"grammars": [{"json_schema": schema}]}


def is_dead_end(message: str) -> bool:
    """Return whether llguidance says that a text can neither end nor go on, and not that it has reached a limit."""
    return "NoExtensionBias" in message


def is_refusal(message: str) -> bool:
    """Return whether llguidance says that a token is not allowed, and not that it has reached a limit."""
    return "satisfy the grammar" in message


def explain(message: str) -> str:
    """Return the error of llguidance, without the parts that only its authors understand."""
    if is_dead_end(message):
        return "no text follows it"
    if "u16::MAX" in message:
        return "the grammar has more than 65,525 symbols"
    in_regex = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return in_regex[1] if in_regex else message.partition("\n<")[0].strip()
