"""`nanoinfer bench kernels`: attention, matrix products, experts and linear attention on a GPU.

It prints the tables of docs/performance.md. Each figure is the median over replays of a CUDA graph whose calls all read
other weights or another layer's cache, as in a decode step, so that nothing is found in the L2 cache.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import comb

import torch
from torch import Tensor

from nanoinfer.bench.floor import Rates
from nanoinfer.bench.report import describe_source, print_row
from nanoinfer.bench.throughput import describe_machine
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.backend_selection import select_backend
from nanoinfer.layers.attention.kv_cache import KVCache, LayerCache, num_cache_bytes
from nanoinfer.layers.attention.metadata import DecodeMetadata, SharedPrefixes
from nanoinfer.ops.kv_cache.spec import quantize_vectors

DTYPE = torch.bfloat16
RATES = Rates(4.39e12, 790e12, 2, "an H200")  # what the floors are at
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = (16, 32), 8, 128, 256
VOCAB_SIZE = 151936
MODELS = {  # hidden size, intermediate size, query heads, splits of o's and down's sums
    "0.6B": (1024, 3072, 16, 4),
    "4B": (2560, 9728, 32, 4),
    "8B": (4096, 12288, 32, 2),
}
MOE_MODELS = {  # hidden size, inner size of an expert, experts, experts per token
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
}
MOE_TOKENS = (1, 4, 16, 64, 128, 256, 1024, 8192)


def run() -> None:
    """Print all tables. Raises ConfigError where there is no GPU."""
    check_gpus(1)
    with torch.inference_mode():
        decode_attention()
        shared_prefix()
        prefill_attention()
        products()
        experts()
        linear_attention()


def check_gpus(count: int) -> None:
    """Print which GPUs are to be timed. Raises ConfigError where there are fewer."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < count == 1:
        raise ConfigError("kernels are timed on a GPU, and PyTorch sees no CUDA GPU here; run this where there is one")
    if num_gpus < count:
        raise ConfigError(f"--gpus {count}: PyTorch sees {num_gpus} CUDA GPUs; run it where there are more")
    print(describe_source(describe_machine("cuda")))


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Return the time of one of these calls, inside a CUDA graph of them all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def decode_attention() -> None:
    """Print TB/s of keys, values and scales in each format, for contexts of 100 to 2,048 tokens, or one of 32,768."""
    from nanoinfer.ops.decode_attention.triton import has_large_tiles, paged_decode_attention, plan_decode

    loads = [(rows, 100, 2048) for rows in (256, 128, 64, 32, 16, 8, 1)] + [(1, 32768, 32768)]
    num_layers, num_blocks, scale = 8, 2200, HEAD_DIM**-0.5
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    print_row("decode attention, TB/s; batch", *(rows for rows, _, _ in loads[:-1]), "1, with 32k")
    for dtype, heads in [(dtype, heads) for dtype in (DTYPE, torch.int8, torch.float8_e4m3fn) for heads in HEADS]:
        layers, figures = [random_cache(shape, dtype) for _ in range(num_layers)], []
        caches = [(layer.k, layer.v, layer.k_scales, layer.v_scales) for layer in layers]
        for rows, shortest, longest in loads:
            order = torch.randperm(rows, device="cuda")
            lens = torch.linspace(shortest, longest, rows + 2, device="cuda")[1:-1][order].int()
            width = -(-longest // BLOCK_SIZE)
            tables = torch.randperm(num_blocks, device="cuda")[: rows * width].view(rows, width).int()
            large_tiles = has_large_tiles(dtype != DTYPE, heads // KV_HEADS)
            plan = plan_decode(lens, tables, BLOCK_SIZE, HEAD_DIM, large_tiles=large_tiles)
            q = randn(rows, heads, HEAD_DIM)
            time = microseconds([partial(paged_decode_attention, q, *cache, *plan, scale) for cache in caches])
            num_bytes = int(lens.sum()) * num_cache_bytes((KV_HEADS, HEAD_DIM), dtype)
            figures.append(f"{num_bytes / time / 1e6:.2f}")
        print_row(f"{heads} query heads, {str(dtype).removeprefix('torch.')}", *figures)
        del layers, caches


def random_cache(shape: tuple[int, ...], dtype: torch.dtype) -> LayerCache:
    if dtype == DTYPE:
        return LayerCache(randn(*shape), randn(*shape))
    (k, k_scales), (v, v_scales) = (quantize_vectors(randn(*shape), dtype) for _ in range(2))
    return LayerCache(k, v, k_scales, v_scales)


def shared_prefix() -> None:
    """Print microseconds of decode attention by 256 rows with 2,048 tokens in common and 100 to 1,024 of their own."""
    from nanoinfer.layers.attention.triton import TritonBackend
    from nanoinfer.ops.decode_attention.triton import shared_prefix_attention

    rows, num_shared, num_own = 256, 2048 // BLOCK_SIZE, 1024 // BLOCK_SIZE  # blocks
    num_layers, num_blocks = 16, num_shared + rows * num_own  # so many that their prefixes do not fit into the L2 cache
    cache = KVCache(*(randn(num_layers, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM) for _ in range(2)))
    layers = [cache.layer(index) for index in range(num_layers)]
    own_lens = torch.linspace(100, 1024, rows, device="cuda")[torch.randperm(rows, device="cuda")].int()
    shared, own = torch.randperm(num_blocks, device="cuda").int().split((num_shared, rows * num_own))
    tables = torch.cat((shared.expand(rows, -1), own.view(rows, num_own)), dim=1)
    plain = DecodeMetadata(torch.empty(0), own_lens + num_shared * BLOCK_SIZE, tables)
    num_bytes = (num_shared * BLOCK_SIZE + int(own_lens.sum())) * KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize
    print_row("decode with a shared prefix, us", "each row for itself", "first pass", "both passes", "their floor")
    for heads in HEADS:
        backend, q = TritonBackend(attention_spec(heads, HEAD_DIM)), randn(rows, heads, HEAD_DIM)
        group_rows = torch.zeros_like(own_lens)
        group_rows[:: backend.max_prefix_group_rows] = backend.max_prefix_group_rows
        prefixes = SharedPrefixes(torch.full_like(own_lens, num_shared), group_rows)
        apart, together = (backend.plan(replace(plain, shared_prefixes=its), cache) for its in (None, prefixes))
        groups = together.plans[backend.spec].groups
        assert groups is not None, "full attention reads shared prefixes once"
        first_pass = *groups, prefixes.num_group_rows, backend.spec.scale
        ways = (
            [partial(backend.decode, q, layer, apart) for layer in layers],
            [partial(shared_prefix_attention, q, layer.k, layer.v, None, None, *first_pass) for layer in layers],
            [partial(backend.decode, q, layer, together) for layer in layers],
        )
        times = [f"{microseconds(calls):.1f}" for calls in ways]
        print_row(f"{heads} query heads", *times, f"{num_bytes / RATES.bandwidth * 1e6:.1f}")


def prefill_attention() -> None:
    """Print TFLOP/s of causal attention in prompts of 1,024 tokens, and in one of 32,768, also with a window."""
    from nanoinfer.ops.prefill_attention.triton import paged_prefill_attention, plan_prefill

    columns = "ours", "Hopper's own", "flash-attn", "flash-attn, paged"
    print_row("prefill attention, TFLOP/s", "query heads", "head size", *columns)
    shapes = [(heads, head_dim) for heads in HEADS for head_dim in (64, 128, 256)]
    for num_seqs, length, window in ((16, 1024, None), (1, 32768, None), (1, 32768, 1024)):
        num_blocks, lens = num_seqs * length // BLOCK_SIZE, (length,) * num_seqs
        tables = torch.randperm(num_blocks, device="cuda").int().view(num_seqs, -1)
        cu_lens = torch.arange(0, num_seqs + 1, dtype=torch.int32, device="cuda") * length
        for heads, head_dim in shapes:
            spec = attention_spec(heads, head_dim, window)
            tiles = plan_prefill(lens, lens, spec.group_size, tables.device)
            q_shape, cache_shape = (num_seqs * length, heads, head_dim), (num_blocks, KV_HEADS, BLOCK_SIZE, head_dim)
            layers = [(randn(*q_shape), randn(*cache_shape), randn(*cache_shape)) for _ in range(4)]
            scales, scale = (None, None), spec.scale  # those of a cache in 8 bits, and that of the scores
            ways: list[list[Callable[[], Tensor]]] = [[] for _ in columns]
            ways[0] = [partial(paged_prefill_attention, *qkv, *scales, tiles, tables, scale, window) for qkv in layers]
            if hopper := find_hopper_kernel(spec):
                options = tiles, torch.zeros(2, dtype=torch.int32, device="cuda"), tables, cu_lens, scale
                ways[1] = [partial(hopper, *qkv, *options) for qkv in layers]
            if flash_attn := find_flash_attn(spec):
                # It reads the same memory as tokens that lie end to end, then by way of blocks.
                contiguous = [(q, *(x.view(-1, KV_HEADS, head_dim) for x in kv)) for q, *kv in layers]
                paged = [(q, *(x.transpose(1, 2) for x in kv)) for q, *kv in layers]
                for way, qkvs, block_tables in ((2, contiguous, None), (3, paged, tables)):
                    ends = cu_lens, cu_lens, block_tables, length, length, spec
                    ways[way] = [partial(flash_attn, *qkv, *ends) for qkv in qkvs]
            num_flops = 4 * heads * head_dim * num_seqs * count_pairs(length, window)
            figures = [f"{num_flops / microseconds(calls) / 1e6:.0f}" if calls else "-" for calls in ways]
            prompts = f"{num_seqs} x {length:,}" + (f", window {window:,}" if window else "")
            print_row(prompts, heads, head_dim, *figures)


def attention_spec(heads: int, head_dim: int, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads, KV_HEADS, head_dim, head_dim**-0.5, window)


def find_hopper_kernel(spec: AttentionSpec) -> Callable[..., Tensor] | None:
    """Return Hopper's own kernel for prompts, or None where it does not serve."""
    backend = select_backend("triton", torch.device("cuda"), DTYPE, spec, BLOCK_SIZE)
    if not getattr(backend, "has_hopper_kernel", False):
        return None
    from nanoinfer.ops.prefill_attention.hopper import hopper_prefill_attention

    return hopper_prefill_attention


def find_flash_attn(spec: AttentionSpec) -> Callable[..., Tensor] | None:
    """Return flash-attn's function for prompts, or None where it is not installed, or was built without this spec."""
    try:
        select_backend("flash_attn", torch.device("cuda"), DTYPE, spec, BLOCK_SIZE)
    except ConfigError:
        return None
    from nanoinfer.layers.attention.flash_attn import varlen_attention

    return varlen_attention


def count_pairs(length: int, window: int | None) -> int:
    """Return how many pairs a prompt has of a token and one that it attends to, itself included."""
    visible = min(window or length, length)
    return comb(visible + 1, 2) + (length - visible) * visible


def products() -> None:
    """Print microseconds of each product by one call of cuBLAS, of o and down (with split-K) as well, and the floor."""
    print_row("products, us / floor", "rows", "qkv", "o (split-K)", "gate, up", "down (split-K)", "lm_head")
    for name, (hidden, intermediate, heads, num_splits) in MODELS.items():
        shapes = {
            "qkv": (hidden, (heads + 2 * KV_HEADS) * HEAD_DIM),
            "o": (heads * HEAD_DIM, hidden),
            "gate, up": (hidden, 2 * intermediate),
            "down": (intermediate, hidden),
            "lm_head": (hidden, VOCAB_SIZE),
        }
        table: dict[int, list[str]] = {rows: [] for rows in (1, 8, 16, 64, 128, 192, 256, 512)}
        for product, (inputs, outputs) in shapes.items():
            num_weights = max(2, min(28, 600 * 2**20 // (2 * inputs * outputs)))  # more than the L2 cache holds
            weights = [randn(outputs, inputs) * 0.02 for _ in range(num_weights)]
            for rows, figures in table.items():
                x = randn(rows, inputs)
                figure = f"{microseconds([partial(torch.mm, x, w.t()) for w in weights]):.1f}"
                if product in ("o", "down") and rows <= 256:
                    xs = x.view(rows, num_splits, -1).transpose(0, 1)
                    ws = [w.view(outputs, num_splits, -1).permute(1, 2, 0) for w in weights]
                    figure += f" ({microseconds([partial(torch.bmm, xs, w) for w in ws]):.1f})"
                figures.append(f"{figure} / {floor_microseconds(rows, inputs, outputs):.1f}")
            del weights
        for rows, figures in table.items():
            print_row(name, rows, *figures)


def experts() -> None:
    """Print microseconds of the MLPs of a layer's experts, which tokens choose at random, and the floor."""
    from nanoinfer.ops.experts.triton import expert_mlp

    print_row("experts, us / floor; tokens", *MOE_TOKENS)
    for name, (hidden, inner, num_experts, num_choices) in MOE_MODELS.items():
        layers = [(randn(num_experts, 2 * inner, hidden), randn(num_experts, hidden, inner)) for _ in range(4)]
        figures = []
        for num_tokens in MOE_TOKENS:
            x, calls, num_read = randn(num_tokens, hidden), [], 0
            for layer in layers:
                weights, ids = torch.rand(num_tokens, num_experts, device="cuda").topk(num_choices)
                calls.append(partial(expert_mlp, x, *layer, ids.int(), weights))
                num_read += len(ids.unique())
            num_bytes = DTYPE.itemsize * 3 * hidden * inner * num_read / len(layers)
            num_flops = 2 * 3 * hidden * inner * num_tokens * num_choices
            floor = max(num_bytes / RATES.bandwidth, num_flops / RATES.matrix_rate) * 1e6
            figures.append(f"{microseconds(calls):.1f} / {floor:.1f}")
        print_row(name, *figures)


def linear_attention() -> None:
    """Print microseconds of what a layer of Qwen3.5-9B computes beside its products, and the least that reading takes.

    A prefill step of 30 prompts is not in a CUDA graph: what the host prepares is a part of it.
    """
    from nanoinfer.ops.delta_rule.triton import gated_delta_prefill, gated_delta_step

    key_heads, value_heads, head_dim, width, num_rows = 16, 32, 128, 4, 256
    channels, values = (2 * key_heads + value_heads) * head_dim, value_heads * head_dim
    lens = (547,) * 4 + (546,) * 26  # 16,384 tokens
    layers = []
    for _ in range(2):  # one has more states than fit into the L2 cache
        matrices = torch.zeros(num_rows, value_heads, head_dim, head_dim, device="cuda")
        gates = torch.zeros(value_heads, device="cuda")
        weights = randn(channels, width), gates, gates, randn(head_dim)
        layers.append((matrices, randn(num_rows, width, channels), *weights))

    def inputs_of(num_tokens: int) -> tuple[Tensor, Tensor]:
        return randn(num_tokens, channels + values), randn(num_tokens, 2 * value_heads)

    of_rows = inputs_of(num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    positions = torch.ones(num_rows, dtype=torch.int64, device="cuda")
    of_prompts = *inputs_of(sum(lens)), rows[: len(lens)], lens, lens
    prefill = [partial(gated_delta_prefill, *of_prompts, *layer, eps=1e-6) for layer in layers]
    decode = [partial(gated_delta_step, *of_rows, rows, positions, *layer, eps=1e-6) for layer in layers]
    # A prefill step reads what the products made, and writes outputs; a decode step reads and writes the states.
    prefill_bytes = DTYPE.itemsize * sum(lens) * (channels + 2 * values) + layers[0][0].nbytes * len(lens) // num_rows
    times = eager_microseconds(prefill), microseconds(decode)
    floors = prefill_bytes / RATES.bandwidth * 1e6, 2 * layers[0][0].nbytes / RATES.bandwidth * 1e6
    print_row("linear attention, us / floor", f"prefill, {sum(lens):,} tokens", f"decode, {num_rows} rows")
    print_row("Qwen3.5-9B", *(f"{time:.1f} / {floor:.1f}" for time, floor in zip(times, floors, strict=True)))


def eager_microseconds(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Return the time of one of these calls without a CUDA graph, the host's part included where it is longer."""
    for call in calls:
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        for call in calls:
            call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / (repeats * len(calls))


def floor_microseconds(rows: int, inputs: int, outputs: int) -> float:
    """Return the least time of a product: that of its bytes, or that of its FLOPs."""
    num_bytes = DTYPE.itemsize * (inputs * outputs + rows * (inputs + outputs))
    return max(num_bytes / RATES.bandwidth, 2 * rows * inputs * outputs / RATES.matrix_rate) * 1e6
