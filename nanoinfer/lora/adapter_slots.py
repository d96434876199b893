"""What adapters add to the products of layers: x A^T B^T, of each token by the adapter of its row.

A rank keeps all adapters that it was given on the host. Of these, as many as there are slots lie on the device at a
time. A step gives its tokens the slots of their rows, and each linear layer adds its product in its `quant_method`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.device import to_device
from nanoinfer.engine.packet import AllSections, column
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.layers.attention.metadata import PrefillMetadata, ragged_indices
from nanoinfer.layers.linear import ColumnParallelLinear, wide_rows
from nanoinfer.lora.adapter_weights import (
    AdapterMatrices,
    LayerMatrices,
    adaptable_layers,
    read_adapter,
    shards_of,
)
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.sampling.row_state import RowState

NO_SLOT = -1  # of a token whose row has no adapter


class LayerSlots:
    """Holds one layer's matrices of the adapters in all slots; those of an adapter that leaves the layer be are 0.

    a: (num_slots, num_shards, max_rank, inputs). b: of each shard (outputs, num_slots, max_rank). ranges: the outputs
    of each shard among those of the layer.
    """

    def __init__(self, layer: Any, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self._shards, device, num_inputs = shards_of(layer), layer.weight.device, layer.full_shape[1]
        is_column = isinstance(layer, ColumnParallelLinear)
        sizes = [*layer.local_sizes.values()] if is_column else [layer.full_shape[0]]
        inputs = num_inputs if is_column else layer.tp.shard_size(num_inputs, "row-parallel input size")
        self.a = torch.zeros(num_slots, len(sizes), max_rank, inputs, dtype=dtype, device=device)
        self.b = [torch.zeros(size, num_slots, max_rank, dtype=dtype, device=device) for size in sizes]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self.ranges = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def fill(self, slot: int, matrices: LayerMatrices) -> None:
        """Put an adapter's matrices into a slot; without any, it adds nothing."""
        self.a[slot].zero_()
        for index, (shard, b) in enumerate(zip(self._shards, self.b, strict=True)):
            b[:, slot].zero_()
            if shard in matrices:
                given = matrices[shard]
                self.a[slot, index, : len(given.a)].copy_(given.a, non_blocking=True)
                b[:, slot, : len(given.a)].copy_(given.b, non_blocking=True)

    def add_to(self, out: Tensor, x: Tensor, is_of_slot: Tensor) -> None:
        """Add x A^T B^T to the outputs, (num_tokens, outputs), in place.

        Both products are those of all slots. Between them, what is not of a token's own slot becomes 0. is_of_slot:
        (num_tokens, num_slots, 1) bool.
        """
        num_slots, num_shards, max_rank, _ = self.a.shape
        inner = F.linear(x, self.a.flatten(0, 2)).view(len(x), num_slots, num_shards, max_rank)
        for index, ((start, end), b) in enumerate(zip(self.ranges, self.b, strict=True)):
            # No product with 0: an adapter with an infinity must not reach the others' tokens.
            own = inner[:, :, index].where(is_of_slot, 0).flatten(1)
            out[:, start:end] += own @ b.flatten(1).t()


