"""Grammars, compiled by llguidance for one tokenizer, and the matchers that follow a text by them."""

import itertools
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanoinfer.constraints import lark, token_sets
from nanoinfer.constraints.schemas import find_dead_end, forbid_additional_properties
from nanoinfer.errors import RequestError
from nanoinfer.progress import progress_bar
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.text.tokenizer import PASSED_ON, Tokenizer

MAX_CACHED = 256  # grammars
NUM_THREADS = max(1, min(16, os.cpu_count() or 1))
FORKS_A_TEMPLATE = 16  # forks of one template share a lock, so that several threads need several templates
HOW_TO_INSTALL = "pip install 'nanoinfer[structured]'"

Item = TypeVar("Item")
Result = TypeVar("Result")


class Grammar:
    """One compiled grammar: makes a matcher for each sample.

    source: the grammar as the library reads it.
    first_mask: (num_words,) int32: the tokens that a text may begin with.
    """

    def __init__(self, name: str, source: str, template: Any, first_mask: NDArray[np.int32]) -> None:
        self.name, self.source, self.first_mask = name, source, first_mask
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
    """llguidance, set up for one tokenizer, which takes up to a second.

    vocab_size: width of the logits; ids without a token are never allowed.
    stop_token_ids: the model's; masks allow them where the text may end.
    Raises RequestError without llguidance, and for a tokenizer that it cannot read.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
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
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._executor = llguidance.LLExecutor(num_threads=NUM_THREADS)
        self._num_words, self._stop_token_ids = -(-vocab_size // 32), stop_token_ids
        added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        self._special_tokens = {text: i for text, i in added.items() if self._tokenizer.is_special_token(i)}

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Return the grammar of what is wanted. Raises RequestError where that is wrong, or not supported."""
        try:
            source = self._to_source(wanted)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{wanted} cannot be compiled: {error}; mend it") from error
        is_error, messages = self._llguidance.LLMatcher.validate_grammar_with_warnings(
            source, self._tokenizer, limits=self._limits
        )
        if is_error:
            raise RequestError(f"{wanted} cannot be compiled: {explain(messages[0])}; mend it, or leave that out")
        template = self._llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        first_mask = np.zeros((1, self._num_words), np.int32)
        self.fill([(template, 0)], first_mask)
        if template.is_error():  # some faults show only here
            raise RequestError(f"{wanted} cannot be compiled: {explain(template.get_error())}; mend it")
        return Grammar(str(wanted), source, self._look_ahead(template, first_mask[0]), first_mask[0])

    def add_template(self, grammar: Grammar) -> None:
        """Let one more thread compute masks of this grammar."""
        template = self._llguidance.LLMatcher(self._tokenizer, grammar.source, log_level=0, limits=self._limits)
        grammar.templates.append(self._look_ahead(template, grammar.first_mask))

    def fill(self, matchers: list[tuple[Any, int]], bits: NDArray[np.int32]) -> None:
        """Write the mask of each matcher into its row of `bits`, (num_rows, num_words), in threads, without the GIL.

        Each thread gets a part of the list: forks of one template should stand together there.
        """
        self._fill(self._executor, matchers, bits)
        if not self._stop_token_ids:  # the library takes a token for one even so
            token_sets.remove(bits, self._tokenizer.eos_tokens, [row for _, row in matchers])

    def _is_impossible(self, schema: dict[str, Any]) -> bool:
        """Return whether no object follows a schema, as the mask after the opening brace says."""
        source = self._llguidance.LLMatcher.grammar_from_json_schema(schema)
        matcher = self._llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.consume_tokens(self._tokenizer.tokenize_str("{")):
            return False  # it cannot be compiled, which the whole schema will say
        self.fill([(matcher, 0)], np.zeros((1, self._num_words), np.int32))
        return bool(matcher.is_error())

    def _look_ahead(self, template: Any, first_mask: NDArray[np.int32]) -> Any:
        """Return a template that has the mask of the state after a first token.

        A matcher keeps its newest mask for as long as its state stays the same, and so do its forks. The first mask is
        kept beside the template, so the one after it may take the place; it may take a millisecond to compute.
        """
        bits = np.unpackbits(first_mask.view(np.uint8), bitorder="little")
        first = next((int(i) for i in np.flatnonzero(bits) if int(i) not in self._stop_token_ids), None)
        ahead = template.deep_copy()
        if first is None or not ahead.consume_token(first) or ahead.is_stopped():
            return template
        self.fill([(ahead, 0)], np.zeros((1, self._num_words), np.int32))
        return ahead if not ahead.is_error() and ahead.rollback(1) else template

    def _to_source(self, wanted: StructuredOutputsParams) -> str:
        matcher, from_text = self._llguidance.LLMatcher, self._llguidance.grammar_from

        def with_options(schema: dict[str, Any]) -> dict[str, Any]:
            if wanted.disable_additional_properties:
                schema = forbid_additional_properties(schema)
            if dead_end := find_dead_end(schema, self._is_impossible):
                raise RequestError(f"{wanted} {dead_end}")
            options: dict[str, Any] = {"whitespace_flexible": False} if wanted.disable_any_whitespace else {}
            if wanted.whitespace_pattern is not None:
                options["whitespace_pattern"] = wanted.whitespace_pattern
            return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}} if options else schema

        if wanted.json is not None:
            return str(matcher.grammar_from_json_schema(with_options(json.loads(str(wanted.json)))))
        if wanted.json_object:
            return str(matcher.grammar_from_json_schema(with_options({"type": "object"})))
        if wanted.regex is not None:
            return str(from_text("lark", f"start: {lark.from_regex(wanted.regex)}\n"))
        if wanted.choice is not None:
            return str(from_text("choice", json.dumps(wanted.choice)))
        if wanted.grammar is not None:
            return str(from_text("lark", lark.from_grammar(wanted.grammar)))
        tag = json.loads(str(wanted.structural_tag))
        source = lark.from_structural_tag(tag, self._special_tokens, with_options)
        return source if source.startswith("{") else str(from_text("lark", source))


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


