"""What grammars allow, where a text may end, and what a step's masks say."""

import re
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nanoinfer import RequestError, SamplingParams
from nanoinfer.constraints import grammar_cache, grammars
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.structured_outputs import StructuredOutputsParams
from tests.constraints.helpers import (
    EOS,
    VOCAB_SIZE,
    allowed,
    draw,
    encode,
    follow,
    ids_of,
    is_possible,
    new_constraints,
    next_ids,
    start,
    tiny_tokenizer,
)

pytest.importorskip("llguidance")

ONE_INT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ENDLESS = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}}}
ENDLESS["$ref"] = "#/$defs/n"  # type: ignore[assignment]
A_OR_B: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^[ab]$": {"type": "null"}},
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return new_constraints()


def of(**options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**options))


def test_who_asks_for_nothing_gets_no_plan(constraints: Constraints) -> None:
    plain, choice = SamplingParams(), of(choice=["a"])
    plans = constraints.compile([plain, choice, plain])
    assert [plan is None for plan in plans] == [True, False, True]
    assert new_constraints().compile([plain] * 3) == [None] * 3


def test_a_step_has_one_mask_for_each_line_with_a_grammar(constraints: Constraints) -> None:
    def function(token_ids: list[int], logits: Any) -> Any:
        return logits

    yes, listed = start(constraints, choice=["yes"]), start(constraints, allowed_token_ids=[1, 2])
    both = start(constraints, regex="[0-9]+", allowed_token_ids=encode("7"), logits_processors=[function])
    both.append(encode("7")[0])
    masks = constraints.masks([None, yes, listed, None, both])
    assert masks.grammars is not None
    assert masks.token_sets is not None
    assert masks.grammars.batch_indices == [1, 4]
    assert masks.token_sets.batch_indices == [2, 4]
    assert masks.grammars.bits.shape == (2, VOCAB_SIZE // 32)
    assert masks.grammars.bits.dtype == np.int32
    assert masks.functions == {4: ((function,), encode("7"))}
    assert allowed(masks, 4) == {*encode("7")}
    assert (yes.follows_tokens, listed.follows_tokens, both.follows_tokens) == (True, False, True)
    empty = constraints.masks([None])
    assert (empty.grammars, empty.token_sets, empty.functions) == (None, None, {})


def test_the_masks_of_a_step_are_not_those_of_the_step_before(constraints: Constraints) -> None:
    constraint = start(constraints, regex="[0-9]*")
    first = constraints.masks([constraint]).grammars
    assert first is not None
    before = first.bits.copy()
    constraint.append(encode("1")[0])
    constraints.masks([constraint])
    assert (first.bits == before).all()


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-c]{2,4}",
        "(yes|no)( indeed)?",
        r"\d{3}-\d{4}",
        "[A-Z][a-z]*( [A-Z][a-z]*)*",
        "x*",
        r"a/b\.c",
        r"[\d_]+/\d",
        "é+|日本",
        "a\nb",
        "#1|//2",
    ],
)
def test_texts_match_their_regex(constraints: Constraints, pattern: str) -> None:
    for tokens, reason, _ in draw(constraints, [of(regex=pattern)] * 20, seed=0, max_tokens=60):
        assert reason in ("stop", "length")
        if reason == "stop":
            assert re.fullmatch(pattern, tiny_tokenizer().decode(tokens))


def test_a_text_is_one_of_its_choices_and_any_of_them(constraints: Constraints) -> None:
    choice = ["yes", "no", "yesterday", 'a "quoted"\nline', "crème 🍮", "<|im_start|>"]
    found = {
        tiny_tokenizer().decode(tokens, skip_special_tokens=False)
        for tokens, _, _ in draw(constraints, [of(choice=choice)] * 300, seed=0, max_tokens=60)
    }
    assert found == {*choice}


def test_a_grammar_may_be_gbnf_or_lark(constraints: Constraints) -> None:
    gbnf = 'root ::= item ("," item)* # items\n# one of two\nitem ::= "a#"\n  # or\n  | "b"\n'
    lark = 'start: item ("," item)*\nitem: "a#"\n    | "b"\n'
    for grammar in (gbnf, lark):
        assert is_possible(constraints, "a#,b,b", grammar=grammar)
        assert not is_possible(constraints, "a#,", grammar=grammar)


