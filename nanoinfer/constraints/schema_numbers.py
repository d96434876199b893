"""Numbers in JSON schemas that the grammar engine would misread, crash on or never finish with."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from nanoinfer.constraints.schemas import NAMED, all_dicts

COMBINING = {"allOf", "anyOf", "oneOf", "$ref"}  # several schemas may describe one number
NOTES = ("default", "examples")  # keywords that hold values and ask for nothing
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
EXACT = 2**53  # floats hold all whole numbers up to this one
LARGEST = 9 * 10**18  # a bound near the end of 64 bits that the engine takes from both sides
NUDGE = 1e-9
MAX_MULTIPLE = 100_000  # the engine makes a state for each remainder, and takes up to a second for as many


def check_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy whose numbers the engine, which reads floats and counts in 64 bits, takes for what they are.

    Bounds beyond LARGEST become LARGEST: some valid numbers cannot be written then, but no others can. Raises
    ValueError for what would be taken for another number, and for a multipleOf that would take too long.
    """
    parts = [*all_dicts(schema)]
    multiples = [abs(one) for part in parts if _is_number(one := part.get("multipleOf")) and one]
    are_combined = any(COMBINING & part.keys() for part in parts)
    for several in [multiples] if are_combined else [[one] for one in multiples]:
        if _num_remainders(several) > MAX_MULTIPLE:
            named = " and ".join(map(repr, dict.fromkeys(several)))
            raise ValueError(
                f"multipleOf {named:.200} has more than {MAX_MULTIPLE} remainders, and each becomes a state; use a "
                "smaller number, or one with fewer digits"
            )
    bounds = [part[key] for part in parts for key in LOWER + UPPER if _is_number(part.get(key))]
    cells = frozenset(int(abs(bound)) for bound in bounds if abs(bound) < EXACT and bound != int(bound))
    checked: dict[str, Any] = _with_exact_numbers(schema, cells)
    return checked


def _num_remainders(multiples: Sequence[int | float]) -> int:
    """Return the least common multiple of some numbers, in units of its last digit."""
    exact = [Decimal(repr(one)) for one in multiples]
    num_digits = max((-int(one.as_tuple().exponent) for one in exact), default=0)  # after the point
    size = math.lcm(*(int(one.scaleb(max(0, num_digits))) for one in exact))
    while num_digits > 0 and size % 10 == 0:
        size, num_digits = size // 10, num_digits - 1
    return size


def _with_exact_numbers(value: Any, cells: frozenset[int], are_names: bool = False) -> Any:
    """Return a copy of a schema, or of what holds some.

    cells: the whole parts of bounds that have a fraction. are_names: whether keys of a dict are names of the user's.
    """
    if isinstance(value, list):
        return [_with_exact_numbers(item, cells) for item in value]
    if not isinstance(value, dict):
        return _in_64_bits(value)
    copy = {}
    for key, child in value.items():
        if are_names:
            copy[key] = _with_exact_numbers(child, cells)
        elif key in ("const", "enum"):
            copy[key] = _exact_values(key, child)
        elif key in LOWER + UPPER and _is_number(child):
            copy[key] = _exact_bound(value, key, cells)
        elif key not in NOTES:
            copy[key] = _with_exact_numbers(child, cells, key in NAMED)
    return copy


def _exact_bound(schema: dict[str, Any], key: str, cells: frozenset[int]) -> int | float:
    """Return a bound that the engine reads exactly."""
    value: int | float = schema[key]
    is_lower = key in LOWER
    # In old drafts exclusiveMinimum is a bool that says how `minimum` is meant.
    is_exclusive = key.startswith("exclusive") or schema.get(f"exclusive{key.capitalize()}") is True
    inwards = 1 if is_lower else -1
    if abs(value) < EXACT:
        # Between 0 and 0.5, say, the engine allows 0 even where it is excluded.
        is_allowed = is_exclusive and value == int(value) and abs(int(value)) in cells
        return value + inwards * max(NUDGE, math.ulp(value)) if is_allowed else value
    nearest = value + inwards * is_exclusive  # whole number that is allowed
    types = schema.get("type", "number")
    is_integer = "number" not in (types if isinstance(types, list) else [types])
    if abs(value) <= 2**63:
        is_read_exactly = _as_int64(float(value) + (nearest - value)) == nearest > -(2**63)
        if is_read_exactly and (is_integer or _is_written_exactly(value)):
            return value
    if value < -LARGEST if is_lower else value > LARGEST:
        return -LARGEST if is_lower else LARGEST
    raise ValueError(
        f"{key}={value} would be taken for another number; beyond 2**53, use bounds that a float holds, within "
        "9 * 10**18: multiples of 10**10, say, that are not exclusive"
    )


def _as_int64(number: float) -> int:
    """Return a float as an integer of 64 bits, as the engine does it."""
    return min(max(int(number), -(2**63)), 2**63 - 1)


def _is_written_exactly(number: int | float) -> bool:
    """Return whether the engine, which writes floats in as few digits as tell them apart, writes a whole number."""
    return int(Decimal(repr(_as_float(number)))) == number == float(number)


def _exact_values(key: str, value: Any) -> Any:
    """Return a copy of what `const` or `enum` holds. Raises ValueError for a number that would become another."""
    if isinstance(value, dict):
        return {name: _exact_values(key, child) for name, child in value.items()}
    if isinstance(value, list):
        return [_exact_values(key, child) for child in value]
    if _is_number(value) and abs(value) >= EXACT:
        is_int64 = isinstance(value, int) and -(2**63) <= value < 2**63
        if value == -(2**63) or not (_as_int64(float(value)) == value if is_int64 else _is_written_exactly(value)):
            raise ValueError(f"{key} has {value}, which would become another number; use one that a float holds")
    return _in_64_bits(value)


def _in_64_bits(value: Any) -> Any:
    """Return an integer that 64 bits do not hold as a float, and all else as it is."""
    is_large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return _as_float(value) if is_large else value


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"there is a number of {len(str(number))} digits; use one that a float holds") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
