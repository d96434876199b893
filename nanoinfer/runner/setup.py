"""Makes a ModelRunner: loads the model, measures the memory of the largest steps, sizes the cache, allocates it."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.caches.block_layout import is_8_bit, select_kv_cache_dtype
from nanoinfer.caches.kv_cache import KVCache, page_bytes
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.caches.recurrent_states import StateLayout
from nanoinfer.caches.routing_table import RoutingTable
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.pooling_config import PoolingConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import select_device, select_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.cache_groups.specs import CacheGroupSpec, RecurrentStateSpec, num_snapshots
from nanoinfer.engine.interfaces import RunnerLimits, row_sizes
from nanoinfer.errors import ConfigError
from nanoinfer.integers import ceil_div
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.metadata import DecodeBatch, PrefillMetadata
from nanoinfer.lora.adapter_config import MERGE
from nanoinfer.lora.adapter_slots import AdapterSlots, RankAdapters
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.execution import PrefillGraphs, sizes_to_measure
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.images import ImageEncoder, ImageSight
from nanoinfer.models.implementations import load, make_on_meta
from nanoinfer.models.interface import Model
from nanoinfer.runner import memory
from nanoinfer.runner.cuda_graphs import (
    DecodeGraphs,
    graph_sizes,
    several_tokens_graph_sizes,
    sharing_graph_sizes,
)
from nanoinfer.runner.device_state import DeviceState, StepBuffers
from nanoinfer.runner.model_runner import LaunchedStep, ModelRunner
from nanoinfer.runner.pooler import DenseLayer, Pooler, load_dense
from nanoinfer.runner.stand_ins import packed_graph_sizes, packed_line_counts
from nanoinfer.runner.step_images import HeldImages, ImageRows
from nanoinfer.runner.step_tables import PADDING_ROW, StepTables
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.step_threads import num_step_threads

# Kept for graphs of steps that share prefixes; to measure them would compile kernels that many users never need.
SHARING_BYTES = 64 * 2**20  # 512 rows of Qwen3-8B take about 22 MiB


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Says what was loaded, in words, and how many seconds each part of that took."""

    device: torch.device
    dtype: torch.dtype
    description: str
    start_seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Setup:
    """Holds the user's options and the model's sizes, resolved for a device, and makes the parts of a runner."""

    config: EngineConfig
    model_config: BaseModelConfig
    tp: TensorParallel
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    kv_cache_layout: KVCacheLayout  # how layers with attention share the KV cache
    backends: AttentionBackends  # of the layers that `load_model` has made: empty before

    @classmethod
    def of(cls, config: EngineConfig, model_config: BaseModelConfig, tp: TensorParallel) -> "Setup":
        """Resolve the options. Raises ConfigError for one that the device cannot have."""
        device = select_device(config.device)
        dtype = select_dtype(config.dtype, model_config.dtype, model_config.prefers_bfloat16, device)
        kv_cache_dtype = select_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
        block_size, in_8_bits = config.kvcache_block_size, is_8_bit(kv_cache_dtype)
        layout = KVCacheLayout.of(model_config, model_config.longest_sequence(config.max_model_len), tp)
        if config.enable_return_routed_experts and layout.tables[0].window is not None:
            raise ConfigError(
                "enable_return_routed_experts=True keeps the experts of a token beside its keys, and no layer of "
                f"{model_config.architecture} keeps those of all tokens; leave it out"
            )
        backends = AttentionBackends(config.attention_backend, device, dtype, block_size, in_8_bits, layout.places)
        return cls(config, model_config, tp, device, dtype, kv_cache_dtype, layout, backends)

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence, if the cache is large enough."""
        return self.model_config.longest_sequence(self.config.max_model_len)

    @property
    def pooling(self) -> PoolingConfig:
        assert self.model_config.pooling is not None, "the folder was read, and with it how the model pools"
        return self.model_config.pooling

    @property
    def counts_memory(self) -> bool:
        """Whether the device's memory sizes the cache: a GPU's does; a CPU's is taken as it is used."""
        return self.device.type == "cuda"

    def uses_graphs(self) -> bool:
        """Return whether steps of the loaded model are captured."""
        return self.device.type == "cuda" and not self.config.enforce_eager and not self.backends.needs_host

    def state_layout(self, max_row_tokens: int) -> StateLayout | None:
        """Return what layers with linear attention keep of a sequence; None without such layers."""
        return StateLayout.of(self.model_config, self.dtype, self.tp, max_row_tokens)

    def load_model(self, folder: Path) -> Model:
        """Return the model with its weights, or random ones, on the device."""
        return load(self.model_config, self.config, folder, self.longest_sequence, self.backends, self.tp)

    def model_without_weights(self) -> Model | None:
        """Return the model with tensors that only have shapes; None for a model of transformers."""
        return make_on_meta(self.model_config, self.longest_sequence, self.backends, self.tp)

    def load_dense(self) -> list[DenseLayer]:
        """Return the layers after pooling."""
        return load_dense(self.pooling.dense, self.config.load_format == "dummy", self.device)

    def make_adapters(self, model: Model) -> RankAdapters | None:
        """Prepare the layers for adapters; None without enable_lora. Raises ConfigError for a model that has none."""
        config = self.config
        if not config.enable_lora:
            return None
        if not isinstance(model, DecoderForCausalLM):
            raise ConfigError(
                f"enable_lora=True, and {self.model_config.architecture} is an encoder or runs by transformers' "
                f"layers, which is not supported; leave it out, and {MERGE}"
            )
        return RankAdapters(model, config.max_loras, config.max_lora_rank, self.dtype)

    def free_at_start(self) -> int:
        """Return the bytes of a GPU that are free before the engine takes any; none on a CPU."""
        return (memory.free_bytes(self.device) if self.counts_memory else 0) + self.tp.num_shared_bytes

    def memory_use(self, free_at_start: int) -> memory.MemoryUse:
        """Return the bytes that a GPU grants to the engine, and those that are loaded."""
        return memory.memory_use(self.config.gpu_memory_utilization, free_at_start, self.device)

    def limits_without_cache(
        self, free_at_start: int, encoder: ImageEncoder | None, packs_lines: bool = False
    ) -> RunnerLimits:
        """Return the limits of a loaded model before its cache is sized, with one block of it.

        Rows are fewer than were asked for, where their recurrent states would take too much. Sequences are no longer
        than all the memory that is left holds, so that no table has room for longer ones. Raises TooLittleMemoryError
        where no block fits beside the weights.
        """
        max_num_seqs, free_bytes = self.config.max_num_seqs, memory.CPU_CACHE_BYTES
        if self.counts_memory:
            free_bytes = self.tp.minimum(self.memory_use(free_at_start).free, self.device)
        cache_specs: tuple[CacheGroupSpec, ...] = self.kv_cache_layout.cache_specs
        # As many as are asked for, and the layers of the loaded model take.
        max_row_tokens = min(self.config.max_row_tokens, self.backends.max_row_tokens or self.config.max_row_tokens)
        state_layout = self.state_layout(max_row_tokens)
        if state_layout is not None:
            num_kept = 0
            if self.counts_memory:
                max_num_seqs = state_layout.max_rows(max_num_seqs, free_bytes)
            if self.config.enable_prefix_caching:
                num_kept = state_layout.num_snapshots(max_num_seqs, free_bytes)
            cache_specs += (RecurrentStateSpec(num_kept),)
        limits = RunnerLimits(
            max_model_len=self.longest_sequence,
            num_blocks=1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            cache_specs=cache_specs,
            max_prefix_sharers=self.backends.max_prefix_sharers,
            whole_prompts=self.model_config.is_encoder,
            computes_beside_host=self.device.type != "cpu",
            whole_images=encoder is not None and encoder.sight is not ImageSight.CAUSAL,
            max_row_tokens=max_row_tokens,
            packs_lines=packs_lines,
        )
        if not self.counts_memory or self.config.num_kvcache_blocks is not None:
            return limits
        self.num_blocks_in(free_bytes)
        if self.config.max_model_len is not None:
            return limits
        longest = max(self.config.kvcache_block_size, self.capacity(limits, free_bytes))
        return replace(limits, max_model_len=min(limits.max_model_len, longest))

    @property
    def page_bytes(self) -> int:
        """The bytes of a page of the cache, including what it has beside keys and values."""
        block_size = self.config.kvcache_block_size
        moe = self.model_config.moe if self.config.enable_return_routed_experts else None
        routing_bytes = RoutingTable.num_bytes(moe, block_size) if moe else 0
        return page_bytes(self.kv_cache_layout, block_size, self.kv_cache_dtype) + routing_bytes

    def num_blocks_in(self, free_bytes: int) -> int:
        """Return how many pages a cache of so many bytes has. Raises TooLittleMemoryError if a block has none."""
        least = self.kv_cache_layout.num_pages_of(1)
        return memory.num_blocks_in(free_bytes, self.page_bytes, least, self.config.kvcache_block_size)

    def capacity(self, limits: RunnerLimits, free_bytes: int) -> int:
        """Return how many tokens the longest sequence has that a cache of so many bytes holds."""
        num_pages = free_bytes // self.page_bytes
        return self.kv_cache_layout.max_tokens(num_pages, self.config.kvcache_block_size, limits.max_chunk_tokens)

    def holds_enough(self, limits: RunnerLimits, free_bytes: int) -> bool:
        """Return whether a cache of so many bytes holds as many tokens as a step has, and a sequence of usual length.

        Where the user says how long sequences are, it is one of that length.
        """
        sequence = min(self.longest_sequence, self.config.max_model_len or memory.USUAL_TOKENS)
        return self.capacity(limits, free_bytes) >= max(sequence, self.max_step_tokens(limits))

    def smaller_steps(self, limits: RunnerLimits) -> RunnerLimits | None:
        """Return limits of smaller steps, which leave more memory to the cache; None if steps cannot be smaller."""
        return None if self.config.num_kvcache_blocks is not None else memory.smaller_steps(limits, self.config)

    def limits_with_cache(self, limits: RunnerLimits, free_bytes: int) -> RunnerLimits:
        """Return these limits with a cache of so many bytes, or of as many blocks as the user wants."""
        block_size, num_blocks = self.config.kvcache_block_size, self.config.num_kvcache_blocks
        layout = self.kv_cache_layout
        if num_blocks is None:
            num_blocks = self.num_blocks_in(free_bytes)
            if limits.whole_prompts:
                # Blocks serve one step, while the next is planned: as many as two steps need suffice.
                blocks_of_step = ceil_div(self.max_step_tokens(limits), block_size) + limits.max_num_seqs
                num_blocks = min(num_blocks, 2 * blocks_of_step)
        else:
            num_blocks = layout.num_pages_of(num_blocks)
        num_blocks = self.tp.minimum(num_blocks, self.device)
        # The tables that were measured have room for no more than the first of these.
        capacity = min(limits.max_model_len, layout.max_tokens(num_blocks, block_size, limits.max_chunk_tokens))
        max_model_len = memory.resolve_max_model_len(
            self.config.max_model_len, self.longest_sequence, capacity, num_blocks, block_size
        )
        return replace(limits, num_blocks=num_blocks, max_model_len=max_model_len)

    def max_step_tokens(self, limits: RunnerLimits) -> int:
        return memory.max_step_tokens(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len)

    def measure_memory_use(self, runner: ModelRunner, limits: RunnerLimits, free_at_start: int) -> memory.MemoryUse:
        """Return what gpu_memory_utilization grants, and what weights, tables, the largest step and graphs take of it.

        Runs such steps, and captures some graphs of decode and of small prefill steps; kernels are compiled on the way.
        """
        has_decode_graphs = self.uses_graphs() and runner.model.generates and runner.model.captures_decode
        if runner.state.adapters is not None:
            runner.state.adapters.compile_ahead(self.max_step_tokens(limits))  # which runs below
        with runner.model.compiling_few_rows(graph_sizes(limits.max_num_seqs) if has_decode_graphs else []):
            step_bytes = memory.measure_peak_bytes(lambda: self.run_largest_prefills(runner, limits), self.device)
        graph_bytes = self._measure_decode_graphs(limits, runner) if has_decode_graphs else 0
        small_prefill_graphs = runner.state.buffers.prefill_graphs.small
        if small_prefill_graphs is not None:
            capture, sizes = small_prefill_graphs.graphs_of, small_prefill_graphs.sizes
            num_bytes = memory.measure_graph_bytes(capture, sizes, len(sizes), self.device)
            graph_bytes += num_bytes * (1 if runner.state.adapters is None else 2)  # steps with adapters have their own
        return replace(self.memory_use(free_at_start), step=step_bytes, graphs=graph_bytes)

    def run_largest_prefills(self, runner: ModelRunner, limits: RunnerLimits) -> None:
        """Run prefill steps that need as much memory as any, in the longest sequences, and sample for all rows."""
        rows, adapters = torch.arange(limits.max_num_seqs, device=self.device), runner.state.adapters
        sizes = sizes_to_measure(self.max_step_tokens(limits), self.tp)
        of_images = None if runner.state.images is None else runner.state.images.reserve_largest()
        for num_tokens, uses_adapters in product(sizes, (True, False) if adapters else (False,)):
            if adapters is not None:
                adapters.use(uses_adapters)
            step = runner.planned(largest_prefill(runner.state.tables, rows, num_tokens))
            hidden = runner.forward(step)
            if runner.model.generates:
                runner.sample(LaunchedStep(torch.full_like(rows, PADDING_ROW), [PADDING_ROW] * len(rows), []))
            # Allocate the sampler's scratch memory without running what needs it: its kernels would have to be compiled
            # for users who never ask for it.
            torch.empty(runner.state.sampler.scratch_bytes, dtype=torch.uint8, device=self.device)
            del step, hidden  # until here, as in a step of a user's
        del of_images

    def _measure_decode_graphs(self, limits: RunnerLimits, runner: ModelRunner) -> int:
        shares_prefixes = limits.max_prefix_sharers > 1 and self.config.enable_prefix_caching
        sizes, num_tokens = graph_sizes(limits.max_num_seqs), limits.max_row_tokens
        late_sizes = several_tokens_graph_sizes(sizes)
        count, num_late = len(sizes), len(late_sizes) * len(row_sizes(num_tokens)) * (1 + shares_prefixes)

        def capture(some: list[int]) -> DecodeGraphs:
            graphs = DecodeGraphs(runner.decode, some, sharing_sizes=[], device=self.device)
            # Of the largest size the most tokens, of the smallest two: else the larger graph would serve both.
            for size, its_tokens in zip(some, (num_tokens, 2), strict=False) if num_tokens > 1 else ():
                rows = torch.full((size,), PADDING_ROW, dtype=torch.int32, device=self.device)
                graphs.replay(DecodeBatch(rows, None, its_tokens, torch.ones_like(rows)))
            return graphs

        if num_tokens > 1:
            num_packed = sum(len(packed_line_counts(size, num_tokens)) for size in packed_graph_sizes(sizes))
            count = ceil_div(count + num_late + num_packed, 2)  # two are captured of each size
        count += shares_prefixes * len(sharing_graph_sizes(limits.max_num_seqs))
        graph_bytes = memory.measure_graph_bytes(capture, sizes, count, self.device) + shares_prefixes * SHARING_BYTES
        adapters = runner.state.adapters
        if adapters is not None:  # steps with adapters have graphs of their own
            adapters.use(True)
            count = len(late_sizes) * (1 + shares_prefixes)
            count = count if num_tokens == 1 else ceil_div(count + num_late, 2)
            graph_bytes += memory.measure_graph_bytes(capture, late_sizes, count, self.device)
            adapters.use(False)
        return graph_bytes

    def allocate_buffers(self, model: Model, limits: RunnerLimits) -> StepBuffers:
        """Return the buffers of steps, which do not depend on the size of the cache."""
        graphs, max_tokens = PrefillGraphs(), self.max_step_tokens(limits)
        # If the rows or their lengths limit steps, and not the token budget, hardly any step has exactly max_tokens.
        captures_largest = max_tokens == limits.max_num_batched_tokens
        if self.uses_graphs() and not self.config.enable_return_routed_experts:
            graphs = model.prefill_graphs(max_tokens, captures_largest)
        max_logits = limits.max_num_seqs * limits.max_row_tokens
        return StepBuffers(
            torch.empty(max_logits, model.vocab.size, dtype=model.logits_dtype, device=self.device), graphs
        )

    def num_step_threads(self, model: Model) -> int | None:
        """Return how many CPU threads steps have: see `num_step_threads` of step_threads.py.

        All ranks have equally many, since sums depend on it: a router must choose the same experts on each of them.
        """
        count = num_step_threads(model, self.device)
        if self.device.type != "cpu" or self.tp.size == 1:
            return count
        return self.tp.minimum(count or torch.get_num_threads(), self.device)

    def make_model_runner(
        self,
        buffers: StepBuffers,
        model: Model,
        dense: list[DenseLayer],
        limits: RunnerLimits,
        num_threads: int | None,
        held_images: HeldImages,
        adapters: RankAdapters | None = None,
    ) -> ModelRunner:
        """Allocate the cache and all else that steps need on the device; return the runner of steps."""
        config, moe = self.config, self.model_config.moe
        kv_cache = memory.allocate_kv_cache(
            self.kv_cache_layout, limits.num_blocks, config.kvcache_block_size, self.kv_cache_dtype, self.device
        )
        states, state_layout = None, self.state_layout(limits.max_row_tokens)
        if state_layout is not None:
            states = state_layout.allocate(limits.max_num_seqs, num_snapshots(limits.cache_specs), self.device)
        tables = StepTables(limits.max_num_seqs, limits.max_model_len, kv_cache, states)
        sampler = Sampler(
            tables.token_ids,
            tables.context_lens,
            self.model_config.vocab_size,
            self.tp,
            config.logprobs_mode,
            num_counted=None if states is None or states.pending is None else states.pending.num_counted,
            max_row_tokens=limits.max_row_tokens,
        )
        pooler = Pooler(model, self.pooling, dense)
        routing_table = None
        if config.enable_return_routed_experts and moe is not None:
            routing_table = RoutingTable(moe, kv_cache)
        row_states = [*sampler.states, pooler]
        state = DeviceState(buffers, kv_cache, tables, sampler, pooler, row_states, routing_table)
        if adapters is not None:
            state.adapters = AdapterSlots(adapters, limits.max_num_seqs, self.device, buffers.prefill_graphs)
            row_states.append(state.adapters)
        if model.image_encoder is not None:
            state.images = ImageRows(
                model.image_encoder,
                held_images,
                vocab_size=self.model_config.vocab_size,
                num_rows=limits.max_num_seqs + 1,
                max_tokens=self.max_step_tokens(limits),
                hidden_size=self.model_config.hidden_size,
                dtype=self.dtype,
                device=self.device,
            )
        return ModelRunner(model, state, self.backends, self.tp, self.device, num_threads)

    def describe(self, kv_cache: KVCache, limits: RunnerLimits, num_threads: int | None) -> str:
        """Say what was loaded, for the log. num_threads: of a CPU's steps; None for PyTorch's own number."""
        num_blocks, block_size, chunk = kv_cache.num_blocks, kv_cache.block_size, limits.max_num_batched_tokens
        on_cpu = self.device.type == "cpu"  # which gives the cache memory as it is first written
        up_to = "up to " if on_cpu else ""
        threads = f", CPU threads: {num_threads or torch.get_num_threads()}" if on_cpu else ""
        return (
            f"{self.model_config.architecture} with attention by {self.backends.name}, KV cache of {num_blocks} blocks "
            f"of {block_size} tokens {self.kv_cache_layout.describe(num_blocks, block_size, chunk)}in "
            f"{str(self.kv_cache_dtype).removeprefix('torch.')}, {up_to}{kv_cache.num_bytes / memory.GIB:.2f} GiB"
            f"{threads}"
        )


def largest_prefill(tables: StepTables, rows: Tensor, num_tokens: int) -> ForwardStep:
    """Return a prefill step of so many tokens, in the longest sequences, that has logits for all `rows`."""
    device, longest = rows.device, tables.token_ids.shape[1] - 1
    lens = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
    return ForwardStep(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=torch.arange(num_tokens, device=device) % longest,
        rows=rows.new_full((len(lens),), PADDING_ROW, dtype=torch.int32),  # as in every step, or kernels compile again
        outputs=rows % num_tokens,
        kv_cache=tables.kv_cache,
        metadata=tuple(PrefillMetadata.of_whole_prompts(lens, table) for table in tables.tables),
        recurrent_states=tables.recurrent_states,
    )
