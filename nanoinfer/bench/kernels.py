"""`nanoinfer bench kernels`: attention, matrix products and experts in 16, 8 and 4 bits, linear attention, on a GPU.

It prints the tables of docs/kernels.md. Each figure is the median over replays of a CUDA graph whose calls all read
other weights or another layer's cache, as in a decode step, so that nothing is found in the L2 cache.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.bench.floor import Rates, count_pairs, median_seconds
from nanoinfer.bench.report import describe_machine, describe_source, print_row
from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.quantization_config import QuantizationConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError
from nanoinfer.integers import ceil_div
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata, SharedPrefixes
from nanoinfer.layers.experts import Experts, Routing
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.ops.common.fp8_format import RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.kv_cache.spec import LayerCache, quantize_vectors
from nanoinfer.ops.norms.spec import add_rms_norm, add_rms_norm_to_fp8
from nanoinfer.quantization.fp8_linear import Fp8Config
from nanoinfer.quantization.int4.formats import Int4Config
from nanoinfer.quantization.method_selection import quantize_layer

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
RATES = Rates(4.39e12, 790e12, 2, "an H200", 1400e12)  # what the floors are at; in FP8 with a scale for each row
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = (16, 32), 8, 128, 256
VOCAB_SIZE = 151936
NUM_REPLAYS = 7  # of which the median counts
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


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print all tables of a quantization, or of several GPUs. Raises ConfigError where no GPU can compute them."""
    if args.gpus > 1 and args.quantization is None:
        from nanoinfer.bench import all_reduces

        all_reduces.run(args.gpus)
        return {}
    check_gpus(1)
    if args.quantization == "fp8" and not has_fp8_products(DEVICE):
        raise ConfigError("--quantization fp8 times FP8 products, which this machine has not; leave it out")
    with torch.inference_mode():
        if args.quantization is None:
            decode_attention()
            several_tokens()
            shared_prefix()
            prefill_attention()
        if args.quantization == "fp8":
            rounding()
        for case in FORMATS[args.quantization]:
            products(case)
            if args.quantization != "int4":
                experts(case)
        if args.quantization is None:
            linear_attention()
    return {}


