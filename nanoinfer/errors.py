"""The errors that nanoinfer raises on purpose.

    NanoinferError
    |-- ConfigError (ValueError)         an option of LLM, or two that do not go together
    |-- ModelError (ValueError)          a model folder, config.json or checkpoint that cannot be used
    |-- RequestError (ValueError)        a prompt or sampling parameter that cannot be served
    |-- JobError (ValueError)            input or output of a batch job that cannot be used
    |-- WorkerError (RuntimeError)       a process of the engine has ended, and the engine with it
    |-- EngineStateError (RuntimeError)  a call that the engine cannot serve now: it sleeps, requests are unfinished, or
    |                                    the call comes from within a step
    `-- EngineClosedError (RuntimeError) a call to an engine that was closed, by its user or by another error

Every message says what was wrong, the value, and what to do. Catching ValueError catches all that a user can mend.
A misspelt name of an option is a TypeError, as in any Python call; `check_names` makes it a helpful one.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import fields
from typing import Any, TypeVar

Dataclass = TypeVar("Dataclass")


class NanoinferError(Exception):
    """Is the base of all that nanoinfer raises on purpose."""


class ConfigError(NanoinferError, ValueError):
    """An option of `LLM` is out of range, or does not fit the model or the device."""


class ModelError(NanoinferError, ValueError):
    """The model's folder, its config.json or its weights are missing, incomplete or of a kind not supported."""


class RequestError(NanoinferError, ValueError):
    """A prompt or a sampling parameter is invalid; nothing was queued.

    kind: a short name of what is wrong, equal for all prompts with the same fault; docs/generate.md lists them.
    """

    def __init__(self, message: str = "", kind: str = "invalid_request") -> None:
        super().__init__(message)
        self.kind = kind

    def within(self, what: str) -> "RequestError":
        """Return the same error with the thing that it is about before it."""
        return RequestError(f"{what}: {self}", self.kind)


class JobError(NanoinferError, ValueError):
    """The input or the output file of a batch job cannot be used, or they do not belong together."""


class EngineClosedError(NanoinferError, RuntimeError):
    """The engine was closed before this call, by its user or by an error, which the message names."""


class EngineStateError(NanoinferError, RuntimeError):
    """The engine cannot serve this call now: it sleeps, lacks weights, has unfinished requests, or is within a step."""


class WorkerError(NanoinferError, RuntimeError):
    """A process of the engine has ended; the message has its traceback or its exit signal. Later calls raise it too."""


def closed_by(error: BaseException) -> NanoinferError:
    """Return what calls raise after `error` has closed the engine. It has no traceback, which would hold memory."""
    if isinstance(error, WorkerError):
        return WorkerError(*error.args)
    return EngineClosedError(f"this engine was closed by {error!r}; make a new LLM")


def closed_error(failure: NanoinferError | None) -> NanoinferError:
    """Return an error to raise for a call to a closed engine. failure: of `closed_by`; None if its user closed it."""
    return copy(failure or EngineClosedError("this engine was closed; make a new LLM"))  # each thread raises its own


NOT_SUPPORTED = "nanoinfer does not support it"
ADAPTER_REMEDY = (
    "use the base model with enable_lora=True, and name the adapter in calls by lora_request=LoRARequest(name, id, "
    "folder), or merge the two with peft's merge_and_unload and give the folder where that is saved"
)
ABOUT_ADAPTERS = re.compile(r"lora|peft|(?<!prompt_)adapter")  # in the name of an option
# For an option that nanoinfer does not have: the values that ask for what it does anyway, and why it takes no others.
Foreign = tuple[tuple[Any, ...], str]
# For each name that other libraries use: our name for the same thing, the values accepted, or None if there are none.
Foreigners = Mapping[str, str | Foreign | None]


def check_names(owner: str, options: Mapping[str, Any], known: Collection[str], foreign: Foreigners) -> dict[str, Any]:
    """Return the options, without those of other libraries that say what nanoinfer does anyway.

    Raises TypeError for the first name that `owner` does not know, with the one that was probably meant.
    """
    kept = {}
    for name, value in options.items():
        if name in known:
            kept[name] = value
        elif name not in foreign or not says_what_is_so(foreign[name], value):
            hint = explain_unknown(name, known, foreign)
            raise TypeError(f"{owner} has no option {name!r}; {hint}{' ' if hint else ''}Options: {', '.join(known)}")
    return kept


def says_what_is_so(foreign: str | Foreign | None, value: Any) -> bool:
    """Return whether an option asks for nothing, or for what happens in any case."""
    if value is None or isinstance(foreign, str):  # what has a name of ours is to be given by that
        return value is None
    if isinstance(value, (str, list, tuple, dict)) and not value:
        return True
    return foreign is not None and isinstance(value, (bool, int, float, str, list)) and value in foreign[0]


def explain_unknown(name: str, known: Collection[str], foreign: Foreigners) -> str:
    """Say which option was probably meant, or why there is none; "" if there is nothing to say."""
    if ABOUT_ADAPTERS.search(name):
        return f"{ADAPTER_REMEDY}."
    its = foreign.get(name, "")
    if not isinstance(its, str):
        accepted, why = its or ((), NOT_SUPPORTED)
        only = f"; use {' or '.join(map(repr, accepted))}, or leave it out" if accepted and why != NOT_SUPPORTED else ""
        return f"{why}{only}."
    meant = its or find_similar(name, known)
    return f"did you mean {meant!r}?" if meant else ""


def with_checked_names(foreign: Foreigners) -> Callable[[type[Dataclass]], type[Dataclass]]:
    """Return a decorator that makes a misspelt argument of a dataclass an error, as `check_names` writes it."""

    def decorate(cls: type[Dataclass]) -> type[Dataclass]:
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        cls.__init__ = checking_names(cls.__init__, cls.__name__, known, foreign)  # type: ignore[method-assign]
        return cls

    return decorate


def checking_names(
    function: Callable[..., Any], owner: str, known: Collection[str], foreign: Foreigners
) -> Callable[..., Any]:
    """Return a function, which may be a coroutine function, that takes the options that `check_names` lets through."""

    @functools.wraps(function)  # keeps the signature that help() and editors show
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **(check_names(owner, options, known, foreign) if options else options))

    @functools.wraps(function)
    async def acall(*args: Any, **options: Any) -> Any:
        return await call(*args, **options)

    return acall if inspect.iscoroutinefunction(function) else call


def find_similar(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is spelt almost like `name`, or has all of its words; None if there is none."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    words = set(name.split("_"))
    return next(iter([*close, *(item for item in known if words <= set(item.split("_")))]), None)
