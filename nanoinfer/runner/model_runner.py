"""The part of the engine that touches the device: it launches steps, samples their tokens, and waits for these.

It knows nothing of requests: a packet comes in, token ids go out. A step is two launches, `launch` for the forward pass
and `sample` for the tokens, so that the host can still decide in between which tokens a row may draw. Neither waits for
the device, except where a CUDA graph is captured; `wait` does, usually while the next step runs.
"""

import gc
import time
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.checkpoint.weights import ModelWeights
from nanoinfer.config import EngineConfig
from nanoinfer.device import computing, is_out_of_memory, record_event, to_device
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.extras.prompt_states import Found
from nanoinfer.engine.packet import DecodeRecord, Header, Packet, PacketSections, read_header, split_packet
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.metadata import SharedPrefixes
from nanoinfer.layers.routing_table import RoutingOnHost
from nanoinfer.models.execution import sizes_to_measure
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.runner.cuda_graphs import DecodeGraphs, graph_sizes, sharing_graph_sizes
from nanoinfer.runner.device_state import DeviceState, StepBuffers
from nanoinfer.runner.memory import CPU_CACHE_BYTES
from nanoinfer.runner.setup import RunnerInfo, Setup, largest_prefill
from nanoinfer.runner.step_tables import PADDING_ROW
from nanoinfer.sampling.drawn_logprobs import SampleLogprobs
from nanoinfer.sampling.sampler import Sampled, SpanLogprobs


class PendingStep(NamedTuple):
    """A step whose logits are being computed. It must be sampled before the next one is launched."""

    rows: Tensor  # (num_sampled,) int64
    host_rows: list[int]  # the same on the host
    prompt_logprobs: list[SpanLogprobs]
    hidden_states: list[Found]


class StepHandle(NamedTuple):
    """A sampled step: its results on their way to host memory, and the event that says they have come."""

    token_ids: Tensor  # (num_sampled,) int32
    logprobs: list[SampleLogprobs]
    prompt_logprobs: list[SpanLogprobs]
    hidden_states: list[Found]
    errors: dict[int, str]  # by batch_idx: why a user's function failed, so that there is no such token
    event: torch.cuda.Event | None  # None on a CPU, where a sampled step is done

    def is_done(self) -> bool:
        return self.event is None or self.event.query()


