"""What the tests of kernels in Triton's interpreter share."""

from importlib import metadata
from typing import Any

import pytest

triton = pytest.importorskip("triton")


def version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])


# Its range over a loaded number makes a scalar of an array of one element, which NumPy has stopped to do.
loops_are_interpreted = pytest.mark.skipif(
    version("triton") < (3, 7) and version("numpy") >= (2, 4),
    reason="the interpreter of this Triton does not run loops with this NumPy",
)


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to e4m3 and back as a GPU does. Its own way loses carries, and NaN."""
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    theirs = interpreter._convert_float

    def convert(data: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (from_dtype, to_dtype):
            return theirs(data, from_dtype, to_dtype, rounding_mode)
        if to_dtype == tl.float8e4nv:
            wide = torch.from_numpy(np.ascontiguousarray(data))
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(torch.float8_e4m3fn)
        return rounded.to(getattr(torch, {"fp16": "float16", "fp32": "float32"}[to_dtype.name])).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def exact_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16 as a GPU does, and multiply bfloat16 matrices. It takes their bits."""
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    theirs, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if (from_dtype, to_dtype) != (tl.float32, tl.bfloat16):
            return theirs(data, from_dtype, to_dtype, rounding_mode)
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        return dot(self, a, b, *others)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
