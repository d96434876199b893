"""What a runner does only while it is made: build the model, and measure what steps take beside the cache."""

from collections.abc import Callable
from pathlib import Path

import torch

from nanoinfer.checkpoint.loader import fill_with_random_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import default_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.selection import AttentionBackends
from nanoinfer.models import get_model_class
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.execution import compiling_few_rows
from nanoinfer.runner import memory
from nanoinfer.runner.cuda_graphs import Forward, graph_sizes, measure_graph_bytes, num_graphs

# Kept for graphs of steps that share prefixes; to measure them would compile kernels that many users never need.
SHARING_BYTES = 64 * 2**20  # 512 rows of Qwen3-8B take about 22 MiB


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
