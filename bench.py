"""How fast is it, and how fast could it be: a workload, timed and set against the hardware's floor.

    python bench.py                          # on a GPU: Qwen3-0.6B with random weights, 256 requests
    python bench.py --size 8B --runs 3       # another size; each run draws a new workload
    python bench.py --model Qwen/Qwen3-0.6B  # real weights
    python bench.py --engine vllm            # the same work by another engine, where that is installed
    python bench.py --load small             # 1, 4 and 16 requests; also: long, steady, --shared-prefix 512
    python bench.py --profile timeline       # and a trace, a picture and figures of single steps, in this folder
    python bench.py --host-only              # what a step costs the host; needs no GPU, no model and no PyTorch

The default workload is nano-vllm's. A forward pass is as fast with random weights as with trained ones, so none need
be downloaded. Without a GPU the bundled tiny checkpoint does a small load, which shows that everything runs and says
little about speed.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import pairwise
from math import comb
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

# These cost milliseconds; what takes seconds to import (PyTorch and all engines) is imported where it is needed.
from nanoinfer import NanoinferError, SamplingParams, tiny_model_path
from nanoinfer import __version__ as nanoinfer_version
from nanoinfer.checkpoint.hub import resolve_model_folder
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.engine.batch import ScheduledBatch, pack
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence

GIB = 2**30


# -------- Loads: what is run ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Load:
    """How many requests, and their sizes in tokens; lengths are uniform from their least to their most, both included.

    shared_prefix: random tokens that all prompts of a run begin with, before those that `input_len` counts.
    """

    num_seqs: tuple[int, ...]  # one run for each number
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    max_num_seqs: int = 512  # the most that run at once; 512 is nano-vllm's, given to every engine that takes it
    shared_prefix: int = 0

    @property
    def longest(self) -> int:
        """The most tokens that a request can have at its end."""
        return self.shared_prefix + self.input_len[1] + self.output_len[1]


LOADS = {
    "default": Load((256,), input_len=(100, 1024), output_len=(100, 1024)),  # nano-vllm's
    "long": Load((8,), input_len=(32768, 32768), output_len=(512, 512)),
    "small": Load((1, 4, 16), input_len=(128, 512), output_len=(256, 256)),
    "steady": Load((4096,), input_len=(100, 1024), output_len=(100, 1024)),
}
# The same kinds of work, in seconds with the tiny checkpoint.
CPU_LOADS = {
    "default": Load((16,), input_len=(64, 64), output_len=(64, 64)),
    "long": Load((2,), input_len=(2048, 2048), output_len=(32, 32)),
    "small": Load((1, 4, 16), input_len=(32, 128), output_len=(32, 32)),
    "steady": Load((64,), input_len=(8, 64), output_len=(8, 64), max_num_seqs=8),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run: token ids of each prompt, and how many tokens each is to be continued by.

    shared_prefix: how many tokens all prompts begin with.
    """

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]
    shared_prefix: int = 0

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


def draw_workload(seed: int, num_seqs: int, load: Load, vocab_size: int) -> Workload:
    """Requests of the sizes of `load`, drawn as nano-vllm's benchmark draws its own, so that figures compare.

    A shared prefix comes last out of the generator, so the rest is the same without it. Ids stay inside the vocabulary.
    """
    randint = random.Random(seed).randint
    max_id = min(10000, vocab_size - 1)
    prompts = [[randint(0, max_id) for _ in range(randint(*load.input_len))] for _ in range(num_seqs)]
    max_tokens = [randint(*load.output_len) for _ in range(num_seqs)]
    prefix = [randint(0, max_id) for _ in range(load.shared_prefix)]
    return Workload(seed, [prefix + prompt for prompt in prompts], max_tokens, load.shared_prefix)


# -------- Floor: what the hardware was seen to do, and the least time that a workload takes at these rates ------------
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

    At most `max_num_seqs` run at once, in order of arrival, and one that ends makes room for the next. A request's
    first token comes out of its prefill, so max_tokens - 1 steps are left to it; the first of them attends to the
    prompt and that token.
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
    # Of a token and one at or before it.
    pairs = sum(comb(len(prompt) + 1, 2) for prompt in workload.prompts) - num_repeats * comb(shared + 1, 2)
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


def median_seconds(work: Callable[[], object], on_gpu: bool) -> float:
    """The median time of `work`, called often; on a GPU by the clock of the GPU, which the host does not hold up."""
    import torch

    if not on_gpu:
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


