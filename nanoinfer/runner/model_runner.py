"""The part of the engine that touches the device: launches steps, samples their tokens, waits for these.

It knows nothing of requests: a packet comes in, token ids go out. A step is two launches, `launch` for the forward pass
and `sample` for the tokens, so that the host can still decide in between which tokens a row may draw. Neither waits for
the device; `wait` does, usually while the next step runs.
"""

import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.checkpoint.loader import fill_with_random_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.checkpoint.weights import ModelWeights
from nanoinfer.config import EngineConfig
from nanoinfer.constraints.rules import StepRules
from nanoinfer.device import computing, default_dtype, is_out_of_memory, select_device, select_dtype, to_device
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.batch import DecodeRow, Header, Packet, PacketSections, read_header, split
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.block_copies import copy_cached_tokens
from nanoinfer.layers.attention.kv_rounding import select_kv_cache_dtype
from nanoinfer.layers.attention.metadata import PrefillMetadata, SharedPrefixes
from nanoinfer.layers.attention.selection import AttentionBackends
from nanoinfer.models import get_model_class
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.execution import capture_largest_prefill, compiling_few_rows, sizes_to_measure
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.sliced_prefill import PrefillGraphs
from nanoinfer.runner import memory
from nanoinfer.runner.cuda_graphs import DecodeGraphs, graph_sizes, measure_graph_bytes, num_graphs, sharing_graph_sizes
from nanoinfer.runner.step_tables import PADDING_ROW, StepTables
from nanoinfer.sampling.sampler import PromptLogprobs, SampleLogprobs, Sampler

