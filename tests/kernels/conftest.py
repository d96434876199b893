"""Makes Triton's interpreter faster, which runs the kernels where there is no GPU."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

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


def remember_dtypes(interpreter: Any) -> None:
    """Let the interpreter know NumPy's types by Triton's, without a new table at each operation."""
    find, known = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def get_np_dtype(dtype: Any) -> Any:
        element = dtype.scalar
        return find(element) if element.is_ptr() else known(element)

    interpreter._get_np_dtype = get_np_dtype


def check_overflows(interpreter: Any, are_checked: bool) -> None:
    """Whether the interpreter checks each sum and product of integers, which takes a third of its time."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=are_checked)


if NUM_GPUS == 0 and find_spec("triton"):
    from triton.runtime import interpreter

    remember_builtins(interpreter)
    remember_dtypes(interpreter)
    check_overflows(interpreter, False)


@pytest.fixture
def overflows_are_checked() -> Iterator[None]:
    """For tests with addresses so large that integers of 32 bits may overflow."""
    from triton.runtime import interpreter

    check_overflows(interpreter, True)
    yield
    check_overflows(interpreter, False)