# -------- Models and engines ------------------------------------------------------------------------------------------
# The config.json of a Qwen3 size is COMMON_CONFIG with these.
SIZE_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "tie_word_embeddings",
)
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
COMMON_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Model:
    """What is run: `folder` holds a config.json and, unless `random_weights`, a checkpoint."""

    name: str
    folder: Path
    config: ModelConfig
    random_weights: bool


def write_config(size: str, folder: Path) -> None:
    """Write the config.json of a Qwen3 size, with the tokenizer of the tiny checkpoint beside it.

    The tokenizer makes every engine turn its output into text, as nano-vllm does in its own benchmark.
    """
    config = COMMON_CONFIG | dict(zip(SIZE_FIELDS, SIZES[size], strict=True))
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_path() / name, folder / name)


def choose_model(args: argparse.Namespace, device: str, scratch: Path) -> Model:
    """The model asked for; if none was, Qwen3-0.6B on a GPU and the tiny checkpoint on a CPU."""
    if args.model is None and (args.size or device == "cuda"):
        size = args.size or "0.6B"
        write_config(size, scratch)
        return Model(f"Qwen3-{size}", scratch, ModelConfig.from_folder(scratch), random_weights=True)
    folder = resolve_model_folder(args.model or str(tiny_model_path()))
    return Model(args.model or "tiny-qwen3", folder, ModelConfig.from_folder(folder), random_weights=False)


@dataclass(frozen=True, slots=True)
class Engine:
    """What the benchmark asks of an engine; one that keeps no figures or has nothing to reset leaves the defaults."""

    generate: Callable[[Workload], list[int]]  # returns how many tokens each request was given
    stats: Callable[[], dict[str, float]] = dict  # running totals of prefill and decode work
    reset: Callable[[], object] = lambda: None  # forget cached prefixes
    close: Callable[[], object] = lambda: None
    llm: Any = None  # nanoinfer's LLM, whose steps can be profiled


def make_params(kind: Any, workload: Workload, **others: Any) -> list[Any]:
    """One sampling option object of an engine's own `kind` for each request."""
    return [kind(temperature=0.6, ignore_eos=True, max_tokens=count, **others) for count in workload.max_tokens]


def load_nanoinfer(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    from nanoinfer import LLM

    load_format = "dummy" if model.random_weights else "auto"
    llm = LLM(model.folder, load_format=load_format, attention_backend=args.attention_backend, **options)
    num_cached = 0

    def generate(workload: Workload) -> list[int]:
        nonlocal num_cached
        params = make_params(SamplingParams, workload, top_k=args.top_k, top_p=args.top_p)
        outputs = llm.generate([*workload.prompts], params, use_tqdm=False)
        num_cached += sum(output.num_cached_tokens for output in outputs)
        return [len(output.token_ids) for output in outputs]

    def stats() -> dict[str, float]:
        return asdict(llm.engine.stats) | {"cached_tokens": num_cached}

    return Engine(generate, stats, llm.reset_prefix_cache, llm.close, llm)


def load_nanovllm(model: Model, options: dict[str, Any], _args: argparse.Namespace) -> Engine:
    from nanovllm import LLM, SamplingParams

    llm = LLM(str(model.folder), **options)
    if model.random_weights:
        # It leaves weights that it finds no file for as the memory was, and products of zeros run faster.
        for parameter in llm.model_runner.model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, model.config.initializer_range)

    def generate(workload: Workload) -> list[int]:
        outputs = llm.generate(workload.prompts, make_params(SamplingParams, workload), use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]

    return Engine(generate)


def load_vllm(model: Model, options: dict[str, Any], args: argparse.Namespace) -> Engine:
    from vllm import LLM, SamplingParams

    load_format = "dummy" if model.random_weights else "auto"
    llm = LLM(model=str(model.folder), load_format=load_format, skip_tokenizer_init=True, **options)

    def generate(workload: Workload) -> list[int]:
        inputs = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        params = make_params(SamplingParams, workload, detokenize=False, top_k=args.top_k, top_p=args.top_p)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return Engine(generate, reset=llm.reset_prefix_cache)