MIN_THREADED_PARAMETERS = 2**24  # threads slow the steps of smaller models down
# Kept for graphs of steps that share prefixes; to measure them would compile kernels that many users never need.
SHARING_BYTES = 64 * 2**20  # 512 rows of Qwen3-8B take about 22 MiB


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What was loaded, in words, and how many seconds each part of that took."""

    device: torch.device
    dtype: torch.dtype
    description: str
    start_seconds: dict[str, float]


class PendingStep(NamedTuple):
    """A step whose logits are being computed. It must be sampled before the next one is launched."""

    rows: Tensor  # (num_sampled,) int64
    host_rows: list[int]  # the same on the host
    prompt_logprobs: PromptLogprobs | None


class StepHandle(NamedTuple):
    """A sampled step: its results on their way to host memory, and the event that says they have come."""

    token_ids: Tensor  # (num_sampled,) int32
    logprobs: list[SampleLogprobs]
    prompt_logprobs: PromptLogprobs | None
    errors: dict[int, str]  # by line: why a user's function failed, which leaves that line without a token
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
        self.config = config
        self.model_config = model_config
        self.tp = tp or TensorParallel()
        self.device = select_device(config.device)
        self.dtype = select_dtype(config.dtype, model_config.dtype, self.device)
        self.kv_dtype = select_kv_cache_dtype(config.kv_cache_dtype, self.dtype, self.device)
        backend, block_size = config.attention_backend, config.kvcache_block_size
        self.backends = AttentionBackends(backend, self.device, self.dtype, block_size, self.kv_dtype != self.dtype)
        self.graphs: DecodeGraphs | None = None
        self.closed = False
        self.sleep_level: int | None = None  # None while awake
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
            on_host, on_device = split(packet, header), split(to_device(torch.from_numpy(packet), self.device), header)
            self.tables.update(header, on_device)
            self.sampler.admit(header, on_host, on_device)
            if header.num_block_copies:
                copy_cached_tokens(self.kv_cache, on_device.block_copies)
            if header.num_chunks:
                return self._launch_prefill(header, on_host, on_device)
            rows, num_shared_blocks, num_group_rows = on_device.decode_rows.unbind(1)
            shares = on_host.decode_rows[:, DecodeRow._fields.index("num_shared_blocks")].any()
            shared_prefixes = SharedPrefixes(num_shared_blocks, num_group_rows) if shares else None
            forward = self.graphs.replay if self.graphs else self._decode
            forward(rows, shared_prefixes)
            return PendingStep(rows.long(), on_host.decode_rows[:, 0].tolist(), prompt_logprobs=None)

    def sample(self, pending: PendingStep, rules: StepRules | None = None) -> StepHandle:
        """Draw the tokens of a launched step, as the rules allow, and start their copy to the host.

        They come in the packet's order: chunks that sample, or decode rows.
        """
        with computing(self.device, self._num_threads):
            logits, first_id = self.logits[: len(pending.host_rows)], self.model.lm_head.vocab.start
            sampled = self.sampler.sample(logits, first_id, pending.rows, pending.host_rows, rules)
            to_host = sampled.token_ids.to("cpu", non_blocking=True)  # into pinned memory
            event = None
            if self.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
            return StepHandle(to_host, sampled.logprobs, pending.prompt_logprobs, sampled.errors, event)

    def wait(self, handle: StepHandle) -> list[int]:
        """Return the token ids of a sampled step, once they are there."""
        if handle.event is not None:
            handle.event.synchronize()
        return handle.token_ids.tolist()

    def sleep(self, level: int) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them."""
        with computing(self.device, self._num_threads):
            self.weights.leave_device(keep=level == 1)
        self.sleep_level = level
        self._free_step_memory()

    def wake_up(self) -> None:
        """Take the memory again and capture the graphs again. If memory is short, the runner sleeps on and raises."""
        try:
            with computing(self.device, self._num_threads):
                self.weights.return_to_device()
                self._allocate_step_memory()
                self._allocate(self.num_blocks, self.max_model_len)
                self._capture_graphs()
        except BaseException:
            self.sleep(self.sleep_level or 1)
            raise
        self.sleep_level = None

    @property
    def unready(self) -> str | None:
        """Why no step can run now, and what to do; None if one can."""
        return self.weights.explain_missing() if self.sleep_level is None else "this engine sleeps; call wake_up first"

    def close(self) -> None:
        """Give the device's memory back. The runner cannot be used any more; closing twice is fine."""
        if not self.closed:
            self.closed = True
            del self.model, self.weights
            self._free_step_memory()

    def _free_step_memory(self) -> None:
        """Free what runs steps, but not the weights."""
        self.graphs = None
        for name in ("logits", "prefill_graphs", "kv_cache", "tables", "sampler"):
            vars(self).pop(name, None)  # a runner that sleeps has none
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _launch_prefill(self, header: Header, on_host: PacketSections, on_device: PacketSections) -> PendingStep:
        assert not header.num_decode, "a step is prefill or decode: both would write the logits from line 0"
        chunks, num_samples = on_host.chunks.tolist(), header.num_prefill_samples
        step = self._planned(self.tables.prefill_step(header, on_device.chunks, chunks))
        hidden = self.prefill_graphs.get(len(step.token_ids), self.model)(step)
        self._write_logits(step, hidden)
        return PendingStep(
            on_device.chunks[:num_samples, 0].long(),
            [row for row, _, _ in chunks[:num_samples]],
            self.sampler.prompt_logprobs(self.model, hidden, chunks),
        )

    def _decode(self, rows: Tensor, shared_prefixes: SharedPrefixes | None) -> None:
        """Compute one token for each row (num_rows,) int32, from the tables to the logits: a CUDA graph captures it."""
        if shared_prefixes is not None:  # columns of a packet, unless in a graph; kernels take them contiguous
            shared_prefixes = SharedPrefixes(*(column.contiguous() for column in shared_prefixes))
        step = self._planned(self.tables.decode_step(rows, shared_prefixes))
        self._write_logits(step, self.model(step))

    def _planned(self, step: ForwardStep) -> ForwardStep:
        """Return the step with what the attention backends prepare once for all layers."""
        return replace(step, attention=self.backends.plan(step.attention, step.memory))

    def _write_logits(self, step: ForwardStep, hidden: Tensor) -> None:
        if self.tp.memory is not None:
            self.tp.memory.check_even()
        hidden = hidden if step.outputs is None else hidden[step.outputs]
        self.model.compute_logits(hidden, out=self.logits[: len(hidden)])

    # -------- Setting up ----------------------------------------------------------------------------------------------

    def _set_up(self, folder: Path) -> None:
        """Load the model, size and allocate the cache, capture the graphs."""
        started = time.perf_counter()
        config = self.config
        free_at_start = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        longest = self.model_config.longest_sequence(config.max_model_len)
        self.max_step_tokens = memory.max_step_tokens(config, self.model_config)
        self.model = self._load_model(folder, longest)
        self.weights = ModelWeights(self.model)
        self.max_group_rows = self.backends.max_group_rows
        loaded = time.perf_counter()
        self._allocate_step_memory()
        if self.device.type == "cpu" and sum(p.numel() for p in self.model.parameters()) < MIN_THREADED_PARAMETERS:
            self._num_threads = 1

        num_blocks, free_bytes = config.num_kvcache_blocks, memory.CPU_CACHE_BYTES
        if self.device.type == "cuda":
            self._allocate(1, longest)
            free_bytes = self._measure_free_bytes(free_at_start + self.tp.num_shared_bytes)
        block_size = config.kvcache_block_size
        if num_blocks is None:
            num_blocks = memory.num_blocks_in(free_bytes, self.model_config, block_size, self.kv_dtype, self.tp)
        self.num_blocks = num_blocks = self.tp.minimum(num_blocks, self.device)
        self.max_model_len = memory.resolve_max_model_len(config.max_model_len, longest, num_blocks, block_size)
        self._allocate(num_blocks, self.max_model_len)
        sized = time.perf_counter()
        self._capture_graphs()
        captured = time.perf_counter()
        seconds = {"weights": loaded - started, "warm-up": sized - loaded, "graphs": captured - sized}
        description = (
            f"{self.model_config.architecture} with attention by {self.backends.name}, KV cache of {num_blocks} blocks "
            f"of {block_size} tokens in {str(self.kv_dtype)[6:]}, {self.kv_cache.num_bytes / memory.GIB:.2f} GiB"
        )
        self.info = RunnerInfo(self.device, self.dtype, description, seconds)

    @property
    def _uses_graphs(self) -> bool:
        return self.device.type == "cuda" and not self.config.enforce_eager and not self.backends.needs_host

    def _load_model(self, folder: Path, max_positions: int) -> DecoderForCausalLM:
        model_class = get_model_class(self.model_config.architecture)
        with torch.device(self.device), default_dtype(self.dtype):
            model = model_class(self.model_config, max_positions, self.backends, self.tp)
        if self.config.load_format == "dummy":
            fill_with_random_weights(model, self.model_config.initializer_range, self.config.seed + self.tp.rank)
        else:
            load_model(model, folder)
        return model.eval()

    def _allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache, the tables and the sampler."""
        block_size = self.config.kvcache_block_size
        shape = memory.cache_shape(self.model_config, num_blocks, block_size, self.tp)
        self.kv_cache = memory.allocate_kv_cache(shape, self.kv_dtype, self.device)
        self.tables = StepTables(self.config.max_num_seqs, max_model_len, self.kv_cache)
        self.sampler = Sampler(self.tables.token_ids, self.tables.context_lens, self.model_config.vocab_size, self.tp)

    def _allocate_step_memory(self) -> None:
        """Make one buffer for the logits of all decode graphs and of what runs without, and the graphs of prefill."""
        self.logits = self.model.lm_head.weight.new_empty(self.config.max_num_seqs, self.model.lm_head.vocab.size)
        self.prefill_graphs: dict[int, PrefillGraphs] = {}
        # Where rows or lengths limit a step, and not its budget, hardly any has just so many tokens.
        if self._uses_graphs and self.max_step_tokens == self.config.max_num_batched_tokens:
            self.prefill_graphs = capture_largest_prefill(self.model.model, self.max_step_tokens)

    def _capture_graphs(self) -> None:
        if self._uses_graphs:
            sizes, sharing_sizes = graph_sizes(self.config.max_num_seqs), sharing_graph_sizes(self.config.max_num_seqs)
            self.graphs = DecodeGraphs(self._decode, sizes, sharing_sizes, self.device)

    def _measure_free_bytes(self, free_at_start: int) -> int:
        """Return what gpu_memory_utilization leaves for the cache beside weights, tables, the largest step and graphs.

        Runs such steps and captures two graphs; kernels are compiled on the way.
        """
        max_num_seqs = self.config.max_num_seqs
        with compiling_few_rows(self.model.model, graph_sizes(max_num_seqs) if self._uses_graphs else []):
            step_bytes = memory.measure_peak_bytes(self._run_largest_prefills, self.device)
        graph_bytes = 0
        if self._uses_graphs:
            share_prefixes = self.max_group_rows > 1 and self.config.enable_prefix_caching
            count = num_graphs(max_num_seqs, share_prefixes)
            graph_bytes = measure_graph_bytes(self._decode, graph_sizes(max_num_seqs), count, self.device)
            graph_bytes += SHARING_BYTES if share_prefixes else 0
        share = self.config.gpu_memory_utilization
        return memory.grantable_bytes(share, free_at_start, self.device) - step_bytes - graph_bytes

    def _run_largest_prefills(self) -> None:
        """Run prefill steps that need as much memory as any, in the longest sequences, and sample for all rows."""
        longest, rows = self.tables.token_ids.shape[1] - 1, torch.arange(self.config.max_num_seqs, device=self.device)
        for num_tokens in sizes_to_measure(self.max_step_tokens, self.tp):
            lens = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
            metadata = PrefillMetadata.of_whole_prompts(lens, self.tables.block_tables)
            token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
            positions = torch.arange(num_tokens, device=self.device) % longest
            outputs = rows % num_tokens
            step = self._planned(ForwardStep(token_ids, positions, self.kv_cache, metadata, outputs))
            hidden = self.model(step)
            self._write_logits(step, hidden)
            self.sample(PendingStep(torch.full_like(rows, PADDING_ROW), [PADDING_ROW] * len(rows), None))
            del hidden
        # Not run, since their kernels would have to be compiled for users who never ask for them.
        torch.empty(self.sampler.scratch_bytes, dtype=torch.uint8, device=self.device)
