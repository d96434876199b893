"""What a runner does only while it is made: load the model, measure what steps take, and size the cache by that."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.checkpoint.loader import fill_with_random_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import default_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.limits import RunnerLimits
from nanoinfer.layers.attention.layer_groups import LayerGroups
from nanoinfer.layers.attention.metadata import KVCache, PrefillMetadata
from nanoinfer.layers.attention.selection import AttentionBackends
from nanoinfer.layers.linear_attention.states import StateShape
from nanoinfer.layers.routed_experts import RoutedExperts
from nanoinfer.models import get_model_class
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.execution import compiling_few_rows
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.runner import memory
from nanoinfer.runner.cuda_graphs import Forward, graph_sizes, measure_graph_bytes, num_graphs
from nanoinfer.runner.step_tables import PADDING_ROW, StepTables

# Kept for graphs of steps that share prefixes; to measure them would compile kernels that many users never need.
SHARING_BYTES = 64 * 2**20  # 512 rows of Qwen3-8B take about 22 MiB
MIN_THREADED_PARAMETERS = 2**24  # threads slow the steps of smaller models down


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What was loaded, in words, and how many seconds each part of that took."""

    device: torch.device
    dtype: torch.dtype
    description: str
    start_seconds: dict[str, float]


def build_model(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    backends: AttentionBackends,
    tp: TensorParallel,
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DecoderForCausalLM:
    """Return the model with its weights, or random ones, on a device."""
    with torch.device(device), default_dtype(dtype):
        model = get_model_class(model_config.architecture)(model_config, max_positions, backends, tp)
    if config.load_format == "dummy":
        fill_with_random_weights(model, model_config.initializer_range, config.seed + tp.rank)
    else:
        load_model(model, folder)
    return model.eval()


def num_cpu_threads(model: DecoderForCausalLM) -> int | None:
    """Return how many threads the steps of a model on a CPU have; None leaves the number as it is."""
    return 1 if sum(p.numel() for p in model.parameters()) < MIN_THREADED_PARAMETERS else None


def limit_recurrent_states(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    tp: TensorParallel,
    free_at_start: int,
    device: torch.device,
) -> tuple[int, int]:
    """Return max_num_seqs and num_snapshots: as many as there is memory for, where the model has recurrent states."""
    shape, max_num_seqs, free_bytes = (
        StateShape.of(model_config, dtype, tp),
        config.max_num_seqs,
        memory.CPU_CACHE_BYTES,
    )
    if shape is None:
        return max_num_seqs, 0
    if device.type == "cuda":
        free_bytes = memory.grantable_bytes(config.gpu_memory_utilization, free_at_start, device)
        free_bytes = tp.minimum(free_bytes, device)
        max_num_seqs = shape.max_rows(max_num_seqs, free_bytes)
    return max_num_seqs, shape.num_snapshots(max_num_seqs, free_bytes) if config.enable_prefix_caching else 0


def largest_prefill(tables: StepTables, rows: Tensor, num_tokens: int) -> ForwardStep:
    """Return a prefill step of so many tokens, in the longest sequences, that has logits for all `rows`."""
    device, longest = rows.device, tables.token_ids.shape[1] - 1
    lens = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
    attention, *windowed = (PrefillMetadata.of_whole_prompts(lens, x) for x in tables.tables_of_groups)
    return ForwardStep(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=torch.arange(num_tokens, device=device) % longest,
        rows=rows.new_full((len(lens),), PADDING_ROW),
        outputs=rows % num_tokens,
        memory=tables.memory,
        attention=attention,
        windowed_attention=tuple(windowed),
        states=tables.states,
    )


def measure_free_bytes(
    config: EngineConfig,
    decoder: Decoder,
    run_largest_prefills: Callable[[], None],
    decode: Forward | None,
    shares_prefixes: bool,
    free_at_start: int,
) -> int:
    """Return what gpu_memory_utilization leaves for the cache beside weights, tables, the largest step and graphs.

    Runs such steps and captures two graphs; kernels are compiled on the way. decode: what graphs capture; None without
    graphs. shares_prefixes: whether there are graphs of steps whose rows share prefixes, too.
    """
    device, sizes = decoder.embed_tokens.weight.device, graph_sizes(config.max_num_seqs)
    with compiling_few_rows(decoder, sizes if decode else []):
        step_bytes = memory.measure_peak_bytes(run_largest_prefills, device)
    graph_bytes = 0
    if decode:
        count = num_graphs(config.max_num_seqs, shares_prefixes)
        graph_bytes = measure_graph_bytes(decode, sizes, count, device) + (SHARING_BYTES if shares_prefixes else 0)
    return memory.grantable_bytes(config.gpu_memory_utilization, free_at_start, device) - step_bytes - graph_bytes


def with_sized_cache(
    limits: RunnerLimits,
    config: EngineConfig,
    model_config: ModelConfig,
    groups: LayerGroups,
    kv_dtype: torch.dtype,
    tp: TensorParallel,
    device: torch.device,
    free_bytes: int,
) -> RunnerLimits:
    """Return the limits with as many blocks as fit into so many bytes, and the longest sequence that these hold."""
    block_size, num_blocks = config.kvcache_block_size, config.num_kvcache_blocks
    if num_blocks is None:
        moe = model_config.moe if config.enable_return_routed_experts else None
        routing_bytes = RoutedExperts.num_bytes(moe, block_size) if moe else 0
        num_blocks = memory.num_blocks_in(free_bytes, model_config, groups, block_size, kv_dtype, tp, routing_bytes)
        if limits.whole_prompts:  # which are in use for a step, and the next one is planned meanwhile
            blocks_of_step = -(-memory.max_step_tokens(config, model_config) // block_size) + limits.max_num_seqs
            num_blocks = min(num_blocks, 2 * blocks_of_step)
    else:
        num_blocks = groups.num_pages_of(num_blocks)
    num_blocks = tp.minimum(num_blocks, device)
    capacity = groups.max_tokens(num_blocks, block_size, config.max_num_batched_tokens)
    max_model_len = memory.resolve_max_model_len(
        config.max_model_len, limits.max_model_len, capacity, num_blocks, block_size
    )
    return replace(limits, num_blocks=num_blocks, max_model_len=max_model_len)


def describe(
    config: EngineConfig,
    model_config: ModelConfig,
    backends: AttentionBackends,
    groups: LayerGroups,
    kv_cache: KVCache,
) -> str:
    """Say what was loaded, for the log."""
    num_blocks, block_size = kv_cache.num_blocks, kv_cache.block_size
    return (
        f"{model_config.architecture} with attention by {backends.name}, KV cache of {num_blocks} blocks of "
        f"{block_size} tokens {groups.describe(num_blocks, block_size, config.max_num_batched_tokens)}in "
        f"{str(kv_cache.k.dtype)[6:]}, {kv_cache.num_bytes / memory.GIB:.2f} GiB"
    )
