"""Tensors that stay on the host while a model of transformers computes on a GPU.

Models read the sizes of images as numbers, and loop over them. On the GPU each of these reads would wait for all that
was launched before. On the host they wait for nothing, but what is computed of them has to meet the GPU's tensors.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanoinfer.device import to_device

HOST, DEVICE, BOTH = 1, 2, 3


class HostTensorsFollow(TorchFunctionMode):
    """Copies a tensor of the host to the device where it meets tensors there, or is to be moved; nobody waits for it.

    What is on the device stays there, unless it is read as numbers. Tensors without dimensions are left on the host, as
    PyTorch takes them everywhere, and so are those that are written to.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            if len(args) == 1 and isinstance(args[0], Tensor):
                return function(*args)  # all attributes come here, too
            kwargs = {}
        if function is Tensor.to:
            args, kwargs = self._moved(args, kwargs)
        elif function is torch.as_tensor and {*kwargs} == {"device"} and isinstance(args[0], Tensor):
            return args[0]
        elif function is not Tensor.__setitem__ and _sides((*args, *kwargs.values())) == BOTH:
            args = tuple(map(self._follow, args))
            kwargs = {name: self._follow(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `Tensor.to` for a tensor that may be moved to the device, and never to the host."""
        tensor, *places = args
        if not tensor.is_cpu:
            places = [self._device if _is_host(place) else place for place in places]
            kwargs = {name: self._device if _is_host(place) else place for name, place in kwargs.items()}
        elif any(map(self._is_there, (*places, *kwargs.values()))):
            tensor = self._copied(tensor)
        return (tensor, *places), kwargs

    def _is_there(self, place: Any) -> bool:
        """Return whether something names the device: itself, or as text, or as the place of a tensor."""
        if isinstance(place, Tensor):
            return place.device == self._device
        return isinstance(place, (torch.device, str)) and torch.device(place).type == self._device.type

    def _copied(self, tensor: Tensor) -> Tensor:
        return to_device(tensor.contiguous(), self._device)  # what is expanded cannot be pinned

    def _follow(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copied(value) if _is_on_host(value) else value
        return type(value)(map(self._follow, value)) if type(value) in (list, tuple) else value


def _is_host(place: Any) -> bool:
    return isinstance(place, (torch.device, str)) and torch.device(place).type == "cpu"


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dim() > 0


def _sides(values: Iterable[Any]) -> int:
    """Return where the tensors among values, or in lists of them, are: HOST, DEVICE, BOTH, or 0 for none."""
    sides = 0
    for value in values:  # as plain as can be: it is called for every operation
        if isinstance(value, Tensor):
            sides |= DEVICE if not value.is_cpu else HOST if value.dim() else 0
        elif type(value) in (list, tuple):
            sides |= _sides(value)
    return sides
