"""Prompts that cannot be served: all that are wrong are named in one error, or come back in their places."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from nanoinfer.errors import RequestError
from nanoinfer.sampling_params import SamplingParams

logger = logging.getLogger("nanoinfer")

Result = TypeVar("Result")
OnError: TypeAlias = Literal["raise", "return"]
MAX_NAMED = 10  # errors in one message

Errors = dict[int, RequestError]  # by the index of the prompt that cannot be served, from 0


def check_on_error(on_error: Any) -> None:
    """Raise RequestError for an on_error that is not known."""
    if on_error not in ("raise", "return"):
        raise RequestError(f"on_error={on_error!r} is not known; use 'raise', or 'return' to get errors as outputs")


def report(errors: Mapping[int, RequestError], count: int, on_error: OnError = "raise") -> None:
    """Raise what is wrong with some of `count` prompts, or log it where it is returned in their places."""
    if not errors:
        return
    found = [errors[index] for index in sorted(errors)]
    is_one = len({*map(str, found)}) == 1  # one prompt, or what is wrong with the options of all
    more = [f"and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
    named = f" {found[0]}" if is_one else "".join(f"\n  {line}" for line in [*found[:MAX_NAMED], *more])
    if on_error == "return":
        logger.warning("%d of %d prompts come back with an error:%s", len(found), count, named)
    elif is_one:
        raise found[0]
    else:
        remedy = "mend them, or let a call with on_error='return' answer the rest"
        raise RequestError(f"{len(found)} of {count} prompts cannot be served; {remedy}:{named}")


def for_each_params(
    function: Callable[[SamplingParams], Result],
    params: Mapping[int, SamplingParams],
    errors: Errors,
    are_shared: bool | None = None,
) -> dict[int, Result]:
    """Call a function once for each different SamplingParams of some prompts, and return its results by prompt.

    If it raises a RequestError, that is added to `errors` for each prompt with these options, and there is no result.
    are_shared: whether all prompts of the call have the same options, so that errors need not name the prompt; None if
    `params` has all prompts of the call.
    """
    places: dict[int, list[int]] = {}  # of the prompts, by the id of their options
    for index, one in params.items():
        places.setdefault(id(one), []).append(index)
    results: dict[int, Result] = {}
    is_named = len(places) > 1 if are_shared is None else not are_shared
    for indices in places.values():
        try:
            results |= dict.fromkeys(indices, function(params[indices[0]]))
        except RequestError as error:
            for index in indices:
                wrong = RequestError(str(error), "invalid_sampling_params")
                errors.setdefault(index, wrong.within(f"prompt {index}") if is_named else wrong)
    return results