def check_gpus(count: int) -> None:
    """Print which GPUs are to be timed. Raises ConfigError where there are fewer."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < count == 1:
        raise ConfigError("kernels are timed on a GPU, and PyTorch sees no CUDA GPU here; run this where there is one")
    if num_gpus < count:
        raise ConfigError(f"--gpus {count}: PyTorch sees {num_gpus} CUDA GPUs; run it where there are more")
    print(describe_source(describe_machine("cuda")))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of one of these calls, inside a CUDA graph of them all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def decode_attention() -> None:
    """Print TB/s of keys, values and scales in each format, for contexts of 100 to 2,048 tokens, or one of 32,768."""
    from nanoinfer.layers.attention.triton import TritonBackend

    loads = [(rows, 100, 2048) for rows in (256, 128, 64, 32, 16, 8, 1)] + [(1, 32768, 32768)]
    num_blocks = 2200
    print_row("decode attention, TB/s; batch", *(rows for rows, _, _ in loads[:-1]), "1, with 32k")
    for dtype, heads in [(dtype, heads) for dtype in (DTYPE, torch.int8, torch.float8_e4m3fn) for heads in HEADS]:
        backend, figures = TritonBackend(attention_spec(heads, HEAD_DIM)), []
        caches = [random_caches(1, num_blocks, HEAD_DIM, dtype)[0] for _ in range(8)]
        for rows, shortest, longest in loads:
            metadata = random_contexts(rows, shortest, longest, num_blocks)
            step = backend.plan(metadata, caches[0])
            q = randn(rows, heads, HEAD_DIM)
            time = microseconds([partial(backend.decode, q, cache, step) for cache in caches])
            num_bytes = int(metadata.context_lens.sum()) * bytes_of_token(dtype)
            figures.append(f"{num_bytes / time / 1e6:.2f}")
        print_row(f"{heads} query heads, {str(dtype).removeprefix('torch.')}", *figures)
        del caches


def random_contexts(rows: int, shortest: int, longest: int, num_blocks: int) -> DecodeMetadata:
    """Return a decode step of rows with contexts between two lengths, in random order and blocks."""
    order = torch.randperm(rows, device=DEVICE)
    lens = torch.linspace(shortest, longest, rows + 2, device=DEVICE)[1:-1][order].int()
    width = ceil_div(longest, BLOCK_SIZE)
    tables = torch.randperm(num_blocks, device=DEVICE)[: rows * width].view(rows, width).int()
    return DecodeMetadata(torch.empty(0), lens, tables)


def several_tokens() -> None:
    """Print microseconds of decode attention by rows of 1, 4 and 8 tokens, with contexts of 100 to 2,048 tokens."""
    from nanoinfer.layers.attention.triton import TritonBackend

    num_blocks, batches, row_tokens = 2200, (256, 16, 1), (1, 4, 8)
    print_row("decode attention, us; batch x tokens", *(f"{rows} x {k}" for rows in batches for k in row_tokens))
    for dtype, heads in [(dtype, heads) for dtype in (DTYPE, torch.int8) for heads in HEADS]:
        backend, figures = TritonBackend(attention_spec(heads, HEAD_DIM)), []
        caches = [random_caches(1, num_blocks, HEAD_DIM, dtype)[0] for _ in range(8)]
        for rows in batches:
            metadata = random_contexts(rows, 100, 2040, num_blocks)
            for k in row_tokens:
                if k > 1:
                    metadata = replace(metadata, num_tokens=k, num_row_tokens=torch.full_like(metadata.context_lens, k))
                step, q = backend.plan(metadata, caches[0]), randn(rows * k, heads, HEAD_DIM)
                calls = [partial(backend.decode, q, cache, step) for cache in caches]
                figures.append(f"{microseconds(calls):.1f}")
        print_row(f"{heads} query heads, {str(dtype).removeprefix('torch.')}", *figures)
        del caches


def bytes_of_token(dtype: torch.dtype) -> int:
    return BlockLayout.of_kv(KV_HEADS, HEAD_DIM).num_bytes(1, dtype)


def random_caches(num_layers: int, num_blocks: int, head_dim: int, dtype: torch.dtype = DTYPE) -> list[LayerCache]:
    keys, values = (randn(num_layers, num_blocks, KV_HEADS, BLOCK_SIZE, head_dim) for _ in range(2))
    if dtype == DTYPE:
        return [LayerCache(k, v) for k, v in zip(keys, values, strict=True)]
    (k, k_scales), (v, v_scales) = (quantize_vectors(x, dtype) for x in (keys, values))
    return [LayerCache(*sides) for sides in zip(k, v, k_scales, v_scales, strict=True)]


def shared_prefix() -> None:
    """Print microseconds of decode attention by 256 rows with 2,048 tokens in common and 100 to 1,024 of their own."""
    from nanoinfer.layers.attention.triton import TritonBackend
    from nanoinfer.ops.decode_attention.triton import shared_prefix_attention

    rows, num_shared, num_own = 256, 2048 // BLOCK_SIZE, 1024 // BLOCK_SIZE  # blocks
    num_layers, num_blocks = 16, num_shared + rows * num_own  # so many that their prefixes do not fit into the L2 cache
    layers = random_caches(num_layers, num_blocks, HEAD_DIM)
    own_lens = torch.linspace(100, 1024, rows, device=DEVICE)[torch.randperm(rows, device=DEVICE)].int()
    shared, own = torch.randperm(num_blocks, device=DEVICE).int().split((num_shared, rows * num_own))
    tables = torch.cat((shared.expand(rows, -1), own.view(rows, num_own)), dim=1)
    plain = DecodeMetadata(torch.empty(0), own_lens + num_shared * BLOCK_SIZE, tables)
    num_bytes = (num_shared * BLOCK_SIZE + int(own_lens.sum())) * bytes_of_token(DTYPE)
    print_row("decode with a shared prefix, us", "each row for itself", "first pass", "both passes", "their floor")
    for heads in HEADS:
        backend, q = TritonBackend(attention_spec(heads, HEAD_DIM)), randn(rows, heads, HEAD_DIM)
        sharers = torch.zeros_like(own_lens)
        sharers[:: backend.max_prefix_sharers] = backend.max_prefix_sharers
        prefixes = SharedPrefixes(torch.full_like(own_lens, num_shared), sharers)
        apart, together = (backend.plan(replace(plain, shared_prefixes=its), layers[0]) for its in (None, prefixes))
        shared_tiles = together.plans[backend.spec].prefixes
        assert shared_tiles is not None, "full attention reads shared prefixes once"
        first_pass = shared_tiles, prefixes.num_sharers, backend.spec.scale
        ways = (
            [partial(backend.decode, q, layer, apart) for layer in layers],
            [partial(shared_prefix_attention, q, layer, *first_pass) for layer in layers],
            [partial(backend.decode, q, layer, together) for layer in layers],
        )
        times = [f"{microseconds(calls):.1f}" for calls in ways]
        print_row(f"{heads} query heads", *times, f"{num_bytes / RATES.bandwidth * 1e6:.1f}")


def prefill_attention() -> None:
    """Print TFLOP/s of causal attention in prompts of 1,024 tokens, and in one of 32,768, also with a window."""
    from nanoinfer.layers.attention.triton import TritonBackend

    columns = "ours", "Hopper's own", "flash-attn", "flash-attn, paged"
    print_row("prefill attention, TFLOP/s", "query heads", "head size", *columns)
    shapes = [(heads, head_dim) for heads in HEADS for head_dim in (64, 128, 256)]
    for num_seqs, length, window in ((16, 1024, None), (1, 32768, None), (1, 32768, 1024)):
        num_blocks = num_seqs * length // BLOCK_SIZE
        tables = torch.randperm(num_blocks, device=DEVICE).int().view(num_seqs, -1)
        step = PrefillMetadata.of_whole_prompts([length] * num_seqs, tables)
        for heads, head_dim in shapes:
            spec = attention_spec(heads, head_dim, window)
            layers, qs = random_caches(4, num_blocks, head_dim), randn(4, num_seqs * length, heads, head_dim)
            # The same memory as tokens that lie end to end, and by way of blocks.
            ends = [
                (q, *(x.view(-1, KV_HEADS, head_dim) for x in (kv.k, kv.v))) for q, kv in zip(qs, layers, strict=True)
            ]
            paged = [(q, *(x.transpose(1, 2) for x in (kv.k, kv.v))) for q, kv in zip(qs, layers, strict=True)]
            ways: list[list[Callable[[], Tensor]]] = [[] for _ in columns]
            for way, backend in enumerate((TritonBackend(spec), find_backend("triton", spec))):
                if way == 0 or getattr(backend, "has_hopper_kernel", False):
                    its = backend.plan(step, layers[0])
                    ways[way] = [partial(backend.prefill, *qkv, kv, its) for qkv, kv in zip(ends, layers, strict=True)]
            if flash_attn := find_flash_attn(spec):
                for way, qkvs, block_tables in ((2, ends, None), (3, paged, tables)):
                    lens = step.cu_query_lens, step.cu_context_lens, block_tables, length, length
                    ways[way] = [partial(flash_attn, *qkv, *lens, spec) for qkv in qkvs]
            num_flops = 4 * heads * head_dim * num_seqs * count_pairs(length, window)
            figures = [f"{num_flops / microseconds(calls) / 1e6:.0f}" if calls else "-" for calls in ways]
            prompts = f"{num_seqs} x {length:,}" + (f", window {window:,}" if window else "")
            print_row(prompts, heads, head_dim, *figures)


def attention_spec(heads: int, head_dim: int, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads, KV_HEADS, head_dim, head_dim**-0.5, window)


def find_backend(name: str, spec: AttentionSpec) -> Any:
    """Return a backend of attention, or None where it is not installed, or does not serve."""
    try:
        return AttentionBackends(name, DEVICE, DTYPE, BLOCK_SIZE).select(spec)
    except ConfigError:
        return None


def find_flash_attn(spec: AttentionSpec) -> Callable[..., Tensor] | None:
    """Return flash-attn's function for prompts, or None where it is not installed, or was built without this spec."""
    if find_backend("flash_attn", spec) is None:
        return None
    from nanoinfer.layers.attention.flash_attn import varlen_attention

    return varlen_attention