def load_transformers(model: Model, _options: dict[str, Any], args: argparse.Namespace) -> Engine:
    """Its own `generate` on left-padded batches of requests of like length: a batch runs until its longest ends."""
    import torch
    from transformers import AutoConfig, GenerationConfig, Qwen3ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if model.random_weights:
        with device:
            net = Qwen3ForCausalLM(AutoConfig.from_pretrained(model.folder))
    else:
        net = Qwen3ForCausalLM.from_pretrained(model.folder)
    net = net.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    net.generation_config.eos_token_id = None  # every row runs to the end

    def generate(workload: Workload) -> list[int]:
        requests = sorted(zip(workload.max_tokens, workload.prompts, strict=True), key=lambda request: request[0])
        for start in range(0, len(requests), 64):
            batch = requests[start : start + 64]
            steps, width = batch[-1][0], max(len(prompt) for _, prompt in batch)
            padded = torch.tensor([[0] * (width - len(prompt)) + prompt for _, prompt in batch], device=device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in batch], device=device)
            sampling = {"do_sample": True, "temperature": 0.6, "top_k": args.top_k, "top_p": args.top_p}
            options = GenerationConfig(**sampling, max_new_tokens=steps, pad_token_id=0)
            output = net.generate(padded, attention_mask=mask, generation_config=options)
            assert output.shape[1] == width + steps, f"generate stopped at {output.shape[1] - width} of {steps} tokens"
        return workload.max_tokens  # what a row got beyond its own max_tokens is not counted

    return Engine(generate)


ENGINES = {"nanoinfer": load_nanoinfer, "nanovllm": load_nanovllm, "vllm": load_vllm, "transformers": load_transformers}


def load_engine(model: Model, load: Load, args: argparse.Namespace) -> Engine:
    """Start the engine asked for. Exits where it is not installed, or the model is too short."""
    longest, limit = load.longest, model.config.max_model_len
    if longest > limit:
        lengths = "--input-len and --output-len" if load.shared_prefix == 0 else "--shared-prefix and both lengths"
        sys.exit(f"bench.py: {lengths} add up to {longest}, and {model.name} takes {limit}; ask for fewer tokens")
    options = {
        "max_model_len": min(max(4096, longest), limit),  # 4096 is what nano-vllm's benchmark sets
        "max_num_seqs": load.max_num_seqs,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enforce_eager": args.enforce_eager,
    }
    try:
        return ENGINES[args.engine](model, options, args)
    except ImportError as error:
        sys.exit(f"bench.py: --engine {args.engine} cannot be imported here ({error}); install it first")


# -------- Timed runs and report ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Result:
    """One timed run. stats: the engine's own prefill and decode figures, empty where it keeps none."""

    workload: Workload
    seconds: float
    stats: dict[str, float]

    @property
    def output_tokens_per_second(self) -> float:
        return self.workload.num_output_tokens / self.seconds


def time_run(engine: Engine, workload: Workload) -> Result:
    """Run the workload once. Exits if a request got another number of tokens than it asked for."""
    engine.reset()
    before = engine.stats()
    started = perf_counter()
    counts = engine.generate(workload)
    seconds = perf_counter() - started
    after = engine.stats()
    if counts != workload.max_tokens:
        sys.exit(f"bench.py: {sum(counts)} tokens came out where {workload.num_output_tokens} were asked for")
    return Result(workload, seconds, {name: after[name] - before[name] for name in after})


def time_all_runs(engine: Engine, model: Model, load: Load, args: argparse.Namespace) -> list[Result]:
    """Warm up, then time and print each run."""
    engine.generate(Workload(seed=0, prompts=[list(range(8))], max_tokens=[16]))
    results = []
    for num_seqs in load.num_seqs:
        for seed in range(args.seed, args.seed + args.runs):
            results.append(time_run(engine, draw_workload(seed, num_seqs, load, model.config.vocab_size)))
            print_result(results[-1])
    return results


def print_result(result: Result) -> None:
    work, stats, rate = result.workload, result.stats, result.output_tokens_per_second
    print(
        f"Seed {work.seed}: {len(work.prompts)} requests, {work.num_input_tokens:,} tokens in, "
        f"{work.num_output_tokens:,} out, {result.seconds:.2f} s, {rate:,.0f} output tokens/s"
    )
    for phase in ("prefill", "decode") if stats else ():
        tokens, seconds, steps = stats[f"{phase}_tokens"], stats[f"{phase}_seconds"], stats[f"num_{phase}_steps"]
        print(
            f"  {phase}: {seconds:.2f} s, {tokens:,} tokens in {steps:,} steps, {tokens / max(seconds, 1e-9):,.0f} "
            f"tokens/s, {1e3 * seconds / max(steps, 1):.2f} ms a step"
        )
    if work.shared_prefix and "cached_tokens" in stats:
        cached = stats["cached_tokens"]
        print(
            f"  prefix cache: {cached:,} of {work.num_input_tokens:,} prompt tokens found "
            f"({cached / work.num_input_tokens:.1%}), {stats['prefill_tokens']:,} computed"
        )


