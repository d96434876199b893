"""Triton kernels, one file each. Their twins in PyTorch are in layers, sampling, quantization and runner.

The twins work without Triton, so nothing is imported with the package: the module of a kernel is imported when it is
first asked for. Type checkers and the rules of imports read here which ones there are.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoinfer.kernels import copy_tokens as copy_tokens
    from nanoinfer.kernels import few_rows_product as few_rows_product
    from nanoinfer.kernels import filter_threshold as filter_threshold
    from nanoinfer.kernels import gated_activation as gated_activation
    from nanoinfer.kernels import gumbel_max as gumbel_max
    from nanoinfer.kernels import logit_statistics as logit_statistics
    from nanoinfer.kernels import read_rows as read_rows
    from nanoinfer.kernels import shared_expert_gate as shared_expert_gate
    from nanoinfer.kernels import soft_cap as soft_cap
    from nanoinfer.kernels import token_bitmask as token_bitmask
else:

    def __getattr__(name: str) -> ModuleType:
        if find_spec(f"nanoinfer.kernels.{name}") is None:
            raise AttributeError(f"module 'nanoinfer.kernels' has no attribute {name!r}")
        return import_module(f"nanoinfer.kernels.{name}")
