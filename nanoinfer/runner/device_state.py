"""Holds what a runner has on its device beside the weights. Sleeping frees it, and waking up makes it anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.routing_table import RoutingTable
from nanoinfer.engine.packet import AllSections, Header, Packet, UploadedSections, column
from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
from nanoinfer.lora.adapter_slots import AdapterSlots
from nanoinfer.models.execution import PrefillGraphs
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.runner.cuda_graphs import DecodeGraphs
from nanoinfer.runner.pooler import Pooler
from nanoinfer.runner.step_images import ImageRows
from nanoinfer.runner.step_tables import StepTables
from nanoinfer.sampling.proposals import Proposals
from nanoinfer.sampling.row_state import RowState, admit_rows
from nanoinfer.sampling.sampler import Sampler


@dataclass(slots=True)
class StepBuffers:
    """Holds what steps need whatever the size of the cache.

    logits: (max_num_seqs * max_row_tokens, this rank's ids), of all decode graphs and of what runs without.
    prefill_graphs: with the buffers that they read and write.
    """

    logits: Tensor
    prefill_graphs: PrefillGraphs


@dataclass(slots=True)
class DeviceState:
    """Holds the buffers of steps, the cache, and the tables of running sequences.

    row_states: all that serves options of rows: of the sampler, and the pooler. routing_table: None unless it is asked
    for. decode_graphs: None without CUDA graphs, and until they are captured. adapters: one of row_states; None without
    enable_lora. With it, decode_graphs are those of the step: see `graphs_by_use`. images: None unless the engine sees
    any.
    """

    buffers: StepBuffers
    kv_cache: KVCache
    tables: StepTables
    sampler: Sampler
    pooler: Pooler
    row_states: Sequence[RowState]
    routing_table: RoutingTable | None
    decode_graphs: DecodeGraphs | None = None
    adapters: AdapterSlots | None = None
    graphs_by_use: tuple[DecodeGraphs | None, DecodeGraphs | None] = None, None  # without adapters in a step, and with
    images: ImageRows | None = None

    def enter_proposals(
        self, header: Header, on_host: AllSections, on_device: UploadedSections, packs_lines: bool
    ) -> Proposals:
        """Enter what a packet proposes to its decode rows; return it.

        packs_lines: whether the rows' lines may be packed. They are, if nothing counts on equally many of each row.
        """
        proposals = Proposals.read(on_host, on_device)
        rows = column(on_device, "decode_rows", "row")
        proposals.enter(rows.long(), self.tables.token_ids, self.tables.context_lens)
        has_adapters = self.adapters is not None and self.adapters.are_used
        if not packs_lines or has_adapters or self.images is not None:
            return proposals
        host_rows = column(on_host, "decode_rows", "row").tolist()
        return proposals if self.sampler.copies(host_rows) else proposals.packed()

    def prefill_step(self, header: Header, chunks: Tensor, host_chunks: list[list[int]]) -> ForwardStep:
        """Return the step that computes these chunks: see `StepTables.prefill_step`."""
        reads_all = bool(self.pooler.by_row) or self.sampler.reads_prompts
        step = replace(self.tables.prefill_step(header, chunks, host_chunks), reads_all=reads_all)
        return step if self.images is None else self.images.add_to(step, host_chunks)

    def decode_step(self, batch: DecodeBatch) -> ForwardStep:
        """Return the step that computes the newest tokens of these rows: see `StepTables.decode_step`."""
        if batch.shared_prefixes is not None:  # columns of a packet, unless in a graph; kernels take them contiguous
            shared = SharedPrefixes(*(column.contiguous() for column in batch.shared_prefixes))
            batch = batch._replace(shared_prefixes=shared)
        step = self.tables.decode_step(batch)
        return step if self.images is None else self.images.with_rotary_positions(step, batch)

    def prefill_graph(self, step: ForwardStep, num_chunks: int) -> Callable[[ForwardStep], Tensor] | None:
        """Return a function that computes a prefill step of so many chunks by graphs; None if no graph serves it."""
        if step.images is not None:
            return None
        graphs = self.buffers.prefill_graphs
        if step.adapters is not None and self.adapters is not None:
            graphs = self.adapters.prefill_graphs
        return graphs.choose(len(step.token_ids), num_chunks)

    def read(self, header: Header, packet: Packet) -> AllSections:
        """Return the sections of a packet, with image tokens in the places of images."""
        on_host = header.on_host(packet)
        if self.images is not None and header.counts["row_records"]:
            self.images.enter(on_host)
        return on_host

    def enter(self, header: Header, on_host: AllSections, on_device: UploadedSections) -> None:
        """Enter new rows and blocks, and make the copies that a step begins with."""
        self.tables.update(header, on_device)
        if header.counts["row_records"]:
            self.sampler.admit(on_device)
            admit_rows(self.row_states, on_host)
        if self.adapters is not None:
            self.decode_graphs = self.graphs_by_use[self.adapters.begin_step(on_host)]
        if header.counts["block_copies"]:
            self.kv_cache.copy_blocks(on_device.block_copies)
            if self.routing_table is not None:
                self.routing_table.copy_blocks(on_device.block_copies)
        states = self.tables.recurrent_states
        if header.counts["kept_states"] or header.counts["restored_states"]:
            assert states is not None, "states are copied for a model that has none"
            # Saved to snapshots before others are restored from them.
            states.copy(on_host.kept_states.tolist() + on_host.restored_states.tolist())
        if states is not None and states.pending is not None and header.counts["row_records"]:
            # After the copies: the state of a row may be kept, and the row given to another sequence, in one step.
            states.begin(column(on_device, "row_records", "row"))