def print_floor(floor: Floor, result: Result) -> None:
    parts = (floor.prefill_seconds, floor.decode_matrix_seconds, floor.decode_kv_seconds)
    prefill, matrices, kv = (part / floor.seconds for part in parts)
    print(
        f"  seed {result.workload.seed}, {len(result.workload.prompts)} requests: {floor.seconds:.3g} s, "
        f"{result.workload.num_output_tokens / floor.seconds:,.0f} output tokens/s "
        f"(prefill {prefill:.0%}; decode: weights and products {matrices:.0%}, KV reads {kv:.0%}); "
        f"{1e3 * floor.decode_seconds / max(floor.num_decode_steps, 1):.3g} ms a decode step; "
        f"reached {floor.seconds / result.seconds:.1%}"
    )


def figures_of(result: Result, floor: Floor) -> dict[str, Any]:
    """Everything that is known of a run."""
    work = result.workload
    figures = {"seed": work.seed, "num_requests": len(work.prompts), "shared_prefix": work.shared_prefix}
    figures |= {"input_tokens": work.num_input_tokens, "output_tokens": work.num_output_tokens}
    speed = {"seconds": result.seconds, "output_tokens_per_second": result.output_tokens_per_second}
    share = {"floor_seconds": floor.seconds, "share_of_floor": floor.seconds / result.seconds}
    return {**figures, **speed, "stats": result.stats, "floor": asdict(floor), **share}


def describe_machine(device: str) -> dict[str, Any]:
    """The hardware and the versions that a figure belongs to: of the host, and on "cuda" of the first GPU."""
    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cpu_cores": os.cpu_count()}
    if device == "cuda":
        import torch

        card = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": card.name, "gpu_gib": round(card.total_memory / GIB, 1), "cuda": torch.version.cuda}
        hardware["gpus_seen"] = torch.cuda.device_count()
    versions = {"python": platform.python_version(), "nanoinfer": nanoinfer_version}
    for package in ("torch", "triton", "transformers", "flash-attn", "nano-vllm", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"hardware": hardware, "versions": versions}


def benchmark(model: Model, load: Load, args: argparse.Namespace, device: str, started: float) -> dict[str, Any]:
    """Measure the hardware, load, run; print along the way and return all figures."""
    import torch

    # Before the engine: memory taken after a far larger piece was freed has been seen to read a tenth slower.
    rates_started = perf_counter()
    dtype_name = model.config.dtype if device == "cuda" else "float32"
    rates = measure_rates(device, dtype_name, args.tensor_parallel_size)
    if device == "cuda":
        torch.cuda.empty_cache()  # engines in other processes would find the memory taken
    started += perf_counter() - rates_started
    with closing(load_engine(model, load, args)) as engine:
        load_seconds = perf_counter() - started
        machine = describe_machine(device)
        where = machine["hardware"].get("gpu", f"{os.cpu_count()} CPU cores")
        weights = "random weights" if model.random_weights else "its own weights"
        print(f"{model.name} ({weights}), {args.engine} on {where}: loaded in {load_seconds:.1f} s, imports included")
        results = time_all_runs(engine, model, load, args)
        profile = profile_run(engine, results[-1], args.profile) if args.profile else None

    print(f"Floor at {rates.bandwidth / 1e12:.3f} TB/s and {rates.matrix_rate / 1e12:.4g} TFLOP/s: {rates.method}")
    bytes_per_value = 4 if dtype_name == "float32" else 2
    runs = []
    for result in results:
        floor = compute_floor(model.config, result.workload, rates, bytes_per_value, load.max_num_seqs)
        print_floor(floor, result)
        runs.append(figures_of(result, floor))
    # Over runs of one size only: others have nothing to do with each other.
    median = None
    if len(load.num_seqs) == 1:
        median = statistics.median(result.output_tokens_per_second for result in results)
        if len(results) > 1:
            print(f"Median of {len(results)} runs: {median:,.0f} output tokens/s")
    measured = {"load_seconds": load_seconds, "median_output_tokens_per_second": median, "runs": runs}
    asked = {"model": model.name, "load": asdict(load), "options": vars(args)}
    return {**asked, **machine, "rates": asdict(rates), **measured, "profile": profile}


