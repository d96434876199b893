"""How fast it could be: what the hardware was seen to do, and the least time that a workload takes at these rates."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.workload import Workload
from nanoinfer.config import ModelConfig

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware was seen to do. bandwidth: bytes/s; matrix_rate: FLOP/s; method: how they were measured."""

    bandwidth: float
    matrix_rate: float
    method: str


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds that a workload can take, by what they go to; `compute_floor` says how they are counted."""

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


def count_weights(config: ModelConfig) -> tuple[int, int]:
    """The values in the layers' matrices, and in the lm_head (or the embedding, as large). Norms are left out."""
    attention_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * attention_width + 2 * kv_width)  # q and o, k and v
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp), config.vocab_size * config.hidden_size


def decode_steps(workload: Workload, max_num_seqs: int) -> list[tuple[int, int]]:
    """For each decode step: how many sequences run, and how many tokens these attend to together.

    At most `max_num_seqs` run at once, and one that ends makes room for the next. A request's first token comes out of
    its prefill, so max_tokens - 1 steps are left to it; the first of them attends to the prompt and that token.
    """
    requests = zip(workload.prompts, workload.max_tokens, strict=True)
    waiting = [(len(prompt) + 1, count - 1) for prompt, count in requests if count > 1]
    running: list[tuple[int, int]] = []  # (tokens to attend to, steps left)
    steps = []
    while waiting or running:
        num_free = max_num_seqs - len(running)
        running, waiting = running + waiting[:num_free], waiting[num_free:]
        steps.append((len(running), sum(context for context, _ in running)))
        running = [(context + 1, left - 1) for context, left in running if left > 1]
    return steps


def compute_floor(
    config: ModelConfig, workload: Workload, rates: Rates, bytes_per_value: int = 2, max_num_seqs: int = 512
) -> Floor:
    """The least time for the workload on hardware of these rates, by a model that leaves out all but the unavoidable.

    Prefill is matrix products at the matrix rate: 2 FLOPs for each layer weight and prompt token; the same for each
    lm_head weight and request, as only the last position needs logits; and causal attention, 4 FLOPs for each layer,
    each value of a query (heads x head_dim), and each pair of a token and one at or before it.

    A decode step takes the longer of two: reading layers and lm_head once (the embedding is a lookup, so it counts
    only where it is the lm_head), or 2 FLOPs for each of these weights and running sequence. Reading key and value of
    every token that the running sequences attend to comes on top: it alternates with the products, layer by layer.

    A prefix that all prompts share is computed once, and its keys and values are read once a decode step, for all.

    All requests are prefilled first, then decode together (in waves, beyond `max_num_seqs`). Activations, norms,
    sampling, launches and the host count as nothing, and no cache is large enough to hold weights from step to step.
    """
    layers, lm_head = count_weights(config)
    query_width = config.num_attention_heads * config.head_dim
    kv_bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_value
    shared, num_repeats = workload.shared_prefix, len(workload.prompts) - 1
    pairs = sum(_triangle(len(prompt)) for prompt in workload.prompts) - num_repeats * _triangle(shared)
    num_prefill_tokens = workload.num_input_tokens - num_repeats * shared
    products = 2 * layers * num_prefill_tokens + 2 * lm_head * len(workload.prompts)
    attention = 4 * config.num_hidden_layers * query_width * pairs

    steps = decode_steps(workload, max_num_seqs)
    num_kv_reads = sum(context - (num_seqs - 1) * shared for num_seqs, context in steps)
    read_weights = (layers + lm_head) * bytes_per_value / rates.bandwidth
    multiply_one = 2 * (layers + lm_head) / rates.matrix_rate
    return Floor(
        prefill_seconds=(products + attention) / rates.matrix_rate,
        decode_matrix_seconds=sum(max(read_weights, multiply_one * num_seqs) for num_seqs, _ in steps),
        decode_kv_seconds=num_kv_reads * kv_bytes_per_token / rates.bandwidth,
        num_decode_steps=len(steps),
    )


def _triangle(length: int) -> int:
    """Pairs of a token and one at or before it."""
    return length * (length + 1) // 2


def median_seconds(work: Callable[[], object], on_gpu: bool) -> float:
    """The median time of `work`, called often; on a GPU by the clock of the GPU, which the host does not hold up."""
    import torch

    if not on_gpu:
        marks = []
        for _ in range(8):
            work()
            marks.append(time.perf_counter())
        return statistics.median(later - earlier for earlier, later in pairwise(marks))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(24)]
    for event in events:
        work()
        event.record()
    torch.cuda.synchronize()
    # The first few warm up.
    return statistics.median(earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(events[3:]))


def measure_rates(device: str, dtype_name: str, num_cards: int = 1) -> Rates:
    """Memory bandwidth and matrix rate of the first card, or of the CPU, in plain PyTorch, times `num_cards`.

    Bandwidth is the better of two over one buffer far larger than any cache: summing it (reads alone), and copying one
    half over the other (every byte read or written once). The matrix rate is that of a large square product of random
    numbers: of zeros it would be higher, since fewer bits flip and the clock stays up.
    """
    import torch

    on_gpu = device == "cuda"
    num_bytes = min(4 * GIB, torch.cuda.mem_get_info()[0] // 4) if on_gpu else GIB // 4
    data = torch.ones(num_bytes // 16 * 4, dtype=torch.float32, device=device)
    first, second = data.chunk(2)
    read = data.nbytes / median_seconds(data.sum, on_gpu)
    copy = data.nbytes / median_seconds(lambda: first.copy_(second), on_gpu)

    size = 8192 if on_gpu else 1024
    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype_name), device=device) for _ in range(2))
    matrix_rate = 2 * size**3 / median_seconds(lambda: a @ b, on_gpu)
    method = (
        f"best of a sum ({read / 1e12:.3f} TB/s) and a copy ({copy / 1e12:.3f} TB/s) over {data.nbytes / GIB:.2f} GiB; "
        f"{dtype_name} product of random {size} x {size} matrices"
    )
    if num_cards > 1:
        method += f"; one card, times {num_cards}"
    return Rates(max(read, copy) * num_cards, matrix_rate * num_cards, method)
