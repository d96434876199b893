"""The errors that nanoinfer raises on purpose.

    NanoinferError
    |-- ConfigError (ValueError)         an option of LLM, or two that do not go together
    |-- ModelError (ValueError)          a model folder, config.json or checkpoint that cannot be used
    |-- RequestError (ValueError)        a prompt or sampling parameter that cannot be served
    |-- JobError (ValueError)            input or output of a batch job that cannot be used
    |-- WorkerError (RuntimeError)       a process of a tensor-parallel engine has ended
    |-- EngineStateError (RuntimeError)  a call that the engine cannot serve now: it sleeps, requests are unfinished, or
    |                                    the call comes from within a step
    `-- EngineClosedError (RuntimeError) a call to an engine that was closed

Every message says what was wrong, the value, and what to do. Catching ValueError catches all that a user can mend.
A misspelt name of an option is a TypeError, as in any Python call; `check_names` makes it a helpful one.
"""

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any


class NanoinferError(Exception):
    """Anything that nanoinfer raises on purpose."""


class ConfigError(NanoinferError, ValueError):
    """An option of `LLM` is out of range, or does not fit the model or the device."""


class ModelError(NanoinferError, ValueError):
    """The model's folder, its config.json or its weights are missing, incomplete or of a kind not supported."""


class RequestError(NanoinferError, ValueError):
    """A prompt or a sampling parameter is invalid; nothing was queued."""


class JobError(NanoinferError, ValueError):
    """The input or the output file of a batch job cannot be used, or they do not belong together."""


class EngineClosedError(NanoinferError, RuntimeError):
    """The engine was closed before this call."""


class EngineStateError(NanoinferError, RuntimeError):
    """The engine cannot serve this call now: it sleeps, lacks weights, has unfinished requests, or is within a step."""


class WorkerError(NanoinferError, RuntimeError):
    """A process of a tensor-parallel engine has ended; the message has its traceback or its exit signal."""


def check_names(owner: str, names: Iterable[str], known: Collection[str], foreign: Mapping[str, str | None]) -> None:
    """Raise TypeError for the first of `names` that `owner` does not know, with the name that was probably meant.

    foreign: names that other libraries use, with the one of `known` that means the same, or None where there is none.
    """
    for name in names:
        if name in known:
            continue
        meant = foreign.get(name) or find_similar(name, known)
        if name in foreign and foreign[name] is None:
            hint = "nanoinfer does not support it. "
        else:
            hint = f"did you mean {meant!r}? " if meant else ""
        raise TypeError(f"{owner} has no option {name!r}; {hint}Options: {', '.join(known)}")


def with_checked_names(foreign: Mapping[str, str | None]) -> Callable[[type], type]:
    """Return a decorator that makes a misspelt argument of a dataclass an error, as `check_names` writes it."""

    def decorate(cls: type) -> type:
        init, known = cls.__init__, [item.name for item in fields(cls)]  # type: ignore[misc]

        @functools.wraps(init)  # keeps the signature that help() and editors show
        def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
            check_names(cls.__name__, options, known, foreign)
            init(self, *args, **options)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def find_similar(name: str, known: Collection[str]) -> str | None:
    """Return the one of `known` that is spelt almost like `name`, or has all of its words; None if there is none."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    words = set(name.split("_"))
    return next(iter([*close, *(item for item in known if words <= set(item.split("_")))]), None)
