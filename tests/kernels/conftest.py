"""Makes Triton's interpreter faster, which runs the kernels where there is no GPU."""

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from tests.conftest import NUM_GPUS


def remember_builtins(interpreter: Any) -> None:
    """Let the interpreter look through `triton.language` once for what it replaces there.

    It does so whenever a kernel calls a function of its own, though all is replaced already: half of the tests' time.
    """
    known: dict[Any, list[str]] = {}

    def getmembers(place: Any) -> list[tuple[str, Any]]:
        is_builtin = interpreter.tl.core.is_builtin
        if place not in known:
            known[place] = [name for name, member in inspect.getmembers(place) if is_builtin(member)]
        names = known[place]
        is_replaced = bool(names) and not is_builtin(getattr(place, names[0]))
        return [] if is_replaced else [(name, getattr(place, name)) for name in names]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


if NUM_GPUS == 0 and find_spec("triton"):
    from triton.runtime import interpreter

    remember_builtins(interpreter)
