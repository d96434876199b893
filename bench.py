"""How fast is it, and how fast could it be: a workload, timed and set against the hardware's floor.

    python bench.py                          # on a GPU: Qwen3-0.6B with random weights, 256 requests
    python bench.py --size 8B --runs 3       # another size; each run draws a new workload
    python bench.py --model Qwen/Qwen3-0.6B  # real weights
    python bench.py --engine vllm            # the same work by another engine, where that is installed
    python bench.py --load small             # 1, 4 and 16 requests; also: long, steady, --shared-prefix 512
    python bench.py --profile timeline       # and a trace, a picture and figures of single steps, in this folder
    python bench.py --host-only              # what a step costs the host; needs no GPU and no model

The default workload is nano-vllm's. A forward pass is as fast with random weights as with trained ones, so none need
be downloaded. Without a GPU the bundled tiny checkpoint does a small load, which shows that everything runs and says
little about speed.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

# These cost milliseconds; what takes seconds to import is imported where the clock runs.
from benchmarks.floor import GIB, Floor, compute_floor, measure_rates
from benchmarks.host import measure_host
from benchmarks.workload import CPU_LOADS, LOADS, Load, Workload, draw_workload
from nanoinfer import NanoinferError, tiny_model_path
from nanoinfer import __version__ as nanoinfer_version
from nanoinfer.config import ModelConfig
from nanoinfer.utils.hub import resolve_model_folder

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
class Result:
    """One timed run. stats: the engine's own prefill and decode figures, empty where it keeps none."""

    seed: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    shared_prefix: int
    seconds: float
    stats: dict[str, float]

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


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


def load_nanoinfer(model: Model, options: dict[str, Any], attention_backend: str) -> Engine:
    from nanoinfer import LLM, SamplingParams

    load_format = "dummy" if model.random_weights else "auto"
    llm = LLM(model.folder, load_format=load_format, attention_backend=attention_backend, **options)
    num_cached = 0

    def generate(workload: Workload) -> list[int]:
        nonlocal num_cached
        outputs = llm.generate([*workload.prompts], make_params(SamplingParams, workload), use_tqdm=False)
        num_cached += sum(output.num_cached_tokens for output in outputs)
        return [len(output.token_ids) for output in outputs]

    def stats() -> dict[str, float]:
        return asdict(llm.engine.stats) | {"cached_tokens": num_cached}

    return Engine(generate, stats, llm.reset_prefix_cache, llm.close, llm)


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
    return Result(
        workload.seed,
        len(counts),
        workload.num_input_tokens,
        workload.num_output_tokens,
        workload.shared_prefix,
        seconds,
        stats,
    )


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
    if result.shared_prefix and "cached_tokens" in result.stats:
        cached = result.stats["cached_tokens"]
        print(
            f"  prefix cache: {cached:,} of {result.input_tokens:,} prompt tokens found "
            f"({cached / result.input_tokens:.1%}), {result.stats['prefill_tokens']:,} computed"
        )


def print_floor(floor: Floor, result: Result) -> None:
    parts = (floor.prefill_seconds, floor.decode_matrix_seconds, floor.decode_kv_seconds)
    prefill, matrices, kv = (part / floor.seconds for part in parts)
    print(
        f"  seed {result.seed}, {result.num_requests} requests: {floor.seconds:.3g} s, "
        f"{result.output_tokens / floor.seconds:,.0f} output tokens/s "
        f"(prefill {prefill:.0%}; decode: weights and products {matrices:.0%}, KV reads {kv:.0%}); "
        f"{1e3 * floor.decode_seconds / max(floor.num_decode_steps, 1):.3g} ms a decode step; "
        f"reached {floor.seconds / result.seconds:.1%}"
    )


def describe_host() -> dict[str, Any]:
    """The hardware and the versions that a figure belongs to, as far as the host alone says it."""
    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cpu_cores": os.cpu_count()}
    versions = {"python": platform.python_version(), "nanoinfer": nanoinfer_version}
    for package in ("torch", "triton", "transformers", "flash-attn", "nano-vllm", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"hardware": hardware, "versions": versions}


