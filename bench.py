"""How fast is it, and how fast could it be: nano-vllm's workload, timed and set against the hardware's floor.

    python bench.py                          # on a GPU: Qwen3-0.6B with random weights, 256 requests
    python bench.py --size 8B --runs 3       # another size; each run draws a new workload
    python bench.py --model Qwen/Qwen3-0.6B  # real weights
    python bench.py --engine vllm            # the same work by another engine, where that is installed

A forward pass is as fast with random weights as with trained ones, so none need be downloaded. Without a GPU the
bundled tiny checkpoint does a small load, which shows that everything runs and says little about speed.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

# These cost milliseconds; what takes seconds to import is imported where the clock runs.
from nanoinfer import NanoinferError, tiny_model_path
from nanoinfer import __version__ as nanoinfer_version
from nanoinfer.config import ModelConfig
from nanoinfer.utils.hub import resolve_model_folder

GIB = 2**30
MAX_NUM_SEQS = 512  # nano-vllm's, given to every engine that takes it
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run: token ids of each prompt, and how many tokens each is to be continued by."""

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


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

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_matrix_seconds + self.decode_kv_seconds


@dataclass(frozen=True, slots=True)
class Result:
    """One timed run. stats: the engine's own prefill and decode figures, empty where it keeps none."""

    seed: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    stats: dict[str, float]

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def draw_workload(seed: int, num_seqs: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    """nano-vllm's workload: the same draws in the same order, so that figures compare.

    Lengths are uniform from 100 (or the maximum, if that is less) to the maximum; ids stay inside the vocabulary.
    """
    randint = random.Random(seed).randint
    max_id = min(10000, vocab_size - 1)
    prompts = [[randint(0, max_id) for _ in range(randint(min(100, input_len), input_len))] for _ in range(num_seqs)]
    return Workload(seed, prompts, [randint(min(100, output_len), output_len) for _ in range(num_seqs)])


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


def make_params(kind: Any, workload: Workload, **others: Any) -> list[Any]:
    """One sampling option object of an engine's own `kind` for each request."""
    return [kind(temperature=0.6, ignore_eos=True, max_tokens=count, **others) for count in workload.max_tokens]


def load_nanoinfer(model: Model, options: dict[str, Any], attention_backend: str) -> Engine:
    from nanoinfer import LLM, SamplingParams

    load_format = "dummy" if model.random_weights else "auto"
    llm = LLM(model.folder, load_format=load_format, attention_backend=attention_backend, **options)

    def generate(workload: Workload) -> list[int]:
        outputs = llm.generate([*workload.prompts], make_params(SamplingParams, workload), use_tqdm=False)
        return [len(output.token_ids) for output in outputs]

    return Engine(generate, lambda: asdict(llm.engine.stats), llm.reset_prefix_cache, llm.close)


def load_nanovllm(model: Model, options: dict[str, Any], _attention_backend: str) -> Engine:
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


def load_vllm(model: Model, options: dict[str, Any], _attention_backend: str) -> Engine:
    from vllm import LLM, SamplingParams

    load_format = "dummy" if model.random_weights else "auto"
    llm = LLM(model=str(model.folder), load_format=load_format, skip_tokenizer_init=True, **options)

    def generate(workload: Workload) -> list[int]:
        inputs = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        outputs = llm.generate(inputs, make_params(SamplingParams, workload, detokenize=False), use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return Engine(generate, reset=llm.reset_prefix_cache)


def load_transformers(model: Model, _options: dict[str, Any], _attention_backend: str) -> Engine:
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
            options = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, max_new_tokens=steps, pad_token_id=0)
            output = net.generate(padded, attention_mask=mask, generation_config=options)
            assert output.shape[1] == width + steps, f"generate stopped at {output.shape[1] - width} of {steps} tokens"
        return workload.max_tokens  # what a row got beyond its own max_tokens is not counted

    return Engine(generate)


ENGINES = {
    "nanoinfer": load_nanoinfer,
    "nanovllm": load_nanovllm,
    "vllm": load_vllm,
    "transformers": load_transformers,
}


def load_engine(model: Model, args: argparse.Namespace) -> Engine:
    """Start the engine asked for. Exits where it is not installed, or the model is too short."""
    longest, limit = args.input_len + args.output_len, model.config.max_model_len
    if longest > limit:
        sys.exit(f"bench.py: --input-len and --output-len add up to {longest}, and {model.name} takes {limit}")
    options = {
        "max_model_len": min(max(4096, longest), limit),  # 4096 is what nano-vllm's benchmark sets
        "max_num_seqs": MAX_NUM_SEQS,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enforce_eager": args.enforce_eager,
    }
    try:
        return ENGINES[args.engine](model, options, args.attention_backend)
    except ImportError as error:
        sys.exit(f"bench.py: --engine {args.engine} cannot be imported here ({error}); install it first")


def time_run(engine: Engine, workload: Workload) -> Result:
    """Run the workload once. Exits if a request got another number of tokens than it asked for."""
    engine.reset()
    before = engine.stats()
    started = time.perf_counter()
    counts = engine.generate(workload)
    seconds = time.perf_counter() - started
    after = engine.stats()
    if counts != workload.max_tokens:
        sys.exit(f"bench.py: {sum(counts)} tokens came out where {workload.num_output_tokens} were asked for")
    stats = {name: after[name] - before[name] for name in after}
    return Result(workload.seed, len(counts), workload.num_input_tokens, workload.num_output_tokens, seconds, stats)


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
    config: ModelConfig, workload: Workload, rates: Rates, bytes_per_value: int = 2, max_num_seqs: int = MAX_NUM_SEQS
) -> Floor:
    """The least time for the workload on hardware of these rates, by a model that leaves out all but the unavoidable.

    Prefill is matrix products at the matrix rate: 2 FLOPs for each layer weight and prompt token; the same for each
    lm_head weight and request, as only the last position needs logits; and causal attention, 4 FLOPs for each layer,
    each value of a query (heads x head_dim), and each pair of a token and one at or before it.

    A decode step takes the longer of two: reading layers and lm_head once (the embedding is a lookup, so it counts
    only where it is the lm_head), or 2 FLOPs for each of these weights and running sequence. Reading key and value of
    every token that the running sequences attend to comes on top: it alternates with the products, layer by layer.

    All requests are prefilled first, then decode together (in waves, beyond `max_num_seqs`). Activations, norms,
    sampling, launches and the host count as nothing, and no cache is large enough to hold weights from step to step.
    """
    layers, lm_head = count_weights(config)
    query_width = config.num_attention_heads * config.head_dim
    kv_bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_value
    pairs = sum(len(prompt) * (len(prompt) + 1) // 2 for prompt in workload.prompts)
    products = 2 * layers * workload.num_input_tokens + 2 * lm_head * len(workload.prompts)
    attention = 4 * config.num_hidden_layers * query_width * pairs

    steps = decode_steps(workload, max_num_seqs)
    read_weights = (layers + lm_head) * bytes_per_value / rates.bandwidth
    multiply_one = 2 * (layers + lm_head) / rates.matrix_rate
    return Floor(
        prefill_seconds=(products + attention) / rates.matrix_rate,
        decode_matrix_seconds=sum(max(read_weights, multiply_one * num_seqs) for num_seqs, _ in steps),
        decode_kv_seconds=sum(context for _, context in steps) * kv_bytes_per_token / rates.bandwidth,
    )


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


def print_result(result: Result) -> None:
    print(
        f"Seed {result.seed}: {result.num_requests} requests, {result.input_tokens:,} tokens in, "
        f"{result.output_tokens:,} out, {result.seconds:.2f} s, {result.output_tokens_per_second:,.0f} output tokens/s"
    )
    for phase in ("prefill", "decode") if result.stats else ():
        tokens, seconds = result.stats[f"{phase}_tokens"], result.stats[f"{phase}_seconds"]
        steps = result.stats[f"num_{phase}_steps"]
        print(
            f"  {phase}: {seconds:.2f} s, {tokens:,} tokens in {steps:,} steps, {tokens / max(seconds, 1e-9):,.0f} "
            f"tokens/s, {1e3 * seconds / max(steps, 1):.2f} ms a step"
        )


def print_floor(floor: Floor, result: Result) -> None:
    prefill, matrices, kv = (part / floor.seconds for part in asdict(floor).values())
    print(
        f"  seed {result.seed}: {floor.seconds:.3g} s, {result.output_tokens / floor.seconds:,.0f} output tokens/s "
        f"(prefill {prefill:.0%}; decode: weights and products {matrices:.0%}, KV reads {kv:.0%}); "
        f"reached {floor.seconds / result.seconds:.1%}"
    )


def describe_machine() -> dict[str, Any]:
    """The hardware and the versions that a figure belongs to."""
    import torch

    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cpu_cores": os.cpu_count()}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": card.name, "gpu_gib": round(card.total_memory / GIB, 1), "cuda": torch.version.cuda}
        hardware["gpus_seen"] = torch.cuda.device_count()
    versions = {"python": platform.python_version(), "nanoinfer": nanoinfer_version}
    for package in ("torch", "triton", "transformers", "flash-attn", "nano-vllm", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"hardware": hardware, "versions": versions}


