"""Numbers in schemas: read exactly, moved to where fewer are allowed, or refused before the library sees them."""

import json
from typing import Any

import pytest

from nanoinfer import RequestError
from nanoinfer.constraints.schema_numbers import LARGEST, check_numbers
from tests.constraints.helpers import is_possible, new_constraints, start

pytest.importorskip("llguidance")

INT64 = 2**63


def an_integer(**keywords: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords}


def a_number(**keywords: Any) -> dict[str, Any]:
    return {"type": "number", **keywords}


@pytest.mark.parametrize(
    "schema",
    [
        an_integer(minimum=-INT64, maximum=-INT64),  # the library would end the process
        an_integer(minimum=-1e300, maximum=-1e300),
        an_integer(exclusiveMinimum=-(2**64), exclusiveMaximum=-INT64),
        {"const": -INT64},
        an_integer(enum=[5, -INT64]),
        a_number(minimum=1e19),
        an_integer(minimum=2**53 + 1),  # floats do not hold it
        an_integer(maximum=2**53 + 1),
        a_number(maximum=2**60),  # the library would write 1152921504606847000
        an_integer(exclusiveMinimum=2**53),  # one more is no float
        an_integer(minimum=2**53, exclusiveMinimum=True),
        {"maximum": 2**60},  # it may be a number
        {"const": 2**53 + 1},
        {"enum": [{"a": [1e23]}]},  # written as 10**23, which is another number
        an_integer(minimum=10**400),
        {"$ref": "#/else/n", "else": {"n": an_integer(minimum=2**53 + 1)}},
        an_integer(multipleOf=2**31),
        an_integer(multipleOf=100_003),
        a_number(multipleOf=1000.003),
        an_integer(allOf=[{"multipleOf": 1009}, {"multipleOf": 1013}]),
        an_integer(anyOf=[{"multipleOf": 1009}, {"multipleOf": 1013}]),
        {"allOf": [{"multipleOf": 65_536}, {"multipleOf": 65_537}]},  # beyond 32 bits, where the library's overflows
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_number_that_the_library_misreads_or_dies_of_is_refused(schema: dict[str, Any]) -> None:
    constraints = new_constraints()
    for options in ({"json": schema}, {"json": {"type": "array", "items": {"properties": {"a": schema}}, **schema}}):
        with pytest.raises(RequestError, match=r"structured_outputs json=.* cannot be compiled: .*(number|remainders)"):
            start(constraints, **options)
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(RequestError, match=r"structured_outputs structural_tag=.*(number|remainders)"):
        start(constraints, structural_tag=tag)
    with pytest.raises(RequestError, match=r"structured_outputs grammar=.*(number|remainders)"):
        start(constraints, grammar=f"start: a\na: %json {json.dumps(schema)}\n")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (an_integer(minimum=2**53, maximum=2**53 + 4), [2**53, 2**53 + 3], [2**53 - 1, 2**53 + 5]),
        (an_integer(maximum=2**60), [2**60, -(2**60)], [2**60 + 1]),
        (an_integer(minimum=0, maximum=INT64 - 1), [INT64 - 1], [INT64, -1]),
        (an_integer(exclusiveMaximum=2**53), [2**53 - 1], [2**53]),
        (an_integer(minimum=-INT64, maximum=INT64 - 1), [-LARGEST, LARGEST], [-INT64 - 1, INT64]),
        (an_integer(minimum=0, maximum=2**64 - 1), [0, LARGEST], [2**64]),
        (an_integer(minimum=-(10**30), maximum=10**400), [-LARGEST, LARGEST], [-(10**30) - 1]),
        (a_number(minimum=-1e300, maximum=1e300), [-LARGEST, 0.5], []),
        ({"anyOf": [an_integer(maximum=2**60), {"type": "null"}]}, [2**60], [2**60 + 1]),
        ({"const": 2**62}, [2**62], [2**62 + 1]),
        ({"const": 10**22}, [10**22], [10**22 + 1]),
        ({"const": 0.48785665652414756}, ["0.48785665652414756"], ["0.4878566565241476"]),  # read from a text, another
        (a_number(minimum=0, maximum=0.48785665652414756), ["0.48785665652414756"], ["0.4878566565241476"]),
        (a_number(exclusiveMinimum=0, maximum=0.5), ["0.00001", "0.5"], [0, "0.0", -1]),
        (a_number(minimum=-0.5, exclusiveMaximum=0), ["-0.00001", "-0.5"], [0, "-0", "-0.0"]),
        (a_number(minimum=5, exclusiveMinimum=True, maximum=5.25), ["5.0001", "5.25"], [5, "5.0"]),
        (a_number(exclusiveMinimum=0, maximum=1), ["0.00000000001", 1], [0, "0.0"]),
        ({"allOf": [a_number(exclusiveMinimum=0), {"maximum": 0.5}]}, ["0.1"], [0]),
        (an_integer(multipleOf=1000, minimum=1), [2000], [2001]),
        (a_number(multipleOf=0.01), ["1.25"], ["1.255"]),
        ({"properties": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 9967}}}, ['{"b": 9967}'], ['{"b": 9973}']),
        ({"properties": {"minimum": {"const": 1}, "const": {"const": 2}}}, ['{"minimum": 1, "const": 2}'], []),
        ({"type": "null", "default": 10**400, "examples": [{"minimum": 2**53 + 1}]}, ["null"], []),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_number_that_is_accepted_is_right(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    constraints = new_constraints()
    assert [text for text in right if not is_possible(constraints, str(text), json=schema)] == []
    assert [text for text in wrong if is_possible(constraints, str(text), json=schema)] == []


def test_a_schema_within_a_grammar_of_lark_has_its_numbers_checked_too() -> None:
    schema = json.dumps(an_integer(minimum=0, maximum=2**64, default=7, title="%json {}"))
    grammar = f'start: "<" a "," b ">"\na: %json {schema}\nb: %json {{"const": 2}}\n'
    constraints = new_constraints()
    assert is_possible(constraints, f"<{LARGEST},2>", grammar=grammar)
    assert not is_possible(constraints, f"<{2**64},2>", grammar=grammar)


def test_bounds_that_no_float_of_64_bits_counts_to_move_inwards() -> None:
    schema = an_integer(minimum=-(10**30), exclusiveMaximum=2**70)
    assert check_numbers(schema) == an_integer(minimum=-LARGEST, exclusiveMaximum=LARGEST)
    assert schema["exclusiveMaximum"] == 2**70, "a copy"
