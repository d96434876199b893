"""What the tests of kernels in Triton's interpreter share."""

from importlib import metadata

import pytest

triton = pytest.importorskip("triton")


def version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])


# Its range over a loaded number makes a scalar of an array of one element, which NumPy has stopped to do.
loops_are_interpreted = pytest.mark.skipif(
    version("triton") < (3, 7) and version("numpy") >= (2, 4),
    reason="the interpreter of this Triton does not run loops with this NumPy",
)
