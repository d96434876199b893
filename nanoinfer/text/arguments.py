"""What users give to methods of LLM in more than one shape, as lists: prompts, sampling options, priorities, ids."""

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

from nanoinfer.errors import RequestError
from nanoinfer.outputs import RequestOutput, shown
from nanoinfer.sampling_params import SamplingParams, is_whole_number
from nanoinfer.text.columns import Array, Series, as_list, is_column

Prompt = str | list[int]
GivenPrompt = Prompt | Mapping[str, Any] | Array | Series  # {"prompt": ...}, as vLLM's users write it, is a mapping
# One prompt or several. One Sequence stands for both a list of prompts and a prompt's token ids, because mypy infers
# the type of ["text", [1, 2]] from one alone.
Prompts = str | Mapping[str, Any] | Array | Series | Sequence[GivenPrompt | int]
Params = SamplingParams | Sequence[SamplingParams] | Array | Series | None  # for all prompts, or one for each
Priorities = Sequence[int] | Array | Series | None  # one for each prompt
Options = TypeVar("Options")
OnFinish = Callable[[RequestOutput], object]


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
    """Return the prompt in a mapping that holds nothing else; all other things as they are, to be checked later."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        [(name, value)] = given.items() if len(given) == 1 else [(None, None)]
        if name == "prompt" or (name == "prompt_token_ids" and not isinstance(value, str)):
            return cast("Prompt", as_list(value))
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


def one_for_each(params: Params, count: int) -> list[SamplingParams]:
    """Return sampling options for each of `count` prompts."""
    return one_of_kind_for_each(params, count, SamplingParams, "sampling_params")


def one_of_kind_for_each(params: Any, count: int, kind: type[Options], name: str) -> list[Options]:
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
    """Raise RequestError for what cannot be called with an output."""
    if on_finish is not None and not callable(on_finish):
        raise RequestError(f"on_finish={on_finish!r} cannot be called; give a function of an output")


def check_streamable(sampling_params: list[SamplingParams]) -> None:
    """Raise RequestError for what a stream's chunks have no place for."""
    for params in sampling_params:
        if params.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} cannot be streamed; use generate, or leave it out"
            )