class Format(NamedTuple):
    """Says which weights a table of products, or one of experts, has.

    name: in the title. rows: of the inputs. configs: each gives a figure; None: 16 bits.
    """

    name: str
    rows: tuple[int, ...]
    configs: tuple[QuantizationConfig | None, ...]
    figures: str = "us / floor"

    @property
    def is_fp8(self) -> bool:
        return isinstance(self.configs[0], Fp8Config)

    @property
    def weight_bytes(self) -> float:
        return DTYPE.itemsize if self.configs[0] is None else self.configs[0].weight_bits / 8

    @property
    def input_bytes(self) -> int:
        return 1 if self.is_fp8 else DTYPE.itemsize

    def round_input(self, x: Tensor, layer: Any) -> Any:
        """Return what a layer multiplies: rows are rounded already, by the kernels that make them."""
        return layer.quant_method.round_input(x) if self.is_fp8 else x

    def floor(self, num_bytes: float, num_flops: int) -> float:
        """Return the least microseconds: those of the bytes, or those of the FLOPs."""
        rate = RATES.fp8_matrix_rate if self.is_fp8 else RATES.matrix_rate
        return max(num_bytes / RATES.bandwidth, num_flops / (rate or RATES.matrix_rate)) * 1e6


# By --quantization.
FORMATS = {
    None: [Format("", (1, 8, 16, 64, 128, 192, 256, 512), (None,))],
    "fp8": [
        Format(f" of {name}", (1, 8, 16, 64, 128, 192, 256, 512, 4096), (config,))
        for name, config in (
            ("channels", Fp8Config()),
            ("blocks", Fp8Config(weight_granularity="block", in_checkpoint=True, scale_name="weight_scale_inv")),
        )
    ],
    "int4": [
        Format("", (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096), (Int4Config(), None), "us in 4 bits / in 16 / floor")
    ],
}


