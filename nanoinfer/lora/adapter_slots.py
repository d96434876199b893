"""Adds adapters to the products of layers: x A^T B^T for each token x, with A and B of the adapter of its row.

A rank keeps all adapters on the host. As many of them as there are slots also lie on the device. A step tells layers
the device slot of each token, and the `quant_method` of each linear layer adds the adapter's product to its own.

A packet names slots as the scheduler counts them. Where a slot's matrices lie on the device is its device slot, which
changes whenever the slot gets another adapter (`slot_memory.py`).
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nanoinfer.device import compiling, cpu_threads, numbers_to_device
from nanoinfer.engine.packet import AllSections, column
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.layers.attention.metadata import PrefillMetadata, ragged_indices
from nanoinfer.layers.linear import ShardedLinear, wide_rows
from nanoinfer.lora.adapted_prefill import AdaptedPrefillGraphs
from nanoinfer.lora.adapter_weights import AdapterMatrices, adaptable_layers, read_adapter
from nanoinfer.lora.slot_memory import SlotLayout, SlotMemory
from nanoinfer.models.decoder import DecoderMLP
from nanoinfer.models.execution import PrefillGraphs, is_plain_product
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.prefill_graphs import DecoderPrefillGraphs
from nanoinfer.ops.activations.spec import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve
from nanoinfer.ops.lora.spec import LoRAMatrices, LoRARows, add_lora, gated_with_lora
from nanoinfer.sampling.row_state import RowState

GATED = (silu_and_mul, gelu_tanh_and_mul, gelu_and_mul)


class StepAdapters:
    """Tells all layers of a rank which adapter each token of the step has. rows: None if no token has any."""

    rows: LoRARows | None = None


class AdaptedProduct:
    """Takes the place of a layer's `quant_method`, and adds the adapters' product to its own.

    matrices: those in the device slots; None while these have no memory. adds_later: whether an `AdaptedActivation`
    adds the adapters' product instead; for it, this product keeps its `inputs`. shrunk: the next inputs times A, if an
    `AdaptedActivation` has computed them already.
    """

    def __init__(self, base: Any, step: StepAdapters) -> None:
        self._base, self._step = base, step
        self.matrices: LoRAMatrices | None = None
        self.adds_later, self.inputs = False, cast(Tensor | None, None)
        self.shrunk: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    @property
    def input_format(self) -> RowFormat | None:
        """The layer's own format. In a step with adapters it keeps the inputs in the model's dtype, too."""
        wanted: RowFormat | None = self._base.input_format
        return wanted if wanted is None or self._step.rows is None else replace(wanted, keeps_wide=True)

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        out = self._base.apply(layer, x, bias)
        self._add_to(out, x)
        return out

    def apply_split(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        sums = self._base.apply_split(layer, x, bias)
        self._add_to(sums[0], x)
        return sums

    def _add_to(self, out: Tensor, x: Activations) -> None:
        if self._step.rows is None or self.matrices is None:
            return
        if self.adds_later:
            self.inputs = wide_rows(x)
        else:
            shrunk, self.shrunk = self.shrunk, None
            add_lora(out, wide_rows(x), self._step.rows, self.matrices, shrunk)


class AdaptedActivation:
    """Takes the place of an MLP's activation, and adds the adapters' product to gate and up as it reads them.

    gate_up: the product before the activation, which leaves its adapters to it. down: the product after the activation,
    which multiplies its results by down's A while they are in registers.
    """

    def __init__(
        self, base: Callable[..., Activations], gate_up: AdaptedProduct, down: AdaptedProduct, step: StepAdapters
    ) -> None:
        self._base, self._gate_up, self._down, self._step = base, gate_up, down, step
        gate_up.adds_later = True

    def __call__(self, gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
        rows, x, matrices = self._step.rows, self._gate_up.inputs, self._gate_up.matrices
        self._gate_up.inputs = self._down.shrunk = None
        if rows is None or x is None or matrices is None:
            return self._base(gate_up, out_format)
        if out_format is None:
            next_a = None if self._down.matrices is None else self._down.matrices.a
            out, self._down.shrunk = gated_with_lora(gate_up, x, rows, matrices, self._base, next_a)
            return out
        add_lora(gate_up, x, rows, matrices)
        return self._base(gate_up, out_format)

    def run_alone(self, num_tokens: int) -> None:
        """Launch the layer's kernels for `num_tokens` tokens of zeros, without adapters, so that they are compiled."""
        matrices, down = self._gate_up.matrices, self._down.matrices
        assert matrices is not None, "adapters have memory on the device before their kernels are compiled"
        assert down is not None, "all layers get that at once"
        if self._down.input_format is not None:  # activations are rounded by a kernel of their own
            _add_to_zeros(matrices, num_tokens)
            return
        x, gate_up, rows = _zeros_for(matrices, num_tokens)
        out, shrunk = gated_with_lora(gate_up, x, rows, matrices, self._base, down.a)
        add_lora(_zeros_for(down, num_tokens)[1], out, rows, down, shrunk)


