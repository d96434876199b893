"""Weights of several modules that lie behind one another in memory, so that one kernel can read them as one weight."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, by name."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def lay_together(*tensors: Tensor) -> Tensor:
    """Give tensors new memory, behind one another, and return all of it as one tensor along its first dimension.

    A tensor with one dimension fewer than the first is one entry of the result. Values are lost: weights are loaded
    afterwards.
    """
    shapes = [tensor.shape for tensor in tensors]
    counts = [shape[0] if len(shape) == len(shapes[0]) else 1 for shape in shapes]
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)  # freed first: there may be no memory for all of a layer twice
    if tensors[0].is_cuda:
        torch.cuda.empty_cache()  # or smaller tensors get parts of what was freed, and the rest is lost
    joined = tensors[0].new_empty(sum(counts), *shapes[0][1:])
    for tensor, part, shape in zip(tensors, joined.split(counts), shapes, strict=True):
        tensor.data = part.view(shape)
    return joined


def with_tensors(module: Module, tensors: dict[str, Tensor]) -> Module:
    """Return a copy of a module that has these tensors in place of its own. They are no parameters of the copy.

    It must not become an attribute of a module, where it would be found as a part of the model.
    """
    changed = copy.copy(module)
    changed._parameters = dict.fromkeys(module._parameters.keys() - tensors.keys())
    changed._buffers = dict.fromkeys(module._buffers.keys() - tensors.keys()) | tensors
    return changed