def time_all_runs(engine: Engine, model: Model, args: argparse.Namespace) -> list[tuple[Workload, Result]]:
    """Warm up, then time and print each run."""
    engine.generate(Workload(seed=0, prompts=[list(range(8))], max_tokens=[16]))
    runs = []
    for seed in range(args.seed, args.seed + args.runs):
        workload = draw_workload(seed, args.num_seqs, args.input_len, args.output_len, model.config.vocab_size)
        result = time_run(engine, workload)
        print_result(result)
        runs.append((workload, result))
    return runs


def add_floor(workload: Workload, result: Result, model: Model, rates: Rates, bytes_per_value: int) -> dict[str, Any]:
    """Print the floor of a run, and return the run's figures with it."""
    floor = compute_floor(model.config, workload, rates, bytes_per_value)
    print_floor(floor, result)
    figures = asdict(result) | {"output_tokens_per_second": result.output_tokens_per_second, "floor": asdict(floor)}
    return figures | {"floor_seconds": floor.seconds, "share_of_floor": floor.seconds / result.seconds}


def benchmark(model: Model, args: argparse.Namespace, device: str, started: float) -> dict[str, Any]:
    """Measure the hardware, load, run; print along the way and return all figures."""
    # Before the engine: memory taken after a far larger piece was freed has been seen to read a tenth slower.
    rates_started = time.perf_counter()
    dtype_name = model.config.dtype if device == "cuda" else "float32"
    rates = measure_rates(device, dtype_name, args.tensor_parallel_size)
    started += time.perf_counter() - rates_started
    with closing(load_engine(model, args)) as engine:
        load_seconds = time.perf_counter() - started
        machine = describe_machine()
        where = machine["hardware"].get("gpu", f"{os.cpu_count()} CPU cores")
        weights = "random weights" if model.random_weights else "its own weights"
        print(f"{model.name} ({weights}), {args.engine} on {where}: loaded in {load_seconds:.1f} s, imports included")
        runs = time_all_runs(engine, model, args)

    print(f"Floor at {rates.bandwidth / 1e12:.3f} TB/s and {rates.matrix_rate / 1e12:.4g} TFLOP/s: {rates.method}")
    bytes_per_value = 4 if dtype_name == "float32" else 2
    figures = [add_floor(workload, result, model, rates, bytes_per_value) for workload, result in runs]
    median = statistics.median(run["output_tokens_per_second"] for run in figures)
    if len(runs) > 1:
        print(f"Median of {len(runs)} runs: {median:,.0f} output tokens/s")
    return {
        "model": model.name,
        "load_seconds": load_seconds,
        "median_output_tokens_per_second": median,
        "runs": figures,
        "rates": asdict(rates),
        "options": vars(args),
        **machine,
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--size", choices=SIZES, help="a Qwen3 size, with random weights (on a GPU: 0.6B)")
    which.add_argument("--model", metavar="FOLDER_OR_ID", help="a checkpoint: a folder or a hub id")
    parser.add_argument("--num-seqs", type=_positive, help="requests (256; on a CPU 16)")
    parser.add_argument("--input-len", type=_positive, help="the most tokens of a prompt (1024; on a CPU 64)")
    parser.add_argument("--output-len", type=_positive, help="the most tokens of a completion (1024; on a CPU 64)")
    parser.add_argument("--runs", type=_positive, default=1, help="timed runs, each with the next seed (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run's workload (0)")
    parser.add_argument("--engine", choices=ENGINES, default="nanoinfer")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--attention-backend", default="auto", help="nanoinfer's: auto, flash_attn, triton or torch")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures here")
    args = parser.parse_args(argv)
    if args.engine != "nanoinfer" and args.attention_backend != "auto":
        parser.error("--attention-backend is an option of --engine nanoinfer alone")
    if args.engine == "transformers" and args.tensor_parallel_size > 1:
        parser.error("--engine transformers runs on one card; leave --tensor-parallel-size out")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    started = time.perf_counter()  # before PyTorch, whose import a user waits for too
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_seqs, length = (256, 1024) if device == "cuda" else (16, 64)
    args.num_seqs = args.num_seqs or num_seqs
    args.input_len, args.output_len = args.input_len or length, args.output_len or length
    try:
        with tempfile.TemporaryDirectory() as scratch:
            figures = benchmark(choose_model(args, device, Path(scratch)), args, device, started)
    except NanoinferError as error:
        sys.exit(f"bench.py: {error}")
    if args.json:
        command = ["bench.py", *(sys.argv[1:] if argv is None else argv)]
        text = json.dumps({"command": command, **figures}, indent=2, default=str)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