class ModelRunner:
    """Runs packets on one device.

    config: the user's options. model_config: the model's sizes. folder: the model's files.
    Raises ConfigError for an option that does not fit the device or the model, ModelError for the checkpoint.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: Path, tp: TensorParallel | None = None
    ) -> None:
        self.tp = tp or TensorParallel()
        self.setup = Setup.of(config, model_config, self.tp)
        self.device, self.backends = self.setup.device, self.setup.backends
        self._device_state: DeviceState | None = None  # None while it sleeps
        self.closed = False
        self.asleep: frozenset[str] = frozenset()  # "weights" and "kv_cache", or one of them
        self._sleep_level = 1  # of the last sleep
        self._num_threads: int | None = None  # the user's own number of CPU threads
        try:
            with computing(self.device, self._num_threads):
                self._set_up(folder)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.device} has too little memory for the model of {folder / 'config.json'} and the largest step "
                f"({error}); lower max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs="
                f"{config.max_num_seqs}, free the memory that other programs hold, or use a smaller model"
            ) from error

    def launch(self, packet: Packet) -> PendingStep:
        """Start the forward pass of a step, up to its logits."""
        with computing(self.device, self._num_threads):
            header = read_header(packet)
            on_host, on_device = (
                split_packet(packet, header),
                split_packet(to_device(torch.from_numpy(packet), self.device), header),
            )
            self.device_state.enter(header, on_host, on_device)
            if header.counts.chunks:
                return self._launch_prefill(header, on_host, on_device)
            return self._launch_decode(on_host, on_device)

    def _launch_prefill(self, header: Header, on_host: PacketSections, on_device: PacketSections) -> PendingStep:
        assert not header.counts.decode_rows, "both prefill and decode would write the first logits"
        chunks, num_samples = on_host.chunks.tolist(), header.num_prefill_samples
        step = self._planned(self.device_state.tables.prefill_step(header, on_device.chunks, chunks))
        forward = self.device_state.buffers.prefill_graphs.choose(len(step.token_ids), len(chunks)) or self.model
        hidden, hidden_states = self.device_state.pooler.run(forward, step, chunks)
        self._write_logits(step, hidden)
        return PendingStep(
            rows=on_device.chunks[:num_samples, 0].long(),
            host_rows=[row for row, _, _ in chunks[:num_samples]],
            prompt_logprobs=self.device_state.sampler.prompt_logprobs(self.model, hidden, chunks),
            hidden_states=hidden_states,
        )

    def _launch_decode(self, on_host: PacketSections, on_device: PacketSections) -> PendingStep:
        rows, num_shared_blocks, num_group_rows = on_device.decode_rows.unbind(1)
        shares = on_host.decode_rows[:, DecodeRecord._fields.index("num_shared_blocks")].any()
        forward = self.device_state.decode_graphs.replay if self.device_state.decode_graphs else self.decode
        forward(rows, SharedPrefixes(num_shared_blocks, num_group_rows) if shares else None)
        return PendingStep(rows.long(), on_host.decode_rows[:, 0].tolist(), prompt_logprobs=[], hidden_states=[])

    def sample(self, pending: PendingStep, masks: TokenMasks | None = None) -> StepHandle:
        """Draw the tokens of a launched step, as the masks allow, and start their copy to the host.

        They come in the packet's order: chunks that sample, or decode rows.
        """
        with computing(self.device, self._num_threads):
            if self.model.generates:
                logits = self.device_state.buffers.logits[: len(pending.host_rows)]
                first_id = self.model.lm_head.vocab.start
                sampled = self.device_state.sampler.sample(logits, first_id, pending.rows, pending.host_rows, masks)
            else:
                sampled = Sampled(torch.empty(0, dtype=torch.int32), [], {})
            return StepHandle(
                token_ids=sampled.token_ids.to("cpu", non_blocking=True),  # into pinned memory
                logprobs=sampled.logprobs,
                prompt_logprobs=pending.prompt_logprobs,
                hidden_states=pending.hidden_states,
                errors=sampled.errors,
                event=record_event(self.device),
            )

    def wait(self, handle: StepHandle) -> list[int]:
        """Return the token ids of a sampled step, once they are there."""
        if handle.event is not None:
            handle.event.synchronize()
        return handle.token_ids.tolist()

    def read_routed_experts(self, block_ids: list[int], start: int, end: int) -> RoutingOnHost:
        """Start to copy those of positions [start, end) of a sequence with these blocks to the host."""
        assert self.device_state.routing_table is not None, "nobody asked for routed experts when the engine was made"
        with computing(self.device, self._num_threads):
            return self.device_state.routing_table.read(block_ids, start, end)

    def sleep(self, level: int) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them."""
        with computing(self.device, self._num_threads):
            if "weights" not in self.asleep:
                self.weights.leave_device(keep=level == 1)
                self._sleep_level = level
        self.asleep = frozenset(("weights", "kv_cache"))
        self._free_state()

    def wake_up(self, tags: Set[str]) -> None:
        """Take the memory of "weights", then of the "kv_cache", and capture the graphs again, as `tags` say.

        If memory is short, both sleep on where the weights were to wake up, else the cache, and this raises.
        """
        slept = self.asleep
        try:
            with computing(self.device, self._num_threads):
                if "weights" in slept & tags:
                    self.weights.return_to_device()
                    self.asleep -= {"weights"}
                if "kv_cache" in slept & tags:
                    self._allocate_state(self.setup.allocate_buffers(self.model, self.limits))
                    self._capture_graphs(is_warm=True)
                    self.asleep -= {"kv_cache"}
        except BaseException:
            if "weights" in slept:
                self.asleep -= {"weights"}  # some of them may be awake
                self.sleep(self._sleep_level)
            self._free_state()
            raise

    @property
    def unready(self) -> str | None:
        """Why no step can run now, and what to do; None if one can."""
        if self.asleep == {"kv_cache"}:
            return "the KV cache of this engine sleeps; call wake_up(tags=['kv_cache']) first"
        return "this engine sleeps; call wake_up first" if self.asleep else self.weights.explain_missing()

    def close(self) -> None:
        """Give the device's memory back. The runner cannot be used any more; closing twice is fine."""
        if not self.closed:
            self.closed = True
            del self.model, self.weights
            self._free_state()

    @property
    def device_state(self) -> DeviceState:
        assert self._device_state is not None, "a runner that sleeps, or is closed, has nothing on its device"
        return self._device_state

    def _free_state(self) -> None:
        """Free what runs steps, but not the weights."""
        self._device_state = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def decode(self, rows: Tensor, shared_prefixes: SharedPrefixes | None) -> None:
        """Compute one token for each row (num_rows,) int32, from the tables to the logits: a CUDA graph captures it."""
        if shared_prefixes is not None:  # columns of a packet, unless in a graph; kernels take them contiguous
            shared_prefixes = SharedPrefixes(*(column.contiguous() for column in shared_prefixes))
        step = self._planned(self.device_state.tables.decode_step(rows, shared_prefixes))
        self._write_logits(step, self.model(step))

    def _planned(self, step: ForwardStep) -> ForwardStep:
        """Return the step with what the attention backends prepare once for all layers."""
        plan, kv_cache = self.backends.plan, step.kv_cache
        windowed = tuple(plan(metadata, kv_cache, windowed=True) for metadata in step.windowed_attention)
        attention = plan(step.attention, kv_cache, windowed=False if windowed else None)
        routed: list[Tensor] | None = [] if self.setup.config.enable_return_routed_experts else None
        return replace(step, attention=attention, windowed_attention=windowed, routed=routed)

    def _write_logits(self, step: ForwardStep, hidden: Tensor) -> None:
        if self.tp.symmetric_memory is not None:
            self.tp.symmetric_memory.check_even()
        if step.routed and self.device_state.routing_table is not None:
            self.device_state.routing_table.write(step.attention.slot_mapping, step.routed)
        hidden = hidden if step.outputs is None else hidden[step.outputs]
        if self.model.generates:
            self.model.compute_logits(hidden, out=self.device_state.buffers.logits[: len(hidden)])

    def _set_up(self, folder: Path) -> None:
        """Load the model, size and allocate what steps need beside it, capture the graphs."""
        setup, started = self.setup, time.perf_counter()
        free_at_start = setup.free_at_start()
        self.model = setup.load_model(folder)
        self.weights, self._dense = ModelWeights(self.model), setup.load_dense()
        self._num_threads = setup.num_threads(self.model)
        self.limits = setup.limits_without_cache(free_at_start)
        loaded = time.perf_counter()
        buffers, free_bytes = setup.allocate_buffers(self.model, self.limits), CPU_CACHE_BYTES
        if self.device.type == "cuda":
            self._allocate_state(buffers)
            free_bytes = setup.measure_free_bytes(
                self.model,
                self.limits,
                buffers.prefill_graphs.small,
                self.run_largest_prefills,
                self.decode,
                free_at_start,
            )
        self.limits = setup.limits_with_cache(self.limits, free_bytes)
        self._allocate_state(buffers)
        sized = time.perf_counter()
        self._capture_graphs()
        seconds = {"weights": loaded - started, "warm-up": sized - loaded, "graphs": time.perf_counter() - sized}
        self.info = RunnerInfo(self.device, setup.dtype, setup.describe(self.device_state.kv_cache), seconds)

    def _allocate_state(self, buffers: StepBuffers) -> None:
        self._device_state = None  # makes room, if there is one
        if self.device.type == "cuda":  # or a small tensor may take part of that room, and a large one finds none
            torch.cuda.empty_cache()
        self._device_state = self.setup.allocate_state(buffers, self.model, self._dense, self.limits)

    def _capture_graphs(self, is_warm: bool = False) -> None:
        if self.setup.uses_graphs and self.model.generates:
            max_num_seqs = self.limits.max_num_seqs
            sizes, sharing_sizes = graph_sizes(max_num_seqs), sharing_graph_sizes(max_num_seqs)
            self.device_state.decode_graphs = DecodeGraphs(self.decode, sizes, sharing_sizes, self.device, is_warm)

    def run_largest_prefills(self) -> None:
        """Run prefill steps that need as much memory as any, in the longest sequences, and sample for all rows."""
        tables, sampler = self.device_state.tables, self.device_state.sampler
        rows = torch.arange(self.limits.max_num_seqs, device=self.device)
        for num_tokens in sizes_to_measure(self.setup.max_step_tokens(self.limits), self.tp):
            step = largest_prefill(tables, rows, num_tokens)
            step = self._planned(step)
            hidden = self.model(step)
            self._write_logits(step, hidden)
            if self.model.generates:
                self.sample(PendingStep(torch.full_like(rows, PADDING_ROW), [PADDING_ROW] * len(rows), [], []))
            # What needs it is not run, since its kernels would have to be compiled for users who never ask for it.
            torch.empty(sampler.scratch_bytes, dtype=torch.uint8, device=self.device)
            del hidden
