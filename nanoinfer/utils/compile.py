"""torch.compile for small operators: on CUDA they are fused into one kernel each, on a CPU they run as written."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def compiled_on_cuda(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` for CUDA tensors at its first such call; `__wrapped__` is the plain version.

    The first argument decides: it must be a tensor. Shapes are dynamic, so that one compilation serves every batch.
    """

    @cache
    def compiled() -> Callable[P, R]:  # later than the import: loading the compiler takes seconds
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor), f"{function.__name__} takes a tensor first, not a {type(first).__name__}"
        return (compiled() if first.is_cuda else function)(*args, **kwargs)

    return dispatch