# -------- --host-only: what a decode step costs the host (schedule, pack and update) ----------------------------------
HOST_CASES = ((256, 0), (1024, 0), (256, 100_000))  # sequences running, requests waiting
NUM_HOST_STEPS = 512  # two blocks of tokens for each sequence
HOST_BLOCK_SIZE = 256
HOST_INPUT_LEN = (100, 1024)  # sequences need blocks in different steps


class HostStep(NamedTuple):
    """The host's microseconds of a decode step, with made-up token ids in place of a model."""

    schedule: float
    pack: float
    update: float
    total: float


def fill_scheduler(num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """A scheduler whose rows and blocks suffice for `num_running` sequences, to the end of the steps to be timed."""
    max_tokens = num_steps + 8  # nothing may finish meanwhile: some steps come before the first that is timed
    max_model_len = HOST_INPUT_LEN[1] + max_tokens
    scheduler = Scheduler(
        BlockManager(num_running * -(-max_model_len // HOST_BLOCK_SIZE), HOST_BLOCK_SIZE),
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * HOST_INPUT_LEN[1],  # all prompts in one step
        max_model_len=max_model_len,
    )
    rng, params = random.Random(0), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [rng.choices(range(10_000), k=rng.randint(*HOST_INPUT_LEN)) for _ in range(num_running)]
    for seq_id, prompt in enumerate(prompts + [[1, 2, 3]] * num_waiting):
        scheduler.add(Sequence(seq_id, prompt, params))
    return scheduler


def time_host_steps(scheduler: Scheduler, num_steps: int) -> list[HostStep]:
    """Time so many decode steps in the engine's order: a step is scheduled and packed before the last is updated."""
    in_flight = ScheduledBatch()
    token_ids: list[int] = []  # of the step in flight
    times: list[HostStep] = []
    while len(times) < num_steps:
        started = perf_counter()
        batch = scheduler.schedule(in_flight=bool(in_flight))
        scheduled = perf_counter()
        pack(batch)
        packed = perf_counter()
        scheduler.update(in_flight, token_ids)
        updated = perf_counter()
        if in_flight.decode:  # a prompt's first step is none of these
            spans = (scheduled - started, packed - scheduled, updated - packed, updated - started)
            times.append(HostStep(*(1e6 * seconds for seconds in spans)))
        in_flight, token_ids = batch, [0] * len(batch.sampled)
    return times


def measure_host_case(num_running: int, num_waiting: int, num_steps: int) -> dict[str, Any]:
    """Time decode steps of `num_running` sequences; the requests behind them find no free row, so they stay there."""
    scheduler = fill_scheduler(num_running, num_waiting, num_steps)
    parts = [list(part) for part in zip(*time_host_steps(scheduler, num_steps), strict=True)]
    assert len(scheduler.running) == num_running, f"{num_running} were to run, and {len(scheduler.running)} do"
    assert scheduler.num_waiting == num_waiting, f"{num_waiting} were to wait, and {scheduler.num_waiting} do"
    median = HostStep(*map(statistics.median, parts))
    percentile_90 = HostStep(*(statistics.quantiles(part, n=10)[-1] for part in parts))
    case = {"num_running": num_running, "num_waiting": num_waiting, "num_steps": num_steps}
    return case | {"median": median._asdict(), "percentile_90": percentile_90._asdict()}


def run_host() -> dict[str, Any]:
    """Time every case and print a line for each; return all figures."""
    print(f"The host's microseconds of a decode step: median and 90th percentile of {NUM_HOST_STEPS} steps")
    print(" " * 32 + "".join(f"{name:>16}" for name in HostStep._fields))
    cases = []
    for num_running, num_waiting in HOST_CASES:
        case = measure_host_case(num_running, num_waiting, NUM_HOST_STEPS)
        pairs = zip(case["median"].values(), case["percentile_90"].values(), strict=True)
        figures = "".join(f"{median:8.0f}{high:8.0f}" for median, high in pairs)
        print(f"{f'{num_running:,} running, {num_waiting:,} waiting':>32}{figures}")
        cases.append(case)
    return {"host": cases, **describe_machine("cpu")}


# -------- --profile: where a step's time goes, host and GPU on one clock ----------------------------------------------
# The host's halves of step 7 are spans named "launch 7" and "collect 7". What the GPU does is known by name and time,
# and by a number of the call that asked for it, which lies in a launch: so each kernel is known to belong to its step,
# also where a CUDA graph asked for hundreds at once. The profiler itself takes time, on the host for each call and on
# the GPU for each kernel: steps are somewhat longer here.
HOST_SPAN = re.compile(r"(launch|collect) (\d+)")
HOST_CALLS = ("cuda_runtime", "cuda_driver")  # categories of trace events
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Microseconds. From one kernel of a graph to the next it takes less; in a longer gap the GPU waits for the host.
LONGEST_LAUNCH_LATENCY = 10.0
NUM_TRACED_STEPS = 30  # from the middle of a run
NUM_SETTLING_STEPS = 2  # traced before those and not counted: the GPU ran dry while the profiler started
NUM_TOP_KERNELS = 12
NUM_DRAWN_STEPS = 5


class Span(NamedTuple):
    """Something that took from `start` to `end`, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


class StepTrace(NamedTuple):
    """One step: the host's two halves, and the GPU's work by its start."""

    number: int
    launch: Span
    collect: Span
    gpu: list[Span]


class GpuTime(NamedTuple):
    """Microseconds of the GPU over `num_steps` steps, from their first kernel or copy to the end of their last."""

    num_steps: int
    total: float
    between_steps: float  # idle from the end of one step's work to the first of the next one's
    waiting: float  # idle inside steps, in gaps longer than LONGEST_LAUNCH_LATENCY
    latency: float  # idle inside steps, in gaps up to that


class KernelTime(NamedTuple):
    """All runs of a kernel (or copies of a kind): microseconds and runs for each step, share of all GPU work."""

    name: str
    microseconds: float
    num_runs: float
    share: float


def profile_run(engine: Engine, result: Result, folder: Path) -> dict[str, Any]:
    """Repeat a run with its middle traced to `folder`; draw it, print what is seen there and return the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    trace, picture = folder / "trace.json", folder / "steps.png"
    with trace_steps(engine.llm.engine, choose_window(result.stats), trace):
        time_run(engine, result.workload)
    traced = read_trace(trace)
    steps = traced[NUM_SETTLING_STEPS:] or traced
    figures = print_timeline(steps)
    print(f"  trace, for https://ui.perfetto.dev: {trace}")
    try:
        draw_steps(steps, picture)
        print(f"  picture: {picture}")
    except ImportError:
        print("  no picture, as matplotlib is not installed: pip install -e '.[profile]'")
    return figures


def choose_window(stats: dict[str, float]) -> range:
    """The steps to trace of a run that had so many; counted from 0, prefill and decode alike."""
    num_steps = int(stats["num_prefill_steps"] + stats["num_decode_steps"])
    start = max(0, (num_steps - NUM_TRACED_STEPS) // 2 - NUM_SETTLING_STEPS)
    return range(start, min(start + NUM_SETTLING_STEPS + NUM_TRACED_STEPS, num_steps))


@contextmanager
def trace_steps(engine: Any, window: range, path: Path) -> Iterator[None]:
    """Mark every step of an LLMEngine by two spans, and trace those in `window` until the last of them is collected."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(activities=[ProfilerActivity.CPU, *with_gpu])
    launch, collect = engine._launch, engine._collect
    num_launched = num_collected = 0
    tracing = False

    def stop() -> None:
        nonlocal tracing
        if tracing:
            tracing = False
            profiler.stop()  # when all launched work is done
            profiler.export_chrome_trace(str(path))

    def marked_launch() -> bool:
        nonlocal num_launched, tracing
        if num_launched == window.start and not tracing:
            profiler.start()
            tracing = True
        with record_function(f"launch {num_launched}"):
            launched: bool = launch()
        num_launched += launched
        return launched

    def marked_collect() -> None:
        nonlocal num_collected
        with record_function(f"collect {num_collected}"):
            collect()
        num_collected += 1
        if num_collected == window.stop:
            stop()

    # An instance's attribute comes before its class's method.
    vars(engine).update(_launch=marked_launch, _collect=marked_collect)
    try:
        yield
    finally:
        del engine._launch, engine._collect
        stop()


def read_trace(path: Path) -> list[StepTrace]:
    """The steps that were launched and collected in a trace, each with the GPU work asked for until the next launch.

    Work whose call is not in the trace goes with what ran before it: there is one stream, and steps run in order.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    halves: dict[str, dict[int, Span]] = {"launch": {}, "collect": {}}
    calls: dict[int, float] = {}  # when the host asked, by the number that call and work have in common
    work: list[tuple[int | None, Span]] = []  # that number, and what the GPU did
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        span = Span(event["name"], event["ts"], event["ts"] + event["dur"])
        category, number = event.get("cat"), event.get("args", {}).get("correlation")
        if category == "user_annotation" and (match := HOST_SPAN.fullmatch(span.name)):
            halves[match[1]][int(match[2])] = span
        elif category in HOST_CALLS and number is not None:
            calls[number] = span.start
        elif category in GPU_WORK:
            work.append((number, span))

    launches, collects = halves["launch"], halves["collect"]
    steps = sorted(launches)
    starts = [launches[step].start for step in steps]
    gpu: dict[int, list[Span]] = {step: [] for step in steps}
    place = -1  # that of a step launched before the trace began
    for number, span in work:
        if number in calls:
            place = bisect_right(starts, calls[number]) - 1
        if place >= 0:
            gpu[steps[place]].append(span)
    return [StepTrace(step, launches[step], collects[step], gpu[step]) for step in steps if step in collects]


def measure_gaps(steps: list[StepTrace]) -> GpuTime | None:
    """How long the GPU idled, and where; None where it did nothing (or there is none)."""
    steps = [step for step in steps if step.gpu]
    if not steps:
        return None
    start = end = steps[0].gpu[0].start
    between = waiting = latency = 0.0
    for step in steps:
        for place, work in enumerate(step.gpu):
            gap = max(0.0, work.start - end)
            if place == 0:
                between += gap
            elif gap > LONGEST_LAUNCH_LATENCY:
                waiting += gap
            else:
                latency += gap
            end = max(end, work.end)
    return GpuTime(len(steps), end - start, between, waiting, latency)


def top_kernels(steps: list[StepTrace]) -> list[KernelTime]:
    """The kernels that took the most time, the longest first.

    Time in which two ran counts for the earlier one: the later one had been launched ahead, and waited.
    """
    times: defaultdict[str, list[float]] = defaultdict(list)
    end = 0.0
    for work in (work for step in steps for work in step.gpu):
        times[work.name].append(max(0.0, work.end - max(work.start, end)))
        end = max(end, work.end)
    total, num_steps = sum(map(sum, times.values())), len(steps)
    kernels = [KernelTime(name, sum(t) / num_steps, len(t) / num_steps, sum(t) / total) for name, t in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)[:NUM_TOP_KERNELS]


def print_timeline(steps: list[StepTrace]) -> dict[str, Any]:
    """Print what is seen in a trace, and return the figures."""
    launch = statistics.median(step.launch.end - step.launch.start for step in steps)
    collect = statistics.median(step.collect.end - step.collect.start for step in steps)
    print(
        f"Steps {steps[0].number} to {steps[-1].number}: host {launch:,.0f} us to launch, {collect:,.0f} us to collect"
    )
    gpu, kernels = measure_gaps(steps), top_kernels(steps)
    if gpu is None:
        print("  no GPU was at work, so only the host's part is shown")
    else:
        print(
            f"  GPU: {gpu.total / gpu.num_steps:,.0f} us a step, of which it idles {gpu.between_steps / gpu.total:.2%} "
            f"between steps; inside steps {gpu.waiting / gpu.total:.2%} in gaps above {LONGEST_LAUNCH_LATENCY:g} us "
            f"(the host is late) and {gpu.latency / gpu.total:.2%} in shorter ones (from kernel to kernel)"
        )
        print(f"  {'us a step':>10} {'share':>6} {'runs':>6}  kernel")
    for kernel in kernels:
        print(f"  {kernel.microseconds:10,.1f} {kernel.share:6.1%} {kernel.num_runs:6.4g}  {kernel.name[:80]}")
    figures = {"num_steps": len(steps), "host_microseconds": {"launch": launch, "collect": collect}}
    return figures | {"gpu": gpu and gpu._asdict(), "kernels": [kernel._asdict() for kernel in kernels]}


def busy_intervals(work: list[Span]) -> list[tuple[float, float]]:
    """Start and end of the stretches in which the GPU is busy; gaps from kernel to kernel count as busy."""
    intervals: list[tuple[float, float]] = []
    for _, start, end in work:
        if intervals and start - intervals[-1][1] <= LONGEST_LAUNCH_LATENCY:
            start, last_end = intervals.pop()
            end = max(end, last_end)
        intervals.append((start, end))
    return intervals


def draw_steps(steps: list[StepTrace], path: Path) -> None:
    """Draw a few steps in lanes for launch, collect and GPU. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    steps = steps[:NUM_DRAWN_STEPS]
    lanes = ["launch", "collect", *(["GPU"] if any(step.gpu for step in steps) else [])]
    origin = steps[0].launch.start
    figure = Figure(figsize=(12, 1 + 0.7 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for step in steps:
        for height, work in enumerate(([step.launch], [step.collect], step.gpu)[: len(lanes)]):
            bars = [((start - origin) / 1e3, (end - start) / 1e3) for start, end in busy_intervals(work)]
            axes.broken_barh(bars, (height - 0.35, 0.7), facecolors=f"C{step.number % 10}")
            if bars:
                axes.text(bars[0][0], height, f" {step.number}", va="center", clip_on=True)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; a color and a number for each step")
    figure.savefig(path, dpi=150)


# -------- Command line ------------------------------------------------------------------------------------------------
def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="a Qwen3 size, with random weights (on a GPU: 0.6B)")
    which.add_argument("--model", metavar="FOLDER_OR_ID", help="a checkpoint: a folder or a hub id")
    parser.add_argument(
        "--load",
        choices=LOADS,
        default="default",
        help="default: 256 requests of 100 to 1,024 tokens in and out; long: 8 of 32,768 in and 512 out; small: 1, 4 "
        "and 16 of 128 to 512 in and 256 out; steady: 4,096 of 100 to 1,024 in and out (on a CPU far smaller ones)",
    )
    parser.add_argument("--num-seqs", type=_positive, help="as many requests instead")
    parser.add_argument("--input-len", type=_positive, help="the most tokens of a prompt instead")
    parser.add_argument("--output-len", type=_positive, help="the most tokens of a completion instead")
    parser.add_argument("--shared-prefix", type=_positive, metavar="N", help="equal tokens before all prompts")
    parser.add_argument("--max-num-seqs", type=_positive, help="the most requests run at once (512)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many tokens (all); Qwen3 recommends 20")
    parser.add_argument("--top-p", type=float, default=1.0, help="or from this share (1); Qwen3 recommends 0.95")
    parser.add_argument("--runs", type=_positive, default=1, help="timed runs, each with the next seed (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run's workload (0)")
    parser.add_argument("--engine", choices=ENGINES, default="nanoinfer")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--attention-backend", default="auto", help="nanoinfer's: auto, flash_attn, triton or torch")
    parser.add_argument("--profile", metavar="FOLDER", type=Path, help="repeat the last run and trace its middle")
    parser.add_argument("--host-only", action="store_true", help="only time the host's work of a decode step")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures here")
    args = parser.parse_args(argv)
    if args.engine != "nanoinfer" and (args.profile or args.attention_backend != "auto"):
        parser.error("--profile and --attention-backend are options of --engine nanoinfer alone")
    if args.engine == "nanovllm" and (args.top_k, args.top_p) != (0, 1):
        parser.error("nano-vllm has no --top-k and --top-p; leave them out")
    given = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    if args.host_only and (others := sorted({*given} - {"host_only", "json"})):
        options = ", ".join("--" + name.replace("_", "-") for name in others)
        parser.error(f"--host-only runs no model; leave out {options}")
    if args.engine == "transformers" and args.tensor_parallel_size > 1:
        parser.error("--engine transformers runs on one card; leave --tensor-parallel-size out")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def choose_load(args: argparse.Namespace, device: str) -> Load:
    """The load asked for, with the sizes that were given in place of its own.

    Where only the most tokens are given, the least are those on a GPU, or as many.
    """
    load, least = (LOADS if device == "cuda" else CPU_LOADS)[args.load], LOADS[args.load]
    if args.num_seqs:
        load = replace(load, num_seqs=(args.num_seqs,))
    if args.input_len:
        load = replace(load, input_len=(min(least.input_len[0], args.input_len), args.input_len))
    if args.output_len:
        load = replace(load, output_len=(min(least.output_len[0], args.output_len), args.output_len))
    max_num_seqs = args.max_num_seqs or load.max_num_seqs
    return replace(load, shared_prefix=args.shared_prefix or 0, max_num_seqs=max_num_seqs)


def run_model(args: argparse.Namespace) -> dict[str, Any]:
    """Choose model and load for the device that is here, and run the benchmark."""
    started = perf_counter()  # before PyTorch, whose import a user waits for too
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        return benchmark(choose_model(args, device, Path(scratch)), choose_load(args, device), args, device, started)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        figures = run_host() if args.host_only else run_model(args)
    except NanoinferError as error:
        sys.exit(f"bench.py: {error}")
    if args.json:
        command = ["bench.py", *(sys.argv[1:] if argv is None else argv)]
        text = json.dumps({"command": command, **figures}, indent=2, default=str)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
