"""Products on a CPU, by weights that are packed as its libraries read them.

oneDNN multiplies by blocks of a weight, and PyTorch's F.linear has it cut the weight into these anew for each product.
Packed once, the same product of few rows takes half the time. Weights in 4 bits: `int4/cpu_int4.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from nanoinfer.ops.common.fp8_format import Activations
from nanoinfer.quantization.linear_method import LinearMethod

P = TypeVar("P")

MIN_PACKED_VALUES = 2**18  # of a weight: for smaller ones, calling oneDNN takes longer than packing them
MANY_INPUTS = 2048  # of a weight in float32: packed for any number of rows, it is read slowly for one


class Prepacked(ABC, Generic[P]):
    """Holds a layer's weight in another form, from the first product on until one of its tensors changes.

    plain: the weight as a checkpoint fills it, which gives its memory back meanwhile. keeps_plain: whether it does not,
    because others read it. others: what else the other form depends on. `ModelWeights` restores the plain weight before
    it changes any of these.
    """

    def __init__(self, plain: Tensor, *others: Tensor, keeps_plain: bool = False) -> None:
        self._plain, self._keeps_plain = plain, keeps_plain
        self._prepacked: P | None = None
        for tensor in (plain, *others):
            tensor.prepacked = self  # type: ignore[attr-defined]

    @abstractmethod
    def _pack(self, plain: Tensor) -> P: ...

    @abstractmethod
    def _values(self, packed: P) -> Tensor:
        """Return the plain weight of a packed one."""

    def prepacked(self) -> P:
        """Return the weight in its other form."""
        if self._prepacked is None:
            self._prepacked = self._pack(self._plain)
            if not self._keeps_plain:
                self._plain.untyped_storage().resize_(0)
        return self._prepacked

    def restore_plain(self) -> None:
        """Have the values in the plain weight again."""
        if self._prepacked is not None and not self._keeps_plain:
            self._plain.untyped_storage().resize_(self._plain.numel() * self._plain.itemsize)
            self._plain.copy_(self._values(self._prepacked))
        self._prepacked = None  # last, so that no value is lost where memory is short


class OnednnWeight(Prepacked[Tensor]):
    """Holds a weight of 32 or 16 bits as oneDNN packs it."""

    def _pack(self, plain: Tensor) -> Tensor:
        for_one_row = plain.dtype == torch.float32 and plain.shape[1] >= MANY_INPUTS
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(plain.detach(), 1 if for_one_row else None))

    def _values(self, packed: Tensor) -> Tensor:
        return packed.to_dense()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b, (num_rows, num_outputs)."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise.default(x, self.prepacked(), bias, "none", [], ""))


class PrepackedLinearMethod(LinearMethod):
    """Multiplies by a packed weight in the dtype of the model."""

    def __init__(self, layer: Any) -> None:
        self._weight = OnednnWeight(layer.weight)

    def wide_weight(self, layer: Any) -> Tensor:
        self._weight.restore_plain()
        return super().wide_weight(layer)

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        return self._weight.product(cast(Tensor, x), bias)


def prepack_products(model: nn.Module, head: nn.Module) -> None:
    """Have a model multiply by packed weights, where these pay. head: its last product, whose weight is kept plain too.

    The embedding may be the same weight, and rows of it may be wanted alone.
    """
    for layer in cast(Iterable[Any], model.modules()):
        if type(getattr(layer, "quant_method", None)) is LinearMethod and _pays(layer.weight):
            layer.quant_method = PrepackedLinearMethod(layer)
    if _pays(head.weight):
        head.forward = partial(_head_product, OnednnWeight(cast(Tensor, head.weight), keeps_plain=True))


def _head_product(packed: OnednnWeight, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    logits = packed.product(hidden)
    return logits if out is None else out.copy_(logits)


def has_fast_kernels() -> bool:
    """Return whether PyTorch and oneDNN have kernels for this CPU. Others run plain loops, which are far slower."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _pays(weight: Any) -> bool:
    """Return whether products of a weight are faster if it is packed: of a large matrix on a CPU."""
    if not weight.is_cpu or not has_fast_kernels() or weight.dim() != 2 or weight.numel() < MIN_PACKED_VALUES:
        return False
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bfloat16)