def test_white_space_is_free_or_none_or_as_a_pattern_says(constraints: Constraints) -> None:
    tight, loose, one = '{"a":1}', '{\n  "a":   1\n}', '{"a": 1}'
    assert [is_possible(constraints, text, json=ONE_INT) for text in (tight, loose, one)] == [True, True, True]
    options: dict[str, Any] = {"json": ONE_INT, "disable_any_whitespace": True}
    assert [is_possible(constraints, text, **options) for text in (tight, loose, one)] == [True, False, False]
    options = {"json": ONE_INT, "whitespace_pattern": " ?"}
    assert [is_possible(constraints, text, **options) for text in (tight, loose, one)] == [True, False, True]
    assert not is_possible(constraints, '{ "a":1}', json_object=True, disable_any_whitespace=True)


def test_additional_properties_may_be_forbidden_where_a_schema_says_nothing(constraints: Constraints) -> None:
    inner = {"type": "object", "properties": {"x": {"type": "null"}}}
    schema = {"type": "object", "properties": {"i": inner, "j": {**inner, "additionalProperties": True}}}
    texts = ['{"i": {"x": null, "y": 1}}', '{"j": {"x": null, "y": 1}}', '{"k": 1}']
    assert [is_possible(constraints, text, json=schema) for text in texts] == [True, True, True]
    found = [is_possible(constraints, text, json=schema, disable_additional_properties=True) for text in texts]
    assert found == [False, True, False]


def test_keys_with_escapes_or_twice_and_numbers_that_round_to_a_bound_are_known_to_pass(
    constraints: Constraints,
) -> None:
    """The engine compares texts, not what they mean; docs/structured.md says so. If this fails, it has learnt to."""
    ints = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    escaped = r'{"a":1,"\u0061":"x"}'
    assert is_possible(constraints, escaped, json=ints)
    assert not is_possible(constraints, escaped, json=ints, disable_additional_properties=True)
    assert not is_possible(constraints, '{"a":1,"a":2}', json=ints)
    assert is_possible(constraints, '{"a":null,"a":null}', json={**A_OR_B, "minProperties": 2})
    below_1 = "0." + 20 * "9"
    assert float(below_1) == 1
    assert is_possible(constraints, below_1, json={"type": "number", "exclusiveMaximum": 1})
    assert not is_possible(constraints, "1." + 20 * "0" + "1", json={"type": "number", "maximum": 1})


def test_a_complete_grammar_ends_the_text_with_its_last_token(constraints: Constraints) -> None:
    assert follow(start(constraints, choice=["yes", "no"]), "yes")
    assert follow(start(constraints, json=ONE_INT), '{"a": 12}')
    assert not follow(start(constraints, regex="[0-9]+"), "12")


def test_a_complete_grammar_ends_the_text_over_min_tokens_and_ignore_eos(constraints: Constraints) -> None:
    assert follow(start(constraints, choice=["yes", "no"], min_tokens=50, ignore_eos=True), "yes")


def test_a_stop_token_comes_only_where_the_grammar_may_end_and_is_not_fed_to_it(constraints: Constraints) -> None:
    constraint = start(constraints, regex="ab|abcd")
    assert EOS not in next_ids(constraints, constraint)
    follow(constraint, "ab")
    assert EOS in next_ids(constraints, constraint)
    assert constraint.append(EOS)
    assert constraint.error is None


def test_stop_tokens_of_the_request_come_only_where_the_grammar_may_end(constraints: Constraints) -> None:
    """Such a token may be text, which would cut the grammar's."""
    [newline], [one] = encode("\n"), encode("1")
    constraint = start(constraints, json=ONE_INT, stop_token_ids=[newline])
    follow(constraint, "{")
    assert newline not in next_ids(constraints, constraint)
    digits = start(constraints, regex="[0-9]+", stop_token_ids=[newline, 1016])
    assert not {newline, 1016, EOS} & next_ids(constraints, digits)
    digits.append(one)
    assert {newline, 1016, EOS} <= next_ids(constraints, digits)
    assert digits.append(1016)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_a_stop_token_that_is_put_off_comes_where_nothing_else_does(
    constraints: Constraints, options: dict[str, Any]
) -> None:
    [one] = encode("1")
    constraint = start(constraints, regex="[0-9]*", **options)
    for _ in range(3):
        assert EOS not in next_ids(constraints, constraint)
        assert not constraint.append(one)
    assert (EOS in next_ids(constraints, constraint)) == ("min_tokens" in options)
    nothing = start(constraints, choice=[""], **options)
    assert next_ids(constraints, nothing) == {EOS}
    assert nothing.append(EOS)