class AdaptedProduct:
    """Takes the place of a layer's `quant_method`, and adds the adapters' product to its own.

    input_format: that of the layer, which keeps the inputs in the model's dtype too.
    """

    def __init__(self, base: Any) -> None:
        self._base, self.slots = base, cast("LayerSlots | None", None)
        self.is_of_slot: Tensor | None = None  # of the step's tokens; None while none of them has an adapter
        wanted: RowFormat | None = base.input_format
        self.input_format = None if wanted is None else replace(wanted, keeps_wide=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        out = self._base.apply(layer, x, bias)
        if self.is_of_slot is not None and self.slots is not None:
            self.slots.add_to(out, wide_rows(x), self.is_of_slot)
        return out

    def apply_split(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        sums = self._base.apply_split(layer, x, bias)
        if self.is_of_slot is not None and self.slots is not None:
            self.slots.add_to(sums[0], wide_rows(x), self.is_of_slot)
        return sums


class RankAdapters:
    """Keeps the adapters of one rank on the host, by number, and the products that may add them.

    model: with its weights. num_slots: adapters on the device at a time. max_rank: the highest of any of them.
    """

    def __init__(self, model: Any, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self._model, self.num_slots, self.max_rank, self.dtype = model, num_slots, max_rank, dtype
        self.by_number: dict[int, AdapterMatrices] = {}
        self.layers = adaptable_layers(model)
        for layer in self.layers.values():
            layer.quant_method = AdaptedProduct(layer.quant_method)  # type: ignore[assignment]

    @property
    def products(self) -> dict[str, AdaptedProduct]:
        """The products by the paths of their layers."""
        return {path: cast(AdaptedProduct, layer.quant_method) for path, layer in self.layers.items()}

    def read(self, folder: Path) -> AdapterMatrices:
        """Return what this rank needs of an adapter of peft. Raises ModelError for one that cannot be served."""
        given = read_adapter(folder, self._model, self.max_rank)
        return {path: {shard: one.to(self.dtype) for shard, one in its.items()} for path, its in given.items()}

    def keep(self, number: int, matrices: AdapterMatrices) -> None:
        """Keep an adapter under a number that no other has had. matrices: of `read`."""
        self.by_number[number] = matrices

    def drop(self, number: int) -> None:
        """Forget an adapter that no request uses any more."""
        self.by_number.pop(number, None)

    def free_slots(self) -> None:
        """Free the memory of the slots."""
        for product in self.products.values():
            product.slots = product.is_of_slot = None


class AdapterSlots(RowState):
    """Holds the adapters that lie on the device, and which of them each row has.

    num_rows: of the step tables, without the spare one.
    """

    reads: ClassVar[tuple[str, ...]] = ("adapter",)

    def __init__(self, adapters: RankAdapters, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self._adapters = adapters
        self._held: list[int | None] = [None] * adapters.num_slots  # numbers of adapters
        self._slot_ids = torch.arange(adapters.num_slots, device=device)
        self._slots_of_rows = torch.full((num_rows + 1,), NO_SLOT, device=device)  # and of the spare row
        self._products = [*adapters.products.values()]
        for path, product in adapters.products.items():
            product.slots = LayerSlots(adapters.layers[path], adapters.num_slots, adapters.max_rank, adapters.dtype)

    def admit(self, rows: Any) -> list[AdmittedRow]:
        asking = super().admit(rows)
        self._upload(row.row for row in asking)
        return asking

    def remember(self, row: AdmittedRow) -> None:
        slot, number = map(int, row.options["adapter"])
        self.by_row[row.row] = slot
        if self._held[slot] != number:
            matrices: Mapping[str, LayerMatrices] = self._adapters.by_number[number]
            for path, product in self._adapters.products.items():
                assert product.slots is not None, "slots are made with what runs the steps"
                product.slots.fill(slot, matrices.get(path, {}))
            self._held[slot] = number

    def release(self, rows: Any) -> None:
        released = [row for row in rows if row in self.by_row]
        super().release(rows)
        self._upload(released)

    def _upload(self, rows: Iterable[int]) -> None:
        """Tell the device which slots these rows have."""
        changed = [(row, self.by_row.get(row, NO_SLOT)) for row in rows]
        if changed:
            pairs = to_device(torch.tensor(changed, device="cpu"), self._slots_of_rows.device)
            self._slots_of_rows[pairs[:, 0]] = pairs[:, 1]

    def begin_step(self, on_host: AllSections) -> bool:
        """Return whether a row of a packet's step has an adapter; if none has, the layers add nothing."""
        self._set(None)
        if not self.by_row:
            return False
        section = "chunks" if len(on_host.chunks) else "decode_rows"
        return not self.by_row.keys().isdisjoint(column(on_host, section, "row").tolist())

    def of_tokens(self, step: ForwardStep) -> Tensor:
        """Return the slot of each token of a step, (num_tokens,), and have the layers add the adapters' products."""
        slots, num_tokens = self._slots_of_rows[step.rows.long()], len(step.token_ids)
        if isinstance(step.attention, PrefillMetadata):
            segments, _ = ragged_indices(step.attention.cu_query_lens, num_tokens)
            slots = slots[segments]
        elif num_tokens != len(slots):
            slots = slots.repeat_interleave(num_tokens // len(slots))
        self._set((slots.unsqueeze(1) == self._slot_ids).unsqueeze(2))
        return slots

    def _set(self, is_of_slot: Tensor | None) -> None:
        if self._products and self._products[0].is_of_slot is not is_of_slot:
            for product in self._products:
                product.is_of_slot = is_of_slot
