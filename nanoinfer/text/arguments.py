"""Turns arguments of LLM's methods that come in several shapes into lists: prompts, options, priorities, ids.

Prompts that cannot be served are all named in one error, or come back in their places: see `report`.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from nanoinfer.errors import RequestError
from nanoinfer.option_fields import is_whole_number
from nanoinfer.outputs import RequestOutput, shown
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.image_parts import IMAGE_PROMPT_FIELDS, ImagePrompt, as_image_prompt

logger = logging.getLogger("nanoinfer")

MAX_NAMED = 10  # errors in one message
CONVERSIONS = ("tolist", "to_pylist", "to_list")  # of arrays and columns: NumPy, pandas and PyTorch; Arrow; Polars
NO_COLUMNS = (str, list, tuple, Mapping, bytes, bytearray, memoryview, type)


class Array(Protocol):
    """Types arrays of NumPy, tensors of PyTorch, columns of pandas and Arrow."""

    def tolist(self) -> Any: ...


class Series(Protocol):
    """Types columns of Polars and pandas. Without stubs, `df["a"]` may be a DataFrame to pyright; it has this too."""

    def to_numpy(self) -> Any: ...


Prompt = str | list[int] | ImagePrompt
GivenPrompt = Prompt | Mapping[str, Any] | Array | Series  # {"prompt": ...}, as vLLM's users write it, is a mapping
# One prompt or several. One Sequence stands for both a list of prompts and a prompt's token ids, because mypy infers
# the type of ["text", [1, 2]] from one alone.
Prompts = str | Mapping[str, Any] | Array | Series | Sequence[GivenPrompt | int]
Params = SamplingParams | Sequence[SamplingParams] | Array | Series | None  # for all prompts, or one for each
Priorities = Sequence[int] | Array | Series | None  # one for each prompt
Result = TypeVar("Result")
OnFinish = Callable[[RequestOutput], object]
OnError: TypeAlias = Literal["raise", "return"]
Errors = dict[int, RequestError]  # by the index of the prompt that cannot be served, from 0


def as_list(value: Any) -> Any:
    """Return an array, a column or another sequence as a list, and any other value as it is."""
    if isinstance(value, NO_COLUMNS):
        return value
    for name in CONVERSIONS:
        if callable(convert := getattr(value, name, None)):
            return convert()
    return list(value) if isinstance(value, Sequence) else value  # columns of `datasets`, say


def is_column(value: Any) -> bool:
    """Return whether it is a column of a table, of pandas, Polars, Arrow or `datasets`, and no list, array or range."""
    if isinstance(value, (*NO_COLUMNS, range)):
        return False
    return isinstance(value, Sequence) or any(hasattr(value, name) for name in ("to_list", "to_pylist"))


def as_list_of_prompts(prompts: Prompts) -> list[Prompt]:
    """Return one prompt or several, perhaps in an array or a column, as a list."""
    given, prompts = prompts, as_list(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [as_prompt(prompts)]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a list, an array or a "
            "column of these"
        )
    # Of a column each element is a prompt, of a list or an array they may be one prompt's token ids.
    is_token_ids = bool(prompts) and all(isinstance(item, Integral) for item in prompts)
    if is_token_ids and is_column(given):
        raise RequestError(
            f"prompts is a {type(given).__name__} of whole numbers, {shown([*map(int, prompts)])}: give [[...], ...], "
            "a list of token ids for each prompt; or a list of the numbers, if they are one prompt's token ids"
        )
    return [cast("Prompt", list(prompts))] if is_token_ids else [as_prompt(cast("Prompt", item)) for item in prompts]


def as_prompt(prompt: GivenPrompt) -> Prompt:
    """Return the prompt in a mapping, alone or with images; all other things as they are, to be checked later."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        data = given.get("multi_modal_data")
        if isinstance(data, Mapping) and not data:  # as of a text among prompts with images
            given = {name: given[name] for name in given if name not in IMAGE_PROMPT_FIELDS[2:]}
        [(name, value)] = given.items() if len(given) == 1 else [(None, None)]
        if name == "prompt" or (name == "prompt_token_ids" and not isinstance(value, str)):
            return cast("Prompt", as_list(value))
        if (with_images := as_image_prompt(given)) is not None:
            return with_images
    return cast("Prompt", as_list(prompt))


def as_priorities(priority: Priorities, count: int) -> list[int]:
    """Return a priority for each of `count` prompts."""
    if priority is None:
        return [0] * count
    given = as_list(priority)
    if not isinstance(given, (list, tuple)) or not all(map(is_whole_number, given)):
        raise RequestError(f"priority={given!r} must be a list of whole numbers, one for each prompt; 0 is usual")
    if len(given) != count:
        raise RequestError(f"{len(given)} priorities for {count} prompts; give one for each")
    return [int(item) for item in given]


def as_request_ids(request_ids: int | Collection[int]) -> list[int]:
    """Return one request id or several as a list."""
    ids: list[Any] = list(request_ids) if isinstance(request_ids, (list, tuple, set, frozenset)) else [request_ids]
    if not all(map(is_whole_number, ids)):
        raise RequestError(f"request_ids={request_ids!r}; give an id that add_request returned, or a list of these")
    return [int(item) for item in ids]


def one_for_each(params: Any, count: int, kind: type[Any] = SamplingParams, name: str = "sampling_params") -> list[Any]:
    """Return options of a class for each of `count` prompts. name: the argument's, for errors."""
    if params is None or isinstance(params, kind):
        return [params or kind()] * count
    params = as_list(params)
    if not isinstance(params, (list, tuple)) or not all(isinstance(item, kind) for item in params):
        raise RequestError(f"{name}={params!r}; give a {kind.__name__} for all prompts, or a list with one for each")
    if len(params) != count:
        raise RequestError(f"{len(params)} {name} for {count} prompts; give one for all, or one for each")
    return list(params)


def check_on_finish(on_finish: Any) -> None:
    """Raise RequestError if it cannot be called with an output."""
    if on_finish is not None and not callable(on_finish):
        raise RequestError(f"on_finish={on_finish!r} cannot be called; give a function of an output")


def check_streamable(sampling_params: list[SamplingParams]) -> None:
    """Raise RequestError for options whose results have no field in the chunks of a stream."""
    for params in sampling_params:
        if params.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} cannot be streamed; use generate, or leave it out"
            )


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


def results_by_prompt(
    results: Mapping[int, Result | RequestError],
    params: Mapping[int, SamplingParams],
    errors: Errors,
    are_shared: bool | None = None,
) -> dict[int, Result]:
    """Return by prompt what `results` has by the id of a SamplingParams, where it has anything.

    A RequestError is added to `errors` for each prompt with these options instead. are_shared: whether all prompts of
    the call have the same options, so that errors need not name the prompt; None if `params` has all prompts of the
    call.
    """
    is_named = len({*map(id, params.values())}) > 1 if are_shared is None else not are_shared
    found: dict[int, Result] = {}
    for index, one in params.items():
        result = results.get(id(one))
        if isinstance(result, RequestError):
            wrong = RequestError(str(result), "invalid_sampling_params")
            errors.setdefault(index, wrong.within(f"prompt {index}") if is_named else wrong)
        elif result is not None:
            found[index] = result
    return found
