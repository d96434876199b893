"""Holds the matrices of adapters in memory on the device, and copies adapters there while steps run.

The scheduler gives an adapter a slot. A step may still read the adapter that had the slot before, so the new one is
copied to other memory. Therefore the device has one slot more than the scheduler gives out. With two slots:

| what happens | slot 0 is device slot | slot 1 is device slot | spare device slot |
|---|---|---|---|
| no adapter came yet | 0 | 1 | 2 |
| slot 0 gets adapter A, which is copied to device slot 2 | 2 | 1 | 0 |
| slot 0 gets adapter B, which is copied to device slot 0 | 0 | 1 | 2 |

A remains in device slot 2 for steps that may still read it. The next copy there waits until these have run.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanoinfer.device import cpu_threads, record_event, zeros
from nanoinfer.integers import ceil_div
from nanoinfer.layers.linear import ColumnParallelLinear
from nanoinfer.lora.adapter_weights import AdapterMatrices, shards_of
from nanoinfer.ops.lora.spec import LoRAMatrices

ALIGNMENT = 64  # numbers: the matrices of each layer begin at a multiple of it


class SlotLayout:
    """Says where the matrices of each layer lie in a device slot, which is one piece of memory.

    layers: those that adapters can change, by path. num_values: how many numbers a device slot holds.
    """

    def __init__(self, layers: Mapping[str, Any], max_rank: int) -> None:
        self._shards = {path: shards_of(layer) for path, layer in layers.items()}
        # By path: the offsets and shapes of A and of B in a device slot, and the outputs of each shard.
        self._offsets: dict[str, tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, ...]]] = {}
        self.num_values = 0
        for path, layer in layers.items():
            (num_outputs, num_inputs), sizes = layer.full_shape, list[int]()
            if isinstance(layer, ColumnParallelLinear):
                sizes += layer.local_sizes.values()
            else:
                sizes.append(num_outputs)
                num_inputs = layer.tp.shard_size(num_inputs, "row-parallel input size")
            a = self._take(len(sizes) * max_rank, num_inputs)
            self._offsets[path] = a, self._take(sum(sizes), max_rank), tuple(sizes)

    def _take(self, num_lines: int, width: int) -> tuple[int, int, int]:
        offset = self.num_values
        self.num_values += ceil_div(num_lines * width, ALIGNMENT) * ALIGNMENT
        return offset, num_lines, width

    def matrices(self, slots: Tensor) -> dict[str, LoRAMatrices]:
        """Return the matrices of each layer by its path. slots: (num_device_slots, num_values)."""

        def view(offset: int, num_lines: int, width: int) -> Tensor:
            return slots[:, offset : offset + num_lines * width].unflatten(1, (num_lines, width))

        return {path: LoRAMatrices(view(*a), view(*b), sizes) for path, (a, b, sizes) in self._offsets.items()}

    def write(self, adapter: AdapterMatrices, matrices: Mapping[str, LoRAMatrices], slot: int) -> None:
        """Write an adapter to a device slot of these matrices. Where it has none, write zeros, which add nothing."""
        for path, (a, b, sizes) in matrices.items():
            of_layer = adapter.get(path, {})
            parts = zip(self._shards[path], a[slot].chunk(len(sizes)), b[slot].split(sizes), strict=True)
            for shard, its_a, its_b in parts:
                rank = 0
                if shard in of_layer:
                    given = of_layer[shard]
                    rank = len(given.a)
                    its_a[:rank].copy_(given.a)
                    its_b[:, :rank].copy_(given.b)
                its_a[rank:].zero_()
                its_b[:, rank:].zero_()


class SlotMemory:
    """Holds the adapters that lie on the device, each in a device slot, and which slot has which device slot.

    The spare device slot belongs to no slot: a new adapter is copied there, while steps may still read the one that it
    replaces. On a GPU it goes through pinned memory, by one copy on a stream of its own.
    """

    def __init__(self, layout: SlotLayout, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._values = zeros((num_slots + 1, layout.num_values), dtype, device)
        self.matrices = layout.matrices(self._values)  # by the path of a layer
        self._device_slots = [*range(num_slots)]  # by slot
        self._spare = num_slots
        self._spare_left = record_event(device)  # after all that wrote or read the spare device slot; None on a CPU
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._staged = torch.empty(1, layout.num_values, dtype=dtype, device="cpu", pin_memory=True)
            self._staged_matrices = layout.matrices(self._staged)
            self._stream = torch.cuda.Stream(device)

    @property
    def num_device_slots(self) -> int:
        return len(self._values)

    def device_slot(self, slot: int) -> int:
        """Return where the adapter of a slot lies: an index of the matrices."""
        return self._device_slots[slot]

    def fill(self, slot: int, adapter: AdapterMatrices) -> None:
        """Put an adapter into a slot, for the steps from now on. Does not wait for steps that run."""
        device_slot = self._spare
        with cpu_threads(1):  # as in `RankAdapters.read`
            if self._device.type == "cpu":
                self._layout.write(adapter, self.matrices, device_slot)
            else:
                self._upload(adapter, device_slot)
        self._spare, self._device_slots[slot] = self._device_slots[slot], device_slot
        self._spare_left = record_event(self._device)

    def _upload(self, adapter: AdapterMatrices, device_slot: int) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # until the last copy has read the pinned memory
        self._layout.write(adapter, self._staged_matrices, 0)
        with torch.cuda.stream(self._stream):
            if self._spare_left is not None:
                self._stream.wait_event(self._spare_left)
            self._values[device_slot].copy_(self._staged[0], non_blocking=True)
            self._copied = record_event(self._device)
        assert self._copied is not None, "a GPU has events"
        torch.cuda.current_stream(self._device).wait_event(self._copied)