def products(case: Format) -> None:
    """Print microseconds of each product, and the floor. In 16 bits: of one call of cuBLAS, and of one with split-K."""
    is_wide, tp = case.configs[0] is None, TensorParallel()
    split = "" if len(case.configs) > 1 else " (split-K)"
    columns = ["qkv", f"o{split}", "gate, up", f"down{split}", *(["lm_head"] if is_wide else [])]
    print_row(f"products{case.name}, {case.figures}", "rows", *columns)
    for model, (hidden, intermediate, heads, num_splits) in MODELS.items():
        kv_width, width = KV_HEADS * HEAD_DIM, heads * HEAD_DIM
        shapes = [(hidden, width + 2 * kv_width), (width, hidden), (hidden, 2 * intermediate), (intermediate, hidden)]
        table: dict[int, list[str]] = {rows: [] for rows in case.rows}
        for column, (inputs, outputs) in zip(columns, [*shapes, (hidden, VOCAB_SIZE)], strict=False):
            is_row = column.startswith(("o", "down"))
            kind: Any = RowParallelLinear if is_row else ColumnParallelLinear
            make = partial(kind, inputs, outputs if is_row else {"all": outputs}, False, tp)
            count = 600 * 2**20 // (case.input_bytes * inputs * outputs)  # more than the L2 cache holds
            layers = [random_layers(make, max(2, min(28, count)), config) for config in case.configs]
            for rows, figures in table.items():
                x = case.round_input(randn(rows, inputs), layers[0][0])
                if is_wide:
                    ways = _cublas_calls(x, layers[0], num_splits if is_row and rows <= 256 else 1)
                else:
                    ways = [[partial(layer, x) for layer in its] for its in layers]
                first, *others = (f"{microseconds(calls):.1f}" for calls in ways)
                shown = first + "".join(f" ({time})" if is_wide else f" / {time}" for time in others)
                num_bytes = case.weight_bytes * inputs * outputs + rows * (case.input_bytes * inputs + 2 * outputs)
                figures.append(f"{shown} / {case.floor(num_bytes, 2 * rows * inputs * outputs):.1f}")
            del layers
        for rows, figures in table.items():
            print_row(model, rows, *figures)


def _cublas_calls(x: Tensor, layers: Sequence[Any], num_splits: int) -> list[list[Callable[[], object]]]:
    """Return a call of cuBLAS for each layer, and, where sums are to be split, one more that splits them."""
    weights = [layer.weight for layer in layers]
    ways: list[list[Callable[[], object]]] = [[partial(torch.mm, x, weight.t()) for weight in weights]]
    if num_splits > 1:
        xs = x.view(len(x), num_splits, -1).transpose(0, 1)
        parts = [weight.view(len(weight), num_splits, -1).permute(1, 2, 0) for weight in weights]
        ways.append([partial(torch.bmm, xs, part) for part in parts])
    return ways


def experts(case: Format) -> None:
    """Print microseconds of the MLPs of a layer's experts, which tokens choose at random, and the floor."""
    print_row(f"experts{case.name}, us / floor; tokens", *MOE_TOKENS)
    for name, (hidden, inner, num_experts, num_choices) in MOE_MODELS.items():
        moe = MoEConfig(num_experts, num_choices, inner, norm_topk_prob=True, has_experts=(True,))
        layers = random_layers(partial(Experts, hidden, moe, TensorParallel()), 4, case.configs[0])
        figures = []
        for num_tokens in MOE_TOKENS:
            x, calls, num_read = case.round_input(randn(num_tokens, hidden), layers[0].gate_up_proj), [], 0
            for layer in layers:
                weights, ids = torch.rand(num_tokens, num_experts, device=DEVICE).topk(num_choices)
                calls.append(partial(layer, x, Routing(ids.int(), weights)))
                num_read += len(ids.unique())
            num_bytes = case.weight_bytes * 3 * hidden * inner * num_read / len(layers)
            floor = case.floor(num_bytes, 2 * 3 * hidden * inner * num_tokens * num_choices)
            figures.append(f"{microseconds(calls):.1f} / {floor:.1f}")
        print_row(name, *figures)