def test_ignore_eos_does_not_put_off_the_stop_tokens_of_the_request(constraints: Constraints) -> None:
    constraint = start(constraints, regex="[0-9]*", ignore_eos=True, stop_token_ids=[1016])
    assert {1016, EOS} & next_ids(constraints, constraint) == {1016}


def test_a_stop_token_comes_though_other_rules_forbid_it_where_a_finished_text_could_not_go_on(
    constraints: Constraints,
) -> None:
    [one] = encode("1")
    constraint = start(constraints, regex="1?(23)?", allowed_token_ids=[one])
    assert next_ids(constraints, constraint) == {one}
    constraint.append(one)
    assert next_ids(constraints, constraint) == {EOS}


def test_rules_that_leave_no_token_end_one_request_with_an_error_and_no_other(constraints: Constraints) -> None:
    [one] = encode("1")
    stuck = start(constraints, regex="12", allowed_token_ids=[one])
    going = start(constraints, regex="12")
    for constraint in (stuck, going):
        constraint.append(one)
    masks = constraints.masks([stuck, going])
    assert allowed(masks, 0) == set()
    assert allowed(masks, 1) == {*encode("2")}
    assert stuck.error == (
        "no token may come by structured_outputs regex='12' after 1 tokens: it and allowed_token_ids, bad_words or "
        "stop_token_ids leave none; allow more of them"
    )
    assert going.error is None
    assert next_ids(constraints, stuck) == set(), "it stays so"


def test_a_token_that_a_grammar_refuses_is_an_error(constraints: Constraints) -> None:
    constraint = start(constraints, regex="12")
    assert not constraint.append(encode("a")[0])
    assert "was drawn and is not allowed" in constraint.error
    assert next_ids(constraints, constraint) == set()
    early = start(constraints, regex="12")
    assert not early.append(EOS)
    assert early.error is not None


def test_a_grammar_that_grows_too_large_while_it_runs_ends_its_request(constraints: Constraints) -> None:
    """The library gives up on what costs it too much; here it is told to."""
    constraint = start(constraints, regex="[0-9]*")
    constraint.matcher.consume_token(encode("a")[0])
    constraint.token_ids.append(encode("1")[0])
    other = start(constraints, regex="[0-9]*")
    other.append(encode("1")[0])
    masks = constraints.masks([constraint, other])
    assert allowed(masks, 0) == set()
    assert constraint.error is not None
    assert len(allowed(masks, 1)) > 10


def test_samples_of_one_request_go_their_own_ways(constraints: Constraints) -> None:
    [plan] = constraints.compile([of(choice=["aa", "bb"])])
    assert plan is not None
    first, second = plan.start(), plan.start()
    before = next_ids(constraints, second)
    first.append(encode("a")[0])
    assert next_ids(constraints, second) == before
    second.append(encode("b")[0])
    assert next_ids(constraints, first) != next_ids(constraints, second)


@pytest.mark.parametrize("options", [{"regex": "[a-z ]*"}, {"json": ONE_INT}, {"json_object": True}])
def test_a_fork_of_a_warm_template_allows_what_a_new_matcher_does(options: dict[str, Any]) -> None:
    """Templates come with the mask of a later state, and forks of one share a lexer."""
    constraints = new_constraints()
    walks = draw(constraints, [of(**options)] * 40, seed=1, max_tokens=12)
    for tokens, _, _ in walks:
        warm, new = start(constraints, **options), start(new_constraints(), **options)
        for token_id in tokens:
            assert next_ids(constraints, warm) == next_ids(constraints, new)
            assert warm.append(token_id) == new.append(token_id)


