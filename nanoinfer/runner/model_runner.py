"""The part of the engine that touches the device: loads the model, sizes the cache, runs packets.

It composes what stands beside it (cache, tables, graphs) and knows nothing of requests: a packet comes in, token ids
go out. `launch` starts a step and `wait` collects it, so that the caller may do other work in between.
"""

import gc
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.checkpoint.loader import fill_with_random_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import current_device, default_dtype, is_out_of_memory, select_device, select_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.batch import Header, Packet, read_header, split
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.metadata import PrefillMetadata
from nanoinfer.layers.attention.selection import select_backend
from nanoinfer.models import CausalLM, get_model_class
from nanoinfer.runner.cuda_graphs import DecodeGraphs, graph_sizes
from nanoinfer.runner.memory import (
    CPU_CACHE_BYTES,
    GIB,
    allocate_kv_cache,
    cache_shape,
    num_blocks_in,
    resolve_max_model_len,
)
from nanoinfer.runner.step_tables import DeviceState, cumulated
from nanoinfer.sampling.sampler import PromptLogprobs, SampleLogprobs, SpecialRows

logger = logging.getLogger("nanoinfer")


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step: its results on their way to host memory, and the event that says they have come."""

    token_ids: Tensor  # (num_sampled,) int32
    logprobs: list[SampleLogprobs]
    prompt_logprobs: list[PromptLogprobs]
    event: torch.cuda.Event | None  # None on a CPU, where a launched step is done

    def is_done(self) -> bool:
        return self.event is None or self.event.query()


class ModelRunner:
    """Runs packets on one device.

    config: the user's options. model_config: the model's sizes. folder: where its files are.
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
        self.backend = select_backend(
            config.attention_backend, self.device, self.dtype, model_config.head_dim, config.kvcache_block_size
        )
        self.graphs: DecodeGraphs | None = None
        self.closed = False
        try:
            with torch.inference_mode(), current_device(self.device):
                self._prepare(folder)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.device} has too little memory for the model of {folder / 'config.json'} and the largest step "
                f"({error}); lower max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs="
                f"{config.max_num_seqs}, free the memory that other programs hold, or use a smaller model"
            ) from error

    def _prepare(self, folder: Path) -> None:
        """Load the model, size and allocate the cache, capture the graphs."""
        started = time.perf_counter()
        config = self.config
        model_limit = self._model_limit()
        self.model = self._load_model(folder, model_limit)
        # One buffer for all graphs and for what runs without: the logits are the largest thing that a step makes.
        self.logits = self.model.lm_head.weight.new_empty(config.max_num_seqs, self.model.lm_head.vocab.size)
        loaded = time.perf_counter()

        num_blocks = config.num_kvcache_blocks
        if self.device.type == "cuda":
            self._allocate(num_blocks=1, max_model_len=model_limit)
            free_bytes = self._measure_free_bytes()
            num_blocks = num_blocks or self._num_blocks_in(free_bytes)
        num_blocks = self.tp.minimum(num_blocks or self._num_blocks_in(CPU_CACHE_BYTES), self.device)
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, model_limit, num_blocks, config.kvcache_block_size
        )
        self._allocate(num_blocks, self.max_model_len)
        sized = time.perf_counter()
        if self._uses_graphs:
            self.graphs = DecodeGraphs(self._decode, graph_sizes(config.max_num_seqs), self.device)
        logger.info(
            "%s on %s in %s with attention by %s: weights %.1f s, warm-up %.1f s, graphs %.1f s; KV cache of %d blocks "
            "of %d tokens, %.2f GiB; sequences up to %d tokens",
            self.model_config.architecture,
            self.device,
            str(self.dtype).removeprefix("torch."),
            self.backend.name,
            loaded - started,
            sized - loaded,
            time.perf_counter() - sized,
            num_blocks,
            config.kvcache_block_size,
            self.kv_cache.num_bytes / GIB,
            self.max_model_len,
        )

    def launch(self, packet: Packet) -> StepHandle:
        """Start a step. Its token ids come in the packet's order: chunks that yield one, then decode rows."""
        with torch.inference_mode(), current_device(self.device):
            return self._launch(packet)

    def _launch(self, packet: Packet) -> StepHandle:
        header = read_header(packet)
        on_host, on_device = split(packet, header), split(self._to_device(packet), header)
        self.state.apply(header, on_device)
        if self.special or header.num_special:
            self.special.apply(header, on_host, on_device)
        token_ids: list[Tensor] = []
        logprobs: list[SampleLogprobs] = []
        prompt_logprobs: list[PromptLogprobs] = []
        if header.num_chunks:
            host_chunks, num_samples = on_host.chunks.tolist(), header.num_prefill_samples
            hidden, sampled = self._prefill(header, on_device.chunks, host_chunks)
            token_ids.append(sampled)
            if self.special:
                rows = on_device.chunks[:num_samples, 0].long()
                logprobs += self._redraw(rows, [row for row, *_ in host_chunks[:num_samples]], sampled)
                prompt_logprobs = self.special.score(self.model, hidden, host_chunks)
        if header.num_decode:
            decode = self.graphs.replay if self.graphs else self._decode
            token_ids.append(decode(on_device.decode_rows))
            if self.special:
                more = self._redraw(on_device.decode_rows.long(), on_host.decode_rows.tolist(), token_ids[-1])
                first = header.num_prefill_samples
                logprobs += [SampleLogprobs([first + line for line in part.lines], part.best) for part in more]
        sampled = token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
        to_host = sampled.to("cpu", non_blocking=True)  # into pinned memory, before the next replay on the same stream
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return StepHandle(to_host, logprobs, prompt_logprobs, event)

    def wait(self, handle: StepHandle) -> list[int]:
        """The token ids of a launched step."""
        if handle.event is not None:
            handle.event.synchronize()
        return handle.token_ids.tolist()

    def close(self) -> None:
        """Give the device's memory back. The runner cannot be used any more."""
        self.closed = True
        self.graphs = None
        del self.model, self.logits, self.kv_cache, self.state, self.special
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.num_blocks

    @property
    def _uses_graphs(self) -> bool:
        return self.device.type == "cuda" and not self.config.enforce_eager and not self.backend.needs_host

    def _prefill(self, header: Header, chunks: Tensor, host_chunks: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Compute the chunks, and sample for those that end their prompt: all hidden states, and the ids."""
        inputs = self.state.prefill_inputs(chunks, host_chunks, header)
        hidden = self.model(inputs.token_ids, inputs.positions, self.kv_cache, inputs.metadata)
        # Only the last chunk of a step may be cut short, so those that sample are the first ones.
        num_samples = header.num_prefill_samples
        last_tokens = inputs.metadata.cu_query_lens[1 : num_samples + 1].long() - 1
        return hidden, self._sample(hidden[last_tokens], chunks[:num_samples, 0].long())

    def _decode(self, rows: Tensor) -> Tensor:
        """One token for each row (num_rows,) int32, from the tables and into them: what a CUDA graph captures."""
        rows = rows.long()
        inputs = self.state.decode_inputs(rows)
        metadata = self.backend.plan(inputs.metadata, self.kv_cache)
        hidden = self.model(inputs.token_ids, inputs.positions, self.kv_cache, metadata)
        return self._sample(hidden, rows)

    def _sample(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Draw and enter the next token of each row; hidden: (num_rows, hidden_size)."""
        logits = self.model.compute_logits(hidden, out=self.logits[: len(rows)])
        return self.state.sample(logits, rows, self.model.lm_head.vocab.start)

    def _redraw(self, rows: Tensor, host_rows: list[int], token_ids: Tensor) -> list[SampleLogprobs]:
        """Do what special rows ask for, from the logits that `token_ids` were just drawn from."""
        return self.special.redraw(self.logits[: len(rows)], rows, host_rows, token_ids)

    def _to_device(self, packet: Packet) -> Tensor:
        on_host = torch.from_numpy(packet)
        if self.device.type == "cpu":
            return on_host
        # PyTorch keeps pinned memory until the copy is done, so the next packet cannot overwrite this one.
        return on_host.pin_memory().to(self.device, non_blocking=True)

    def _model_limit(self) -> int:
        """The longest sequence asked for, or that the model's positions allow."""
        limit, requested = self.model_config.max_model_len, self.config.max_model_len
        if requested is not None and requested > limit:
            raise ConfigError(
                f"max_model_len={requested} is above the model's own limit of {limit} tokens; use at most {limit}, or "
                "a config.json with RoPE scaling"
            )
        return requested or limit

    def _load_model(self, folder: Path, max_positions: int) -> CausalLM:
        model_class = get_model_class(self.model_config.architecture)
        with torch.device(self.device), default_dtype(self.dtype):
            model = model_class(self.model_config, max_positions, self.backend, self.tp)
        if self.config.load_format == "dummy":
            fill_with_random_weights(model, self.model_config.initializer_range, self.config.seed + self.tp.rank)
        else:
            load_model(model, folder)
        return model.eval()

    def _allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Make the cache and the tables."""
        block_size = self.config.kvcache_block_size
        shape = cache_shape(self.model_config, num_blocks, block_size, self.tp)
        self.kv_cache = allocate_kv_cache(shape, self.dtype, self.device)
        self.state = DeviceState(self.config.max_num_seqs, max_model_len, block_size, self.device, self.tp)
        self.special = SpecialRows(self.state, self.model_config.vocab_size)

    def _num_blocks_in(self, free_bytes: int) -> int:
        return num_blocks_in(free_bytes, self.model_config, self.config.kvcache_block_size, self.dtype, self.tp)

    def _measure_free_bytes(self) -> int:
        """What gpu_memory_utilization leaves for the cache beside weights, tables, the largest step and the graphs.

        Runs that step and captures two graphs; compilation is done on the way.
        """
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._run_largest_prefill()
        step_bytes = torch.cuda.max_memory_allocated(self.device) - before
        cache = self.kv_cache.layer(0)
        bytes_per_token = 2 * cache.k[0, :, 0].numel() * self.dtype.itemsize
        step_bytes += self.backend.scratch_bytes(bytes_per_token, self.state.token_ids.shape[1])
        graph_bytes = self._measure_graph_bytes() if self._uses_graphs else 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total * self.config.gpu_memory_utilization) - (total - free) - step_bytes - graph_bytes

    def _run_largest_prefill(self) -> None:
        """As many prompt tokens as a step may have, in sequences as long as they may be, and all rows special."""
        num_tokens, longest = self.config.max_num_batched_tokens, self.state.token_ids.shape[1] - 1
        lens = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
        cu_lens = cumulated(torch.tensor(lens, dtype=torch.int32, device=self.device))
        metadata = PrefillMetadata(
            query_lens=tuple(lens),
            context_lens=tuple(lens),
            cu_query_lens=cu_lens,
            cu_context_lens=cu_lens,
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=self.device),
            block_tables=self.state.block_tables[: len(lens)],
        )
        token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        positions = torch.arange(num_tokens, device=self.device) % longest
        hidden = self.model(token_ids, positions, self.kv_cache, metadata)
        rows = torch.arange(self.config.max_num_seqs, device=self.device)
        self._sample(hidden[rows % num_tokens], rows)
        del hidden
        # Not run, since their kernels would have to be compiled for users who never ask for them.
        torch.empty(self.special.scratch_bytes, dtype=torch.uint8, device=self.device)

    def _measure_graph_bytes(self) -> int:
        """The memory of all graphs, from capturing the largest (which the others share) and one small one more."""
        sizes = graph_sizes(self.config.max_num_seqs)
        used = []
        for trial in (sizes[-1:], [*sizes[-1:], *sizes[:1]]):
            torch.cuda.empty_cache()
            free_before, _ = torch.cuda.mem_get_info(self.device)
            graphs = DecodeGraphs(self._decode, trial, self.device)
            torch.cuda.empty_cache()
            used.append(free_before - torch.cuda.mem_get_info(self.device)[0])
            del graphs
        return used[0] + max(0, used[1] - used[0]) * (len(sizes) - 1)