def random_layers(make: Callable[[], nn.Module], count: int, config: QuantizationConfig | None) -> list[Any]:
    """Return layers with random weights, quantized as the config says."""
    with DEVICE:
        layers, generator = [make().to(DTYPE) for _ in range(count)], torch.Generator(DEVICE).manual_seed(0)
        module: Any
        for layer in layers:
            quantize_layer(layer, "model.layers.0", config)
            for module in layer.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.fill_with_random_weights(module, 0.02, generator)
    return layers


def rounding() -> None:
    """Print microseconds of the norm and of SwiGLU in 16 bits and with rounding, and of rounding alone."""
    print_row("us in 16 bits / in FP8; rows", "norm of 4 splits", "SwiGLU", "attention's rows alone")
    by_token, by_group = RowFormat(), RowFormat(group_size=128)
    for hidden, inner in ((1024, 3072), (4096, 12288)):
        weight = randn(hidden)
        for rows in (1, 16, 256, 4096):
            sums, residual, gate_up = randn(4, rows, hidden), randn(rows, hidden), randn(rows, 2 * inner)
            norm = partial(add_rms_norm, sums, residual, weight, 1e-6)
            norm_fp8 = partial(add_rms_norm_to_fp8, sums, residual, weight, 1e-6, None, by_token)
            pairs = ((norm, norm_fp8), (partial(silu_and_mul, gate_up), partial(silu_and_mul, gate_up, by_group)))
            figures = [" / ".join(f"{microseconds([call] * 20):.1f}" for call in pair) for pair in pairs]
            alone = microseconds([partial(quantize_rows, residual, by_group)] * 20)
            print_row(f"{hidden}, {inner}", rows, *figures, f"{alone:.1f}")


def linear_attention() -> None:
    """Print microseconds of what a layer of Qwen3.5-9B computes beside its products, and the least that reading takes.

    A prefill step of 30 prompts is not in a CUDA graph: launches are a part of it. Where chunks begin is known, as in
    all layers but the first.
    """
    from nanoinfer.ops.delta_rule.spec import DeltaRuleWeights
    from nanoinfer.ops.delta_rule.triton import gated_delta_prefill, gated_delta_step

    key_heads, value_heads, head_dim, width, num_rows = 16, 32, 128, 4, 256
    channels, values = (2 * key_heads + value_heads) * head_dim, value_heads * head_dim
    lens = (547,) * 4 + (546,) * 26  # 16,384 tokens
    layers = []
    for _ in range(2):  # one has more states than fit into the L2 cache
        matrices = torch.zeros(num_rows, value_heads, head_dim, head_dim, device=DEVICE)
        gates = torch.zeros(value_heads, device=DEVICE)
        weights = DeltaRuleWeights(randn(channels, width), gates, gates, randn(head_dim), eps=1e-6)
        layers.append((matrices, randn(num_rows, width, channels), weights))

    def inputs_of(num_tokens: int) -> tuple[Tensor, Tensor]:
        return randn(num_tokens, channels + values), randn(num_tokens, 2 * value_heads)

    of_rows = inputs_of(num_rows)
    rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    positions = torch.ones(num_rows, dtype=torch.int64, device=DEVICE)
    of_prompts = *inputs_of(sum(lens)), rows[: len(lens)], lens, lens
    prefill = [partial(gated_delta_prefill, *of_prompts, *layer) for layer in layers]
    decode = [partial(gated_delta_step, *of_rows, rows, positions, *layer) for layer in layers]
    # A prefill step reads what the products made, and writes outputs; a decode step reads and writes the states.
    prefill_bytes = DTYPE.itemsize * sum(lens) * (channels + 2 * values) + layers[0][0].nbytes * len(lens) // num_rows
    eager = median_seconds(lambda: [call() for call in prefill], DEVICE.type) / len(prefill) * 1e6
    shown = [
        f"{time:.1f} / {num_bytes / RATES.bandwidth * 1e6:.1f}"
        for time, num_bytes in ((eager, prefill_bytes), (microseconds(decode), 2 * layers[0][0].nbytes))
    ]
    print_row("linear attention, us / floor", f"prefill, {sum(lens):,} tokens", f"decode, {num_rows} rows")
    print_row("Qwen3.5-9B", *shown)
