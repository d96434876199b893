"""`nanoinfer bench throughput` and `loads`: times whole runs and sets each against its floor."""

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import date
from importlib import metadata
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

from nanoinfer import __version__ as nanoinfer_version
from nanoinfer.bench.engines import Engine, engine_options, load_engine
from nanoinfer.bench.floor import GIB, Floor, Rates, compute_replica_floor, measure_rates
from nanoinfer.bench.workloads import Load, Model, Workload, choose_model, draw_workload


def benchmark(loads: list[tuple[str, Load]], device: str, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Measure the hardware, then time every load; print along the way and return all figures.

    loads: by name; an engine serves all in a row that need the same options. started: when the program began, by
    `perf_counter`, so that loading counts the imports.
    """
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = choose_model(args.model, args.size, device, Path(scratch), args.quantization)
        needed = [(engine_options(model, load, args), name, load) for name, load in loads]
        before = perf_counter()
        rates = measure_rates(device, model.config, args.tensor_parallel_size)
        machine = describe_machine(device)
        where = machine["hardware"].get("gpu", f"{os.cpu_count()} CPU cores")
        started += perf_counter() - before
        print(f"Floor: the least time that the hardware allows, at {rates}")
        for options, group in groupby(needed, key=lambda item: item[0]):
            with closing(load_engine(model, options, args)) as engine:
                load_seconds = perf_counter() - started
                cache = "" if args.kv_cache_dtype == "auto" else f", KV cache in {args.kv_cache_dtype}"
                print(f"{model}{cache}, {args.engine} on {where}: loaded in {load_seconds:.1f} s")
                size = args.data_parallel_size
                engine.generate(Workload(seed=0, prompts=[list(range(8))] * size, max_tokens=[16] * size))  # warms up
                for _, name, load in group:
                    timed = time_load(engine, model, name, load, rates, args)
                    figures.append({"name": name, "load": asdict(load), "load_seconds": load_seconds, **timed})
            del engine  # or the next one would lie in memory beside it
            started = perf_counter()
    return {"model": model.name, **machine, "rates": asdict(rates), "loads": figures}


def time_load(
    engine: Engine, model: Model, name: str, load: Load, rates: Rates, args: argparse.Namespace
) -> dict[str, Any]:
    """Time the runs of one load, and return their figures and the median of their speeds."""
    if load.shared_prefix or load.num_samples > 1:
        # Steps whose rows share a prefix run kernels of their own, which the first one compiles. Its prompts are drawn
        # from a seed that is not timed, because not every engine can forget them. The first timed run still captures
        # the CUDA graphs of smaller batches.
        short, unused_seed = replace(load, output_len=(2, 2)), args.seed + args.runs
        engine.generate(draw_workload(unused_seed, short, model.config.vocab_size))
    seeds = range(args.seed, args.seed + args.runs)
    runs = [time_run(engine, model, name, load, rates, seed, args) for seed in seeds]
    median, median_of_prompts = (
        statistics.median(run[f"{kind}_tokens_per_second"] for run in runs) for kind in ("output", "prompt")
    )
    if args.runs > 1:
        requests = describe_requests(load.num_seqs, load.num_samples)
        speeds = f"{median_of_prompts:,.0f} prompt and {median:,.0f} output tokens/s"
        print(f"{name}, {requests}, median of {args.runs} runs: {speeds}")
    medians = {"median_output_tokens_per_second": median, "median_prompt_tokens_per_second": median_of_prompts}
    return {**medians, "runs": runs}


def time_run(
    engine: Engine, model: Model, name: str, load: Load, rates: Rates, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Time and print one run, and return its figures; `metrics` are the engine's own, empty where it has none.

    Raises RuntimeError if a sample got another number of tokens than its request asked for.
    """
    workload = draw_workload(seed, load, model.config.vocab_size)
    options = args.data_parallel_size, args.kv_cache_dtype, load.max_num_seqs
    floor = compute_replica_floor(model.config, workload, rates, *options)
    engine.reset()
    before = engine.metrics()
    started = perf_counter()
    counts = engine.generate(workload)
    seconds = perf_counter() - started
    metrics = {metric: after - before[metric] for metric, after in engine.metrics().items()}
    if counts != workload.output_lens:
        raise RuntimeError(f"{sum(counts)} tokens came out where {workload.num_output_tokens} were asked for")
    print_run(name, workload, floor, seconds, metrics, args.data_parallel_size)
    return {
        "seed": seed,
        "input_tokens": workload.num_input_tokens,
        "output_tokens": workload.num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": workload.num_output_tokens / seconds,
        "prompt_tokens_per_second": workload.num_input_tokens / seconds,
        "metrics": metrics,
        "floor": asdict(floor),
        "floor_seconds": floor.seconds,
        "share_of_floor": floor.seconds / seconds,
    }


def print_run(
    name: str, work: Workload, floor: Floor, seconds: float, metrics: dict[str, float], num_replicas: int
) -> None:
    """Print the speed of a run, what the engine says of its phases, and the floor."""
    print(
        f"{name}, seed {work.seed}: {describe_requests(len(work.prompts), work.num_samples)}, "
        f"{work.num_input_tokens:,} tokens in, {work.num_output_tokens:,} out, "
        f"{seconds:.2f} s, {work.num_input_tokens / seconds:,.0f} prompt and "
        f"{work.num_output_tokens / seconds:,.0f} output tokens/s, "
        f"{floor.seconds / seconds:.1%} of what the floor allows"
    )
    for phase in ("prefill", "decode") if metrics else ():
        tokens, spent, steps = metrics[f"{phase}_tokens"], metrics[f"{phase}_seconds"], metrics[f"num_{phase}_steps"]
        print(
            f"  {phase}: {spent:.2f} s, {tokens:,} tokens in {steps:,} steps, {tokens / max(spent, 1e-9):,.0f} "
            f"tokens/s, {1e3 * spent * num_replicas / max(steps, 1):.2f} ms a step"
        )
    if (work.shared_prefix or work.num_samples > 1 or work.answers) and metrics:
        cached, prompt_tokens = metrics["cached_tokens"], metrics["num_prompt_tokens"]  # those of all samples
        print(
            f"  prefix cache: {cached:,} of {prompt_tokens:,} prompt tokens found "
            f"({cached / prompt_tokens:.1%}), {metrics['prefill_tokens']:,} computed"
        )
    parts = (floor.prefill_seconds, floor.decode_matrix_seconds, floor.decode_kv_seconds)
    prefill, matrices, kv = (part / floor.seconds for part in parts)
    print(
        f"  floor: {floor.seconds:.3g} s, {work.num_output_tokens / floor.seconds:,.0f} output tokens/s "
        f"(prefill {prefill:.0%}; decode: weights and products {matrices:.0%}, KV reads {kv:.0%}), "
        f"{1e3 * floor.decode_seconds / max(floor.num_decode_steps, 1):.3g} ms a decode step"
    )


def describe_requests(num_requests: int, num_samples: int) -> str:
    return f"{num_requests} requests" + (f" of {num_samples} samples" if num_samples > 1 else "")


def describe_machine(device: str) -> dict[str, Any]:
    """Return the date, commit, hardware and versions of a figure. The hardware: the host, and on "cuda" its GPUs."""
    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cpu_cores": os.cpu_count()}
    if device == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": gpu.name, "gpu_gib": round(gpu.total_memory / GIB, 1), "cuda": torch.version.cuda}
        hardware["gpus_seen"] = torch.cuda.device_count()
    versions = {"python": platform.python_version(), "nanoinfer": nanoinfer_version}
    for package in ("torch", "triton", "transformers", "flash-attn", "nano-vllm", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"date": date.today().isoformat(), "commit": find_commit(), "hardware": hardware, "versions": versions}


def find_commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the clone that the package runs from ("-dirty" if files differ), or None outside a clone."""
    if not (root / ".git").exists():  # or git would name a repository around the installed package
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return None
