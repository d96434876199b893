"""Declares an option at its field of SamplingParams, once: which values it takes, and how a row is told of it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from nanoinfer.errors import RequestError

TOKEN_ID = re.compile("[0-9]{1,10}")
MAX_BIAS = 1e30  # a logit stays finite with it, in float32


@dataclass(frozen=True, slots=True)
class RowOption:
    """Says what the row of a sequence is told by an option: a number, or several.

    neutral: the value that asks for nothing; None does, too. derive: returns the value, a number or a list of them,
    given the parameters and the engine's `Sequence`; without it, the value is the field of the parameters. A packet
    carries float64, so whole numbers come back as floats.
    """

    neutral: float | None = None
    derive: Callable[[Any, Any], Any] | None = None

    def value(self, name: str, seq: Any) -> Any:
        """Return what a sequence asks for by the option of this name; None for nothing."""
        params = seq.sampling_params
        value = getattr(params, name) if self.derive is None else self.derive(params, seq)
        return None if value == self.neutral else value


def option(
    default: Any,
    check: Callable[[str, Any], Any],
    row: RowOption | None = None,
    hashed: bool = True,
    is_of_prefix: bool = False,
) -> Any:
    """Declare an option.

    check: returns the value to keep, given the option's name and its value. row: how a row is told of it, if the
    sampler is to know. hashed: whether its values can be hashed. is_of_prefix: whether the keys and values of a prompt
    depend on it, so that prefixes are shared only among requests with equal values; these are hashed.
    """
    return field(default=default, hash=hashed, metadata={"check": check, "row": row, "is_of_prefix": is_of_prefix})


def real(default: float, is_in_range: Callable[[Any], bool], rule: str, remedy: str, row: Any = None) -> Any:
    """Declare an option that is a number. rule: the range, in words. remedy: what to use in place of other values."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise RequestError(f"{name}={value!r} is not a number; {remedy}")
        if not is_in_range(value):
            raise RequestError(f"{name}={value} must be {rule}; {remedy}")
        return value

    return option(default, check, row)


def whole(
    default: Any, least: int, remedy: str, most: float = math.inf, row: Any = None, may_be_none: bool = False
) -> Any:
    """Declare an option that is a whole number from `least` to `most`. remedy: what to use in place of others."""

    def check(name: str, value: Any) -> Any:
        if value is None and may_be_none:
            return None
        if not is_whole_number(value):
            raise RequestError(f"{name}={value!r} is not an int; use a whole number of at least {max(least, 0)}")
        if value < least:
            raise RequestError(f"{name}={value} must be at least {least}; {remedy}")
        if value > most:
            raise RequestError(f"{name}={value} must be at most {most}; {remedy}")
        return int(value)  # NumPy's integers, say

    return option(default, check, row)


def many(is_item: Callable[[Any], Any], what: str, hashed: bool = True) -> Any:
    """Declare an option that is a list. what: which list it must be, and one to use."""

    def check(name: str, value: Any) -> Any:
        given = () if value is None else value
        if not isinstance(given, (list, tuple)) or not all(map(is_item, given)):
            raise RequestError(f"{name}={given!r} must be {what}, say")
        return tuple(given) or None

    return option(None, check, hashed=hashed)


def a_bool(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise RequestError(f"{name}={value!r} is not a bool; use True or False")
    return value


def token_ids(name: str, value: Any) -> Any:
    ids: list[Any] | None = [] if value is None else None
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        ids = list(value)
    if ids is None or not all(map(is_token_id, ids)):
        raise RequestError(f"{name}={value!r} must be a list of token ids; use [0], say")
    return tuple(map(int, ids))


def token_biases(name: str, value: Any) -> Any:
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise RequestError(f"{name}={given!r} must be a dict from token ids to numbers; use {{0: -100}}, say")
    biases: dict[int, float] = {}
    for token_id, bias in given.items():
        key = int(token_id) if isinstance(token_id, str) and TOKEN_ID.fullmatch(token_id) else token_id
        if not is_token_id(key):
            raise RequestError(f"{name} has {token_id!r} in place of a token id; use whole numbers from 0 on")
        if isinstance(bias, bool) or not isinstance(bias, Real) or not abs(bias) <= MAX_BIAS:  # type: ignore[operator]
            raise RequestError(
                f"{name} has {bias!r} for token {token_id}; use a finite number between -{MAX_BIAS:g} and "
                f"{MAX_BIAS:g}, -100 to all but forbid the token"
            )
        biases[int(key)] = float(bias)
    return biases or None


def is_token_id(item: object) -> bool:
    """Return whether it may be a token id of some model."""
    return is_whole_number(item) and 0 <= item < 2**31  # type: ignore[operator]


def is_whole_number(item: object) -> bool:
    """Return whether it is an integer, NumPy's included; True and False are none."""
    return isinstance(item, Integral) and not isinstance(item, bool)
