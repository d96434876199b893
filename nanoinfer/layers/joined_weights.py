"""Weights that lie behind one another in memory, so that one kernel reads them as one; each stays where it was, too."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, by name."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def lay_together(*tensors: Tensor) -> Tensor:
    """Move tensors behind one another in new memory, and return all of them as one, along its first dimension.

    One with a dimension less than the first is one line of the result.
    """
    lines = [tensor if tensor.dim() == tensors[0].dim() else tensor.unsqueeze(0) for tensor in tensors]
    joined = torch.cat(lines)
    for tensor, part in zip(tensors, joined.split([len(each) for each in lines]), strict=True):
        tensor.data = part.view(tensor.shape)
    return joined


def with_tensors(module: Module, tensors: dict[str, Tensor]) -> Module:
    """Return a copy of a module that has these tensors in the place of its own. None is a parameter.

    It must not become an attribute of a module, where it would be found as a part of the model.
    """
    changed = copy.copy(module)
    changed._parameters = dict.fromkeys(module._parameters.keys() - tensors.keys())
    changed._buffers = dict.fromkeys(module._buffers.keys() - tensors.keys()) | tensors
    return changed