class GrammarCache:
    """Compiles what users ask for, and keeps what was asked for last.

    Several threads may use it at a time; what one of them compiles, the others wait for.
    """

    def __init__(self, make_library: Callable[[], GrammarLibrary]) -> None:
        self._make_library = make_library
        self._library: GrammarLibrary | None = None
        self._grammars: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def library(self) -> GrammarLibrary:
        """Return the library, set up at its first use."""
        with self._lock:
            if self._library is None:
                self._library = self._make_library()
            return self._library

    def compile(
        self, wanted: Mapping[StructuredOutputsParams, int], use_tqdm: bool
    ) -> dict[StructuredOutputsParams, Grammar]:
        """Return the grammars of what is wanted; the numbers say how many samples are to follow each.

        A bar shows what is compiled if that takes half a second. Raises RequestError for the first that is wrong.
        """
        library = self.library
        missing: dict[StructuredOutputsParams, Future[Grammar]] = {}
        try:
            with self._lock:
                missing |= {params: Future() for params in wanted if params not in self._grammars}
                self._grammars.update(missing)
                futures = {params: self._grammars[params] for params in wanted}
                for params in wanted:
                    self._grammars.move_to_end(params)
                while len(self._grammars) > MAX_CACHED:
                    self._grammars.popitem(last=False)
            with progress_bar("Compiling grammars", "grammar", len(missing), use_tqdm, delay=0.5) as bar:
                for future, grammar in zip(missing.values(), _map_in_threads(library.compile, [*missing]), strict=True):
                    future.set_result(grammar)
                    bar.update()
        finally:
            with self._lock:
                for params, future in missing.items():
                    if future.cancel() and self._grammars.get(params) is future:
                        del self._grammars[params]  # it was not compiled
        try:
            grammars = {params: future.result() for params, future in futures.items()}
        except CancelledError:  # in another thread, which has failed
            return self.compile(wanted, use_tqdm)
        for params, grammar in grammars.items():
            grammar.num_samples += wanted[params]
        more = [
            grammar
            for grammar in grammars.values()
            for _ in range(len(grammar.templates), min(NUM_THREADS, -(-grammar.num_samples // FORKS_A_TEMPLATE)))
        ]
        for _ in _map_in_threads(library.add_template, more):
            pass
        return grammars


def _map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Yield the results in order; after an exception the items not yet begun are left out."""
    if len(items) < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(min(NUM_THREADS, len(items))) as pool:
        yield from pool.map(function, items)


def explain(message: str) -> str:
    """Return what llguidance says is wrong, without what only its authors understand."""
    if "NoExtensionBias" in message:
        return "no text follows it"
    in_regex = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return in_regex[1] if in_regex else message.partition("\n<")[0].strip()