NAMED = {"properties": {"name": {"const": "a"}}}
AGED: dict[str, Any] = {"properties": {"age": {"const": 1}}, "required": ["age"]}
BOTH, AGE = '{"name":"a","age":1}', '{"age":1}'


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [NAMED, AGED]},
        {"allOf": [NAMED], **AGED},
        {"allOf": [{"$ref": "#/$defs/named"}, AGED]},
        {"$ref": "#/$defs/named", **AGED},
        {"allOf": [{"$ref": "#/$defs/child"}], "required": ["age"]},
        {"anyOf": [AGED, {"properties": {"size": {"const": 2}}, "required": ["size"]}], **NAMED},
    ],
    ids=str,
)
def test_what_describes_one_object_together_is_closed_together(schema: dict[str, Any]) -> None:
    child = {"allOf": [{"$ref": "#/$defs/named"}, {"properties": AGED["properties"]}]}
    schema = {"type": "object", **schema, "$defs": {"named": NAMED, "child": child}}
    constraints = new_constraints()
    for text, is_right in ((BOTH, True), (AGE, True), ('{"age":1,"x":1}', False), ('{"x":1,"age":1}', False)):
        for order in (text, text.replace('"name":"a","age":1', '"age":1,"name":"a"')):  # as the schema lists them
            if found := is_possible(constraints, order, json=schema, disable_additional_properties=True):
                break
        assert found == is_right, text