def describe_gpu() -> dict[str, Any]:
    """The first GPU and how many there are; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    card = torch.cuda.get_device_properties(0)
    gpu = {"gpu": card.name, "gpu_gib": round(card.total_memory / GIB, 1), "cuda": torch.version.cuda}
    return gpu | {"gpus_seen": torch.cuda.device_count()}


def time_all_runs(engine: Engine, model: Model, load: Load, args: argparse.Namespace) -> list[tuple[Workload, Result]]:
    """Warm up, then time and print each run."""
    engine.generate(Workload(seed=0, prompts=[list(range(8))], max_tokens=[16]))
    runs = []
    for num_seqs in load.num_seqs:
        for seed in range(args.seed, args.seed + args.runs):
            workload = draw_workload(seed, num_seqs, load, model.config.vocab_size)
            result = time_run(engine, workload)
            print_result(result)
            runs.append((workload, result))
    return runs


def profile_run(engine: Engine, workload: Workload, result: Result, folder: Path) -> dict[str, Any]:
    """Run a workload again, with some of its steps traced; `result`, of the run before, says how many there are."""
    from benchmarks.timeline import profile_steps

    num_prefill, num_decode = int(result.stats["num_prefill_steps"]), int(result.stats["num_decode_steps"])
    return profile_steps(engine.llm.engine, lambda: time_run(engine, workload), num_prefill, num_decode, folder)


def figures_of(result: Result, floor: Floor) -> dict[str, Any]:
    """Everything that is known of a run."""
    figures = asdict(result) | {"output_tokens_per_second": result.output_tokens_per_second, "floor": asdict(floor)}
    return figures | {"floor_seconds": floor.seconds, "share_of_floor": floor.seconds / result.seconds}


def benchmark(model: Model, load: Load, args: argparse.Namespace, device: str, started: float) -> dict[str, Any]:
    """Measure the hardware, load, run; print along the way and return all figures."""
    # Before the engine: memory taken after a far larger piece was freed has been seen to read a tenth slower.
    rates_started = time.perf_counter()
    dtype_name = model.config.dtype if device == "cuda" else "float32"
    rates = measure_rates(device, dtype_name, args.tensor_parallel_size)
    started += time.perf_counter() - rates_started
    with closing(load_engine(model, load, args)) as engine:
        load_seconds = time.perf_counter() - started
        machine = describe_host()
        machine["hardware"] |= describe_gpu()
        where = machine["hardware"].get("gpu", f"{os.cpu_count()} CPU cores")
        weights = "random weights" if model.random_weights else "its own weights"
        print(f"{model.name} ({weights}), {args.engine} on {where}: loaded in {load_seconds:.1f} s, imports included")
        runs = time_all_runs(engine, model, load, args)
        profile = profile_run(engine, *runs[-1], args.profile) if args.profile else None

    print(f"Floor at {rates.bandwidth / 1e12:.3f} TB/s and {rates.matrix_rate / 1e12:.4g} TFLOP/s: {rates.method}")
    bytes_per_value = 4 if dtype_name == "float32" else 2
    figures = []
    for workload, result in runs:
        floor = compute_floor(model.config, workload, rates, bytes_per_value, load.max_num_seqs)
        print_floor(floor, result)
        figures.append(figures_of(result, floor))
    # Over runs of one size only: others have nothing to do with each other.
    median = None
    if len(load.num_seqs) == 1:
        median = statistics.median(run["output_tokens_per_second"] for run in figures)
        if len(runs) > 1:
            print(f"Median of {len(runs)} runs: {median:,.0f} output tokens/s")
    return {
        "model": model.name,
        "load_seconds": load_seconds,
        "median_output_tokens_per_second": median,
        "runs": figures,
        "rates": asdict(rates),
        "load": asdict(load),
        "profile": profile,
        "options": vars(args),
        **machine,
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument(
        "--shared-prefix", type=_positive, metavar="N", help="begin all prompts with N equal tokens more"
    )
    parser.add_argument("--max-num-seqs", type=_positive, help="the most requests run at once (512)")
    parser.add_argument("--runs", type=_positive, default=1, help="timed runs, each with the next seed (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run's workload (0)")
    parser.add_argument("--engine", choices=ENGINES, default="nanoinfer")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--attention-backend", default="auto", help="nanoinfer's: auto, flash_attn, triton or torch")
    parser.add_argument(
        "--profile",
        metavar="FOLDER",
        type=Path,
        help="run the last workload once more, and trace some of its steps to here",
    )
    parser.add_argument("--host-only", action="store_true", help="only time the host's work of a decode step")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures here")
    args = parser.parse_args(argv)
    if args.engine != "nanoinfer" and args.attention_backend != "auto":
        parser.error("--attention-backend is an option of --engine nanoinfer alone")
    if args.engine != "nanoinfer" and args.profile:
        parser.error("--profile is an option of --engine nanoinfer alone")
    if args.host_only and (args.size or args.model or args.profile):
        parser.error("--host-only runs no model; leave --size, --model and --profile out")
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


def run_host() -> dict[str, Any]:
    """Time the host alone; return all figures."""
    return {"host": [asdict(case) for case in measure_host()], **describe_host()}


def run_model(args: argparse.Namespace) -> dict[str, Any]:
    """Choose model and load for the device that is here, and run the benchmark."""
    started = time.perf_counter()  # before PyTorch, whose import a user waits for too
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        return benchmark(choose_model(args, device, Path(scratch)), choose_load(args, device), args, device, started)


def main(argv: Sequence[str] | None = None) -> None:
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
