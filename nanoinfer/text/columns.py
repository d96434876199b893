"""Arrays and columns of tables as lists, whichever library they come from."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

CONVERSIONS = ("tolist", "to_pylist", "to_list")  # NumPy, pandas and PyTorch; Arrow; Polars
NO_COLUMNS = (str, list, tuple, Mapping, bytes, bytearray, memoryview, type)


class Array(Protocol):
    """Arrays of NumPy, tensors of PyTorch, columns of pandas and Arrow."""

    def tolist(self) -> Any: ...


class Series(Protocol):
    """Columns of Polars."""

    def to_list(self) -> Any: ...


def as_list(value: Any) -> Any:
    """Return an array, a column or another sequence as a list; a text, a list, a mapping and all else as they are."""
    if isinstance(value, NO_COLUMNS):
        return value
    for name in CONVERSIONS:
        if callable(convert := getattr(value, name, None)):
            return convert()
    return list(value) if isinstance(value, Sequence) else value  # columns of `datasets`, say