def test_a_schema_that_refers_to_itself_is_closed_at_each_depth() -> None:
    schema = {"allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"b": {"const": 1}}}], "type": "object"}
    constraints = new_constraints()
    for text, is_right in (('{"a":{"b":1}}', True), ('{"a":{"a":{},"b":1}}', True), ('{"a":{"x":1}}', False)):
        assert is_possible(constraints, text, json=schema, disable_additional_properties=True) == is_right, text


def test_switches_of_all_requests_hold_beside_what_each_says() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    tag = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    for switch, text in (("disable_any_whitespace", '{"a": {}}'), ("disable_additional_properties", '{"b":1}')):
        constraints = Constraints(tiny_tokenizer(), VOCAB_SIZE, frozenset({EOS}), switches=[switch])
        plain = new_constraints()
        assert [is_possible(one, text, json=schema) for one in (plain, constraints)] == [True, False]
        assert [is_possible(one, f"<{text}>", structural_tag=tag) for one in (plain, constraints)] == [True, False]
        assert is_possible(constraints, '{"a":{}}', json=schema)
    compact = Constraints(tiny_tokenizer(), VOCAB_SIZE, frozenset({EOS}), switches=["disable_any_whitespace"])
    assert not is_possible(compact, '{"a": 1}', json_object=True)
    assert is_possible(compact, '{"a": 1}', json_object=True, whitespace_pattern=" ?"), "its own white space"
    said_so = {**schema, "additionalProperties": True}
    closed = Constraints(tiny_tokenizer(), VOCAB_SIZE, frozenset({EOS}), switches=["disable_additional_properties"])
    assert is_possible(closed, '{"b": 1}', json=said_so)


def test_grammars_are_compiled_once_and_forgotten_when_many_others_came(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints, compiled = new_constraints(), []
    original = grammars.GrammarLibrary.compile

    def compile(self: Any, wanted: StructuredOutputsParams) -> grammars.Grammar:
        compiled.append(wanted.choice)
        return original(self, wanted)

    monkeypatch.setattr(grammars.GrammarLibrary, "compile", compile)
    monkeypatch.setattr(grammar_cache, "MAX_CACHED", 2)
    constraints.compile([of(choice=["a"]), of(choice=["a"]), of(choice=["b"])])
    constraints.compile([of(choice=["a"])])
    assert sorted(compiled) == [("a",), ("b",)]
    constraints.compile([of(choice=["c"])])
    constraints.compile([of(choice=["a"])])
    assert sorted(compiled) == [("a",), ("b",), ("c",)]
    constraints.compile([of(choice=["b"])])
    assert compiled[-1] == ("b",)


def test_many_samples_of_one_grammar_are_spread_over_several_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "NUM_THREADS", 4)
    constraints = new_constraints()
    wanted = of(regex="[a-z]+")
    [plan, *_] = constraints.compile([wanted] * 40)
    assert len(plan.grammar.templates) == 3  # type: ignore[union-attr]
    for _ in range(16):  # requests that come one by one count as well
        [plan] = constraints.compile([wanted])
    assert len(plan.grammar.templates) == 4  # type: ignore[union-attr]
    for tokens, reason, _ in draw(constraints, [wanted] * 40, seed=0, max_tokens=20):
        assert reason == "length" or re.fullmatch("[a-z]+", tiny_tokenizer().decode(tokens))


def test_several_threads_may_compile_at_once() -> None:
    constraints = new_constraints()
    wanted = [of(choice=[f"text {number}"]) for number in range(30)]
    with ThreadPoolExecutor(8) as pool:
        plans = [*pool.map(lambda index: constraints.compile(wanted[index % 3 :])[0], range(24))]
    for index, plan in enumerate(plans):
        assert plan is not None
        assert follow(plan.start(), f"text {index % 3}")


def test_what_one_thread_compiles_the_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints, compiled = new_constraints(), []
    original = grammars.GrammarLibrary.compile

    def compile_slowly(self: Any, wanted: StructuredOutputsParams) -> grammars.Grammar:
        compiled.append(wanted.regex)
        time.sleep(0.2)
        return original(self, wanted)

    monkeypatch.setattr(grammars.GrammarLibrary, "compile", compile_slowly)

    def compile_one(regex: str) -> str:
        try:
            [plan] = constraints.compile([of(regex=regex)])
        except RequestError as error:
            return str(error)
        return "" if plan is not None else "there is no plan"

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(compile_one, ["[a-z]+"] * 8)] == [""] * 8
        assert len(compiled) == 1
        errors = [*pool.map(compile_one, ["(["] * 8)]
    assert all("unclosed character class" in error for error in errors)
    assert compile_one("[a-z]+") == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(["}, r"structured_outputs regex='([' cannot be compiled: unclosed character class; mend it"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"json": {"type": "strin"}}, "cannot be compiled: Invalid type: strin"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 3}}, "minLength (5) is greater than maxLength (3)"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema: minimum (5) is greater"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "holds itself without end"),
        ({"json": ENDLESS}, " at # needs a value that holds itself without end; make one of its parts optional"),
        ({"json": {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": ENDLESS["$defs"]}}, " at #/items needs"),
        (
            {"json": {"type": "array", "items": {**A_OR_B, "required": ["a", "b"]}}},
            " at #/items has patternProperties ",
        ),
        (
            {"json": {**A_OR_B, "properties": {"a": {}, "b": {}}}},
            " at # has patternProperties ('^[ab]$') that allow no name but those in properties and required; leave ",
        ),
        (
            {
                "json": {"patternProperties": A_OR_B["patternProperties"], "required": ["a", "b"]},
                "disable_additional_properties": True,
            },
            " at # has patternProperties ('^[ab]$') that allow no name ",
        ),
        ({"json": ONE_INT, "whitespace_pattern": "(["}, "unclosed character class"),
        ({"json": {"const": "\ud800"}}, "cannot be compiled"),
        ({"regex": "\ud800"}, "cannot be compiled"),
        ({"choice": ["\ud800"]}, "cannot be compiled"),
        ({"grammar": "root ::= ("}, "Expected ')' at line 1"),
        ({"grammar": 'a ::= "b"'}, "No 'root' rule found"),
        ({"grammar": "root ::= other"}, "other"),
        ({"grammar": "start: ("}, "Expected token ')'"),
        ({"grammar": "start: start"}, "no text follows it"),
        ({"grammar": "start: <nowhere>"}, "unknown special token"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    constraints: Constraints, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as error:
        constraints.compile([of(choice=["fine"]), of(**options)])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {**A_OR_B, "properties": {"a": {}}},
        {**A_OR_B, "required": ["b"], "minProperties": 2},
        {"patternProperties": A_OR_B["patternProperties"], "properties": {"a": {}, "b": {}}},  # any other name may come
        {**A_OR_B, "patternProperties": {**A_OR_B["patternProperties"], "^c": {"$ref": "#"}}, "required": ["a", "b"]},
    ],
)
def test_patterns_that_leave_a_name_never_lead_where_no_token_is_allowed(
    constraints: Constraints, schema: dict[str, Any]
) -> None:
    wanted = of(json={"type": "object", **schema}, disable_any_whitespace=True)
    assert {reason for _, reason, _ in draw(constraints, [wanted] * 40, 0, max_tokens=40)} <= {"stop", "length"}


def test_a_grammar_that_begins_with_no_allowed_token_is_refused(constraints: Constraints) -> None:
    with pytest.raises(RequestError, match="regex='a' begins with no token that allowed_token_ids, bad_words and stop"):
        start(constraints, regex="a", allowed_token_ids=encode("b"))
    start(constraints, regex="a*", allowed_token_ids=encode("b"))  # may end at once


def test_without_the_library_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'nanoinfer\[structured\]'"):
        start(new_constraints(), regex="a")
    start(new_constraints(), allowed_token_ids=[1])


def test_a_model_without_a_tokenizer_or_with_one_in_python_is_refused(constraints: Constraints) -> None:
    with pytest.raises(RequestError, match=r"need a tokenizer.json, and this model has no tokenizer; leave them out"):
        Constraints(None, 10, frozenset()).compile([of(regex="a")])

    class PythonTokenizer:
        hf = object()

    tokenizer: Any = PythonTokenizer()
    with pytest.raises(RequestError, match=r"has a object, written in Python"):
        Constraints(tokenizer, 10, frozenset()).compile([of(regex="a")])


def test_a_tokenizer_that_the_library_cannot_read_is_refused() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))

    class WordTokenizer:
        class hf:  # noqa: N801
            backend_tokenizer = words

    tokenizer: Any = WordTokenizer()
    with pytest.raises(RequestError, match=r"cannot be used with this model's tokenizer \(.*decoder"):
        Constraints(tokenizer, 10, frozenset()).compile([of(regex="a")])


def test_ids_without_a_token_are_never_allowed() -> None:
    """The logits of many models are wider than their tokenizers."""
    constraints = new_constraints(vocab_size=VOCAB_SIZE + 40)
    constraint = start(constraints, regex="(.|\n)*")
    for text in ("", "a", "bc"):
        for token_id in encode(text):
            constraint.append(token_id)
        masks = constraints.masks([constraint]).grammars
        assert masks is not None
        assert masks.bits.shape == (1, (VOCAB_SIZE + 40 + 31) // 32)
        ids = ids_of(masks.bits[0])
        assert max(ids) == EOS
        assert len(ids) > 500


def test_special_tokens_are_no_text(constraints: Constraints) -> None:
    ids = next_ids(constraints, start(constraints, regex=".*"))
    assert ids & {*range(1015, VOCAB_SIZE)} == {EOS}


def test_a_model_without_stop_tokens_ends_where_its_grammar_is_complete() -> None:
    constraints = new_constraints(stop_token_ids=frozenset())
    digits = start(constraints, regex="[0-9]{1,2}")
    digits.append(encode("1")[0])
    assert next_ids(constraints, digits) == {*(encode(digit)[0] for digit in "0123456789")}
    assert digits.append(encode("1")[0])


def test_users_functions_get_the_tokens_so_far_and_cannot_change_them(constraints: Constraints) -> None:
    constraint = start(constraints, logits_processors=[lambda token_ids, logits: logits])
    constraint.append(7)
    [(_, token_ids)] = constraints.masks([constraint]).functions.values()
    assert token_ids == [7]
    token_ids.clear()
    constraint.append(8)
    assert constraints.masks([constraint]).functions[0][1] == [7, 8]


def test_ctrl_c_while_a_grammar_is_noted_leaves_it_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = new_constraints()
    constraints.compile([of(choice=["x"])])
    cache = constraints._grammars

    class Interrupted(OrderedDict[Any, Any]):
        def move_to_end(self, key: Any, last: bool = True) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_grammars", Interrupted(cache._grammars))
    with pytest.raises(KeyboardInterrupt):
        constraints.compile([of(choice=["a", "b"])])
    monkeypatch.setattr(Interrupted, "move_to_end", OrderedDict.move_to_end)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(constraints.compile, [of(choice=["a", "b"])]).result(timeout=30)