def _multiply_zeros(layer: ShardedLinear, num_tokens: int) -> None:
    """Launch a layer's own product for few rows. In steps without adapters, other kernels compute that product."""
    if is_plain_product(layer) and few_rows_kernels_serve(num_tokens, layer.weight):
        layer.quant_method.apply(layer, layer.weight.new_zeros(num_tokens, layer.weight.shape[1]), layer.bias)


def _add_to_zeros(matrices: LoRAMatrices, num_tokens: int) -> None:
    x, out, rows = _zeros_for(matrices, num_tokens)
    add_lora(out, x, rows, matrices)


def _zeros_for(matrices: LoRAMatrices, num_tokens: int) -> tuple[Tensor, Tensor, LoRARows]:
    """Return inputs, outputs and device slots of tokens without adapters; all tokens share one row of zeros."""
    a, b, _ = matrices
    slots = torch.full((num_tokens,), len(a), dtype=torch.int32, device=a.device)
    x, out = a.new_zeros(1, a.shape[2]), a.new_zeros(1, b.shape[1])
    return x.expand(num_tokens, -1), out.expand(num_tokens, -1), LoRARows(slots)


class RankAdapters:
    """Keeps the adapters of one rank on the host, by number, and the products that may add them.

    model: with its weights. num_slots: adapters on the device at a time. max_rank: the highest rank of an adapter.
    """

    def __init__(self, model: Any, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        self._model, self.num_slots, self.max_rank, self.dtype = model, num_slots, max_rank, dtype
        self.by_number: dict[int, AdapterMatrices] = {}
        self._reading: tuple[Path, Future[AdapterMatrices]] | None = None
        self.step, self.layers = StepAdapters(), adaptable_layers(model)
        for layer in self.layers.values():
            layer.quant_method = AdaptedProduct(layer.quant_method, self.step)  # type: ignore[assignment]
        for mlp in model.model.modules():
            if isinstance(mlp, DecoderMLP) and mlp.activation in GATED:
                gate_up, down = mlp.gate_up_proj.quant_method, mlp.down_proj.quant_method
                mlp.activation = AdaptedActivation(
                    mlp.activation, cast(AdaptedProduct, gate_up), cast(AdaptedProduct, down), self.step
                )

    @property
    def products(self) -> dict[str, AdaptedProduct]:
        """The products by the paths of their layers."""
        return {path: cast(AdaptedProduct, layer.quant_method) for path, layer in self.layers.items()}

    def begin_reading(self, folder: Path) -> None:
        """Begin to read an adapter in a thread; `read` waits for that. Of several folders the last one counts."""
        future = Future[AdapterMatrices]()
        self._reading = folder, future

        def read() -> None:
            try:
                future.set_result(self._read(folder))
            except BaseException as error:  # `read` raises it
                future.set_exception(error)

        threading.Thread(target=read, name="nanoinfer adapter", daemon=True).start()

    def read(self, folder: Path) -> AdapterMatrices:
        """Return what this rank needs of an adapter of peft. Raises ModelError for one that cannot be served."""
        reading, self._reading = self._reading, None
        if reading is not None and reading[0] == folder:
            return reading[1].result()
        return self._read(folder)

    def _read(self, folder: Path) -> AdapterMatrices:
        with cpu_threads(1):  # matrices are small, so waking other threads for each would take longer
            return read_adapter(folder, self._model, self.max_rank, self.dtype)

    def keep(self, number: int, matrices: AdapterMatrices) -> None:
        """Keep an adapter under a number that no other has had. matrices: of `read`."""
        self.by_number[number] = matrices

    def drop(self, number: int) -> None:
        """Forget an adapter that no request uses any more."""
        self.by_number.pop(number, None)

    def allocate_slots(self, device: torch.device) -> SlotMemory:
        """Take memory for the slots, and have the products read it."""
        slots = SlotMemory(SlotLayout(self.layers, self.max_rank), self.num_slots, self.dtype, device)
        for path, product in self.products.items():
            product.matrices = slots.matrices[path]
        return slots

    def compile_ahead(self, max_tokens: int, device: torch.device) -> None:
        """Compile in threads the kernels of steps of fewer than `max_tokens` tokens, so that no step waits for that.

        Steps of powers of two tokens launch all kernels that there are. Triton's cache on disk keeps them.
        """
        alone: dict[Any, Callable[[int], None]] = {}  # what is launched for one layer of each shape
        for layer in self.layers.values():
            product = cast(AdaptedProduct, layer.quant_method)
            matrices = product.matrices
            assert matrices is not None, "adapters have memory on the device before their kernels are compiled"
            if not product.adds_later:
                alone.setdefault((matrices.a.shape, matrices.sizes), partial(_add_to_zeros, matrices))
            alone.setdefault((layer.weight.shape, layer.bias is None), partial(_multiply_zeros, layer))
        for mlp in self._model.model.modules():
            if isinstance(mlp, DecoderMLP) and isinstance(mlp.activation, AdaptedActivation):
                alone.setdefault(("gated", mlp.gate_up_proj.full_shape), mlp.activation.run_alone)
        sizes = [2**power for power in range((max_tokens - 1).bit_length())]
        with compiling([partial(launch, size) for launch in alone.values() for size in sizes], device):
            pass

    def free_slots(self) -> None:
        """Free the memory of the slots."""
        for product in self.products.values():
            product.matrices = None


class AdapterSlots(RowState):
    """Holds the adapters that lie on the device, and which of them each row has.

    by_row: the device slot of each row that has an adapter. num_rows: rows of the step tables, without the spare one.
    are_used: whether a row of the step has an adapter; else the step runs as without adapters. prefill_graphs: as an
    argument, the graphs of steps without adapters; as a field, those of steps with adapters.
    """

    reads: ClassVar[tuple[str, ...]] = ("adapter",)

    def __init__(
        self, adapters: RankAdapters, num_rows: int, device: torch.device, prefill_graphs: PrefillGraphs
    ) -> None:
        super().__init__()
        self._adapters, self._slots = adapters, adapters.allocate_slots(device)
        self._no_slot = self._slots.num_device_slots
        self.are_used, self.prefill_graphs = False, PrefillGraphs()
        if isinstance(prefill_graphs.small, DecoderPrefillGraphs):
            self.prefill_graphs = PrefillGraphs(AdaptedPrefillGraphs(prefill_graphs.small, self._no_slot, device))
        self._held: list[int | None] = [None] * adapters.num_slots  # numbers of adapters, by slot
        # A device slot for each row and the spare one; `_no_slot` for a row without an adapter.
        self._slots_of_rows = torch.full((num_rows + 1,), self._no_slot, dtype=torch.int32, device=device)

    def admit(self, rows: Any) -> list[AdmittedRow]:
        asking = super().admit(rows)
        self._upload(row.row for row in asking)
        return asking

    def remember(self, row: AdmittedRow) -> None:
        slot, number = map(int, row.options["adapter"])
        if self._held[slot] != number:
            self._slots.fill(slot, self._adapters.by_number[number])
            self._held[slot] = number
        self.by_row[row.row] = self._slots.device_slot(slot)

    def release(self, rows: Any) -> None:
        released = [row for row in rows if row in self.by_row]
        super().release(rows)
        self._upload(released)

    def _upload(self, rows: Iterable[int]) -> None:
        """Tell the device where the adapters of these rows lie."""
        changed = [(row, self.by_row.get(row, self._no_slot)) for row in rows]
        if changed:
            pairs = numbers_to_device(changed, self._slots_of_rows.device)
            self._slots_of_rows[pairs[:, 0]] = pairs[:, 1].int()

    def begin_step(self, on_host: AllSections) -> bool:
        """Note and return whether any row of a packet's step has an adapter."""
        section = "chunks" if len(on_host.chunks) else "decode_rows"
        rows = column(on_host, section, "row").tolist() if self.by_row else ()
        self.use(not self.by_row.keys().isdisjoint(rows))
        return self.are_used

    def compile_ahead(self, max_tokens: int) -> None:
        """Compile the kernels of steps of fewer than `max_tokens` tokens."""
        self._adapters.compile_ahead(max_tokens, self._slots_of_rows.device)

    def use(self, are_used: bool) -> None:
        """Say whether rows of the steps from now on have adapters."""
        self.are_used, self._adapters.step.rows = are_used, None

    def of_tokens(self, step: ForwardStep) -> LoRARows | None:
        """Return which adapter each token of a step has, and have the layers add the products; None if none are used.

        Nothing on the device depends on which rows have adapters, so a CUDA graph may capture it.
        """
        if not self.are_used:
            return None
        slots, num_tokens = self._slots_of_rows[step.rows.long()], len(step.token_ids)
        if isinstance(step.attention, PrefillMetadata):
            segments, _ = ragged_indices(step.attention.cu_query_lens, num_tokens)
            slots = slots[segments]
        elif num_tokens != len(slots):  # rows of several tokens
            slots = slots.unsqueeze(1).expand(-1, num_tokens // len(slots)).reshape(-1)
        self._adapters.step.rows = LoRARows(slots)
        return self._adapters.step.rows
