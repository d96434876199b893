"""Computes the floor: the least time that the hardware allows for a workload.

It follows from two rates, memory bandwidth and matrix products, that are measured on the spot. `compute_floor` says
what is counted. A run can come close to its floor and never below it, so its share of the floor says what is left.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import comb
from time import perf_counter
from typing import NamedTuple

import torch

from nanoinfer.bench.workloads import Workload
from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.moe import Router
from nanoinfer.models import get_model_class
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.ops.fp8.spec import quantize_weight
from nanoinfer.quantization.fp8_linear import Fp8Config
from nanoinfer.quantization.method_selection import has_fewer_bits

GIB = 2**30
LAYER = re.compile(r"\blayers\.(\d+)\.")  # in the name of a module
STATE_BYTES = 4  # of a value of the states of linear attention


@dataclass(frozen=True, slots=True)
class Rates:
    """Says what the hardware was seen to do. bandwidth: bytes/s; matrix_rate: FLOP/s; method: how they were found."""

    bandwidth: float
    matrix_rate: float
    bytes_per_value: int  # of the dtype that the matrix rate holds for
    method: str
    fp8_matrix_rate: float | None = None  # of products of FP8, where it was measured

    def __str__(self) -> str:
        fp8 = "" if self.fp8_matrix_rate is None else f" ({self.fp8_matrix_rate / 1e12:.4g} in FP8)"
        return f"{self.bandwidth / 1e12:.3f} TB/s and {self.matrix_rate / 1e12:.4g} TFLOP/s{fp8}: {self.method}"


@dataclass(frozen=True, slots=True)
class Floor:
    """Counts the least seconds that a workload can take, by what takes them; `compute_floor` says how."""

    prefill_seconds: float
    decode_matrix_seconds: float
    decode_kv_seconds: float
    num_decode_steps: int

    @property
    def decode_seconds(self) -> float:
        return self.decode_matrix_seconds + self.decode_kv_seconds

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def compute_floor(
    config: ModelConfig,
    workload: Workload,
    rates: Rates,
    max_num_seqs: int = 512,
    kv_cache_dtype: str = "auto",
    num_replicas: int = 1,
) -> Floor:
    """Return the least time for the workload at these rates. Only what no engine can avoid is counted.

    Prefill is matrix products at the matrix rate: 2 FLOPs for each layer weight and prompt token; the same for each
    lm_head weight and request, as only the last position needs logits; and causal attention, 2 FLOPs for each layer,
    each value of a key and of a value, in all query heads, and each pair of a token and one at or before it.

    A decode step takes the longer of two: reading layers and lm_head once (the embedding is a lookup, so it counts
    only where it is the lm_head), or 2 FLOPs for each of these weights and running sequence. Reading key and value of
    every token that the running sequences attend to comes on top: it alternates with the products, layer by layer.

    Where log-probabilities of prompt tokens are wanted, lm_head counts for each of them. Answers that are scored count
    as tokens of their prompts, and their lm_head too; nothing is generated after them.

    What is shared counts once: a prompt is computed once for all its samples, and a prefix that all prompts begin with
    once for all prompts. A decode step reads their keys and values once for all sequences that run. A token of latent
    attention has one vector in the place of them.

    Of a mixture of experts, a token is multiplied by its own experts alone, and a step reads those that its tokens go
    to, as many as if each token chose them evenly and by chance. Where tokens choose alike, fewer are read, and the
    floor is too high.

    All requests are prefilled first, then decode together (in waves, beyond `max_num_seqs`). Activations, norms,
    sampling, launches and the host count as nothing, and no cache is large enough to hold weights from step to step.

    In a layer with a window, a token attends to at most a window of tokens; a decode step reads for each sequence at
    most a window of those that it shares with no other. A layer that attends to the keys and values of another reads
    them once more. Such layers come last: they compute the last token of each prompt alone, unless log-probabilities of
    the others are wanted. A layer of linear attention reads and writes its states, in float32, once for each sequence
    of a decode step; for each token and value head, a matrix of keys by values is multiplied by a vector twice and gets
    a product of two added, 6 FLOPs for each of its values. Its convolution counts as nothing.

    Weights in FP8 are read as a byte for each value, and multiplied at the rate for FP8; those in 4 bits are read as
    4.25 bits, with their scales, and multiplied at the rate for 16. What has 16 bits beside them counts so: routers,
    modules that the checkpoint leaves so, and all but the experts of MXFP4. Of a KV cache in 8 bits, each key and value
    is a byte. Other scales count as nothing.

    Of several replicas, each has an equal share of the requests, and the floor is that of the one with most to do.
    """
    weights, order = count_weights(config), sorted(range(len(workload.prompts)), key=lambda i: -workload.max_tokens[i])
    floors = []
    for indices in (order[start::num_replicas] for start in range(min(num_replicas, len(order)))):
        share = replace(
            workload,
            prompts=[workload.prompts[index] for index in indices],
            max_tokens=[workload.max_tokens[index] for index in indices],
            answers=[workload.answers[index] for index in indices] if workload.answers else [],
        )
        floors.append(_floor_of_engine(config, weights, share, rates, max_num_seqs, kv_cache_dtype))
    return max(floors, key=lambda floor: floor.seconds)


def _floor_of_engine(
    config: ModelConfig, weights: "Weights", workload: Workload, rates: Rates, max_num_seqs: int, kv_cache_dtype: str
) -> Floor:
    """Return the floor of one engine, as `compute_floor` says it."""
    wide = weights.wide
    layers = _attention_layers(config)
    shared, num_repeats = workload.shared_prefix, len(workload.prompts) - 1
    num_prefill_tokens = workload.num_input_tokens - num_repeats * shared
    layer_rate, layer_bytes = rates.matrix_rate, float(rates.bytes_per_value)
    if config.quantization is not None:
        layer_rate, layer_bytes = rates.fp8_matrix_rate or rates.matrix_rate, config.quantization.weight_bits / 8
    num_logits = len(workload.prompts)
    if workload.prompt_logprobs is not None:
        num_logits += workload.num_input_tokens - len(workload.prompts)
    if workload.answers:
        num_logits = sum(workload.output_lens)
        num_prefill_tokens += sum(len(answer) for answers in workload.answers for answer in answers)
    num_wide = wide.layers_of_a_token
    products_of_a_token = 2 * ((weights.layers_of_a_token - num_wide) / layer_rate + num_wide / rates.matrix_rate)
    head = 2 * weights.lm_head * num_logits
    is_late_alone = workload.prompt_logprobs is None and not workload.answers  # the last layers compute last tokens
    late_products = 2 * ((weights.late - wide.late) / layer_rate + wide.late / rates.matrix_rate)
    num_spared = num_prefill_tokens - len(workload.prompts) if is_late_alone else 0
    num_products = sum(
        count * kind.query_width * _num_pairs(workload, kind.window, kind.is_late and is_late_alone)
        for kind, count in layers.items()
    )
    attention = 4 * num_products + 6 * _num_state_values(config) * num_prefill_tokens

    steps = decode_steps(workload, max_num_seqs)
    kv_bytes = rates.bytes_per_value if kv_cache_dtype == "auto" else 1
    num_kv_values = 0
    for kind, count in layers.items():
        of_layer = steps if kind.window is None else decode_steps(workload, max_num_seqs, kind.window)
        num_kv_values += count * kind.kv_values * sum(step.num_kv_reads for step in of_layer)
    num_kv_bytes = num_kv_values * kv_bytes
    num_kv_bytes += 2 * STATE_BYTES * _num_state_values(config) * sum(step.num_seqs for step in steps)
    multiply_one = products_of_a_token + 2 * weights.lm_head / rates.matrix_rate

    def read_weights(num_seqs: int) -> float:
        num_wide = wide.layers_read_by(num_seqs)
        num_bytes = (weights.layers_read_by(num_seqs) - num_wide) * layer_bytes
        num_bytes += (num_wide + weights.lm_head) * rates.bytes_per_value
        return num_bytes / rates.bandwidth

    return Floor(
        prefill_seconds=products_of_a_token * num_prefill_tokens
        - late_products * num_spared
        + (head + attention) / rates.matrix_rate,
        decode_matrix_seconds=sum(max(read_weights(step.num_seqs), multiply_one * step.num_seqs) for step in steps),
        decode_kv_seconds=num_kv_bytes / rates.bandwidth,
        num_decode_steps=len(steps),
    )


class AttentionKind(NamedTuple):
    """Tells layers with attention apart by what the floor counts of them.

    query_width: see `_query_width`. kv_values: values of a key and of a value, of all heads. is_late: whether they
    attend to the keys and values of another layer.
    """

    window: int | None
    query_width: float
    kv_values: int
    is_late: bool


def _attention_layers(config: ModelConfig) -> Counter[AttentionKind]:
    """Return how many layers are of each kind. Layers of linear attention are left out."""
    kinds = Counter[AttentionKind]()
    for index, window in enumerate(config.windows):
        layer = config.of_layer(index)
        values = BlockLayout.of(layer, TensorParallel()).num_values
        if not config.is_linear(index):
            kinds[AttentionKind(window, _query_width(layer), sum(values), layer.shares_cache)] += 1
    return kinds


def _query_width(layer: ModelConfig) -> float:
    """Return how many values a key or a value has, in all query heads; where these differ, their mean."""
    value_size = layer.head_dim if layer.latent_attention is None else layer.latent_attention.value_size
    return layer.num_attention_heads * (layer.head_dim + value_size) / 2


def _num_state_values(config: ModelConfig) -> int:
    """Return how many values the states of a sequence have, in all layers of linear attention."""
    linear = config.linear_attention
    if linear is None:
        return 0
    return sum(linear.is_linear) * linear.num_value_heads * linear.key_head_dim * linear.value_head_dim


def _num_pairs(workload: Workload, window: int | None, of_last_tokens: bool = False) -> int:
    """Return how many pairs of a token and one that it attends to a layer computes; what is shared counts once.

    of_last_tokens: whether it computes the last token of each prompt alone.
    """
    if of_last_tokens:
        return sum(min(window or len(prompt), len(prompt)) for prompt in workload.prompts)
    num_pairs = sum(count_pairs(len(prompt), window) for prompt in workload.prompts)
    num_pairs -= (len(workload.prompts) - 1) * count_pairs(workload.shared_prefix, window)
    for prompt, answers in zip(workload.prompts, workload.answers, strict=False):  # which there may be none of
        wholes = (len(prompt) + len(answer) for answer in answers)
        num_pairs += sum(count_pairs(whole, window) - count_pairs(len(prompt), window) for whole in wholes)
    return num_pairs


def count_pairs(length: int, window: int | None) -> int:
    """Return how many pairs a prompt has of a token and one that it attends to, itself included."""
    visible = min(window or length, length)
    return comb(visible + 1, 2) + (length - visible) * visible


class Weights(NamedTuple):
    """Counts the values in a model's matrices, norms left out.

    dense: of all layers, experts left out. lm_head: also of the embedding, which is as large. expert: of one expert in
    each layer that has any. late: those of `dense` in layers that attend to the keys and values of another. wide_dense,
    wide_expert, wide_late: those of them that have 16 bits where others have fewer.
    """

    dense: int
    lm_head: int
    expert: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    wide_dense: int = 0
    wide_expert: int = 0
    late: int = 0
    wide_late: int = 0

    @property
    def wide(self) -> "Weights":
        """Count only what has 16 bits where others have fewer."""
        return self._replace(dense=self.wide_dense, expert=self.wide_expert, late=self.wide_late)

    @property
    def layers_of_a_token(self) -> int:
        """Values of the layers that one token is multiplied by."""
        return self.dense + self.num_experts_per_tok * self.expert

    def layers_read_by(self, num_tokens: int) -> float:
        """Return how many values of the layers a step of so many tokens reads, if each chooses its experts evenly."""
        if not self.num_experts:
            return self.dense
        spared = (1 - self.num_experts_per_tok / self.num_experts) ** num_tokens
        return self.dense + self.num_experts * (1 - spared) * self.expert


def count_weights(config: ModelConfig) -> Weights:
    """Count the values in the matrices of a model, which is made without memory, and which of them have 16 bits."""
    places, cpu = KVCacheLayout.of(config, 1, TensorParallel()).places, torch.device("cpu")
    backends = AttentionBackends("torch", cpu, torch.float32, block_size=256, places=places)
    with torch.device("meta"):
        wide_config = replace(config, quantization=None)
        model = get_model_class(config.architecture)(wide_config, 1, backends, TensorParallel())
    num_values, num_wide = Counter[str](), Counter[str]()
    for name, module in model.named_modules():
        if hasattr(module, "quant_method") or isinstance(module, Router):
            *of_experts, num_outputs, num_inputs = module.weight.shape
            kinds = {"expert" if of_experts else "dense"}
            if not of_experts and config.layers is not None and (layer := LAYER.search(name)):
                kinds |= {"late"} if config.layers[int(layer[1])].shares_cache else set()
            is_wide = config.quantization is not None and not has_fewer_bits(config.quantization, name, module)
            for kind in kinds:
                num_values[kind] += num_outputs * num_inputs
                num_wide[kind] += num_outputs * num_inputs * is_wide
    lm_head = config.vocab_size * config.hidden_size
    experts = (config.moe.num_experts, config.moe.num_experts_per_tok) if config.moe else (0, 0)
    wide = num_wide["dense"], num_wide["expert"]
    late = num_values["late"], num_wide["late"]
    return Weights(num_values["dense"], lm_head, num_values["expert"], *experts, *wide, *late)


def embedding_flops(config: ModelConfig, lens: list[int]) -> float:
    """Count the operations of all products and of attention, which is of half of all pairs where it is causal."""
    encoder = config.encoder
    windows: list[int | None] = [None] * config.num_hidden_layers
    if encoder is not None and encoder.window is not None:
        windows = [2 * encoder.window - 1 if is_local else None for is_local in encoder.local_layers]
    widths = [_query_width(config.of_layer(index)) for index in range(len(windows))]
    num_pairs = sum(
        width * length * min(length, window or length)
        for width, window in zip(widths, windows, strict=True)
        for length in lens
    )
    flops_of_a_pair = 4.0 / (2 if encoder is None else 1)
    return 2.0 * count_weights(config).dense * sum(lens) + flops_of_a_pair * num_pairs


class DecodeStep(NamedTuple):
    """Counts the sequences of a decode step, and the tokens whose keys and values it has to read, shared ones once."""

    num_seqs: int
    num_kv_reads: int


def decode_steps(workload: Workload, max_num_seqs: int, window: int | None = None) -> list[DecodeStep]:
    """Return the decode steps of a workload. window: of the layers whose reads are counted; None: they attend to all.

    At most `max_num_seqs` sequences run at once, in order of arrival, the samples of a request one after the other, and
    one that ends makes room for the next. A sequence's first token comes out of its prefill, so max_tokens - 1 steps
    are left to it; the first of them attends to the prompt and that token.
    """
    prompt_lens, max_tokens = [len(prompt) for prompt in workload.prompts], workload.max_tokens
    requests = [request for request, count in enumerate(max_tokens) if count > 1]
    waiting = [request for request in requests for _ in range(workload.num_samples)]
    is_alone = workload.num_samples == 1
    alone = [length - workload.shared_prefix if is_alone else 0 for length in prompt_lens]
    running: list[tuple[int, int]] = []  # of each sequence, its request and its first step
    steps: list[DecodeStep] = []
    while waiting or running:
        number, num_free = len(steps), max_num_seqs - len(running)
        running += [(request, number) for request in waiting[:num_free]]
        del waiting[:num_free]
        prompts = {request for request, _ in running}
        num_prompt_tokens = sum(prompt_lens[request] for request in prompts)
        num_prompt_tokens -= (len(prompts) - 1) * workload.shared_prefix
        if window is None:
            num_kv_reads = num_prompt_tokens + sum(number - first + 1 for _, first in running)
        else:  # what the samples of a prompt share is left out
            num_kv_reads = sum(min(window, alone[request] + number - first + 1) for request, first in running)
        steps.append(DecodeStep(len(running), num_kv_reads))
        running = [(request, first) for request, first in running if number - first + 2 < max_tokens[request]]
    return steps


def measure_rates(device: str, config: ModelConfig, num_gpus: int = 1) -> Rates:
    """Measure the first GPU, or the CPU, in plain PyTorch, and multiply by `num_gpus`.

    Call it before an engine is loaded: memory taken after a far larger piece was freed has been seen to read a tenth
    slower.
    """
    dtype = getattr(torch, config.dtype) if device == "cuda" else torch.float32
    read, copy, num_bytes = _measure_bandwidth(device)
    matrix_rate, size = _measure_products(device, dtype)
    fp8_rate = _measure_fp8_products(device, size) if isinstance(config.quantization, Fp8Config) else None
    if device == "cuda":
        torch.cuda.empty_cache()  # engines in other processes would find the memory taken
    method = (
        f"best of a sum ({read / 1e12:.3f} TB/s) and a copy ({copy / 1e12:.3f} TB/s) over {num_bytes / GIB:.2f} GiB; "
        f"product of random {size} x {size} matrices of {dtype}"
    )
    if num_gpus > 1:
        method += f"; of one {device.upper().replace('CUDA', 'GPU')}, times {num_gpus}"
    fp8_rate = fp8_rate and fp8_rate * num_gpus
    return Rates(max(read, copy) * num_gpus, matrix_rate * num_gpus, dtype.itemsize, method, fp8_rate)


def _measure_bandwidth(device: str) -> tuple[float, float, int]:
    """Return bytes/s of summing a buffer and of copying one half over the other, and the buffer's bytes.

    The sum only reads; the copy reads or writes every byte once. The buffer is far larger than any cache.
    """
    num_bytes = min(4 * GIB, torch.cuda.mem_get_info()[0] // 4) if device == "cuda" else GIB // 4
    data = torch.ones(num_bytes // 16 * 4, dtype=torch.float32, device=device)
    first, second = data.chunk(2)
    read = data.nbytes / median_seconds(data.sum, device)
    copy = data.nbytes / median_seconds(lambda: first.copy_(second), device)
    return read, copy, data.nbytes


def _measure_products(device: str, dtype: torch.dtype) -> tuple[float, int]:
    """Return FLOP/s of a large square product, and its size.

    The numbers are random: zeros would be faster, since fewer bits flip and the clock stays up.
    """
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, device), size


def _measure_fp8_products(device: str, size: int) -> float | None:
    """Return FLOP/s of a square product of FP8 with a scale for each row and column; None where there is none."""
    if not has_fp8_products(torch.device(device)):
        return None
    (a, a_scales), (b, b_scales) = (quantize_weight(torch.randn(size, size, device=device)) for _ in range(2))
    operands = a, b.t(), a_scales.unsqueeze(1), b_scales.unsqueeze(0)
    return 2 * size**3 / median_seconds(lambda: torch._scaled_mm(*operands, out_dtype=torch.bfloat16), device)


def median_seconds(work: Callable[[], object], device: str) -> float:
    """Return the median time of `work`; on a GPU by the clock of the GPU, which the host does not hold up."""
    if device != "cuda":
        marks = []
        for _ in range(8):
            work()
            marks.append(perf_counter())
        return statistics.median(later - earlier for earlier, later in pairwise(marks))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(24)]
    for event in events:
        work()
        event.record()
    torch.cuda.synchronize()
    warm = events[3:]
    return statistics.median(earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(warm))
