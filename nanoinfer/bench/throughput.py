"""Times whole runs: `nanoinfer bench throughput` and `loads`, each set against its floor, `text` and `embed`."""

import argparse
import os
import statistics
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from nanoinfer import LLM
from nanoinfer.bench.engines import Engine, check_engine, engine_options, load_engine, load_sentence_transformers
from nanoinfer.bench.floor import Floor, Rates, compute_floor, embedding_flops, measure_rates
from nanoinfer.bench.report import describe_machine, describe_requests, draw_loads, find_device
from nanoinfer.bench.workloads import (
    EMBEDDED_TEXTS,
    NUM_WORDS,
    TEXT_JOBS,
    Load,
    Model,
    Workload,
    as_texts,
    draw_workload,
    loads_of,
    model_of,
    write_embedder,
)
from nanoinfer.errors import ConfigError
from nanoinfer.models.native_config import read_native_folder

NUM_EMBEDDINGS = 5  # runs; short texts take the host a fifth more time or less from run to run


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run `throughput` or `loads`, by the engine that is asked for and then by others, and return all figures."""
    device = find_device()
    loads = loads_of(args, device)
    check_engine(args, loads)
    figures = {args.engine: benchmark(loads, device, args, args.started)}
    for engine in getattr(args, "against", ()):
        other = argparse.Namespace(**{**vars(args), "engine": engine})
        try:
            check_engine(other, loads)
            figures[engine] = benchmark(loads, device, other, perf_counter())
        except ConfigError as error:
            print(f"{engine} is left out: {error}")
    if getattr(args, "picture", None):
        try:
            draw_loads(figures, args.picture)
        except ImportError:
            print("no picture, as matplotlib is not installed: pip install matplotlib")
    own = figures.pop(args.engine)
    return {**own, "against": figures} if figures else own


def benchmark(loads: list[tuple[str, Load]], device: str, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """Measure the hardware, then time every load; print along the way and return all figures.

    loads: by name; an engine serves all in a row that need the same options. started: when the program began, by
    `perf_counter`, so that loading counts the imports.
    """
    figures: list[dict[str, Any]] = []
    with model_of(args, device) as model:
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
    options = load.max_num_seqs, args.kv_cache_dtype, args.data_parallel_size
    floor = compute_floor(model.config, workload, rates, *options)
    seconds, counts, metrics = time_workload(engine, workload)
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


def time_workload(engine: Engine, workload: Workload) -> tuple[float, Any, dict[str, float]]:
    """Return the seconds that all requests take, what comes out of them, and by how much the engine's metrics grow."""
    engine.reset()
    before = engine.metrics()
    started = perf_counter()
    outputs = engine.generate(workload)
    seconds = perf_counter() - started
    return seconds, outputs, {name: after - before[name] for name, after in engine.metrics().items()}


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


def run_text(args: argparse.Namespace) -> dict[str, Any]:
    """Time text in and text out, as evaluations and synthetic data have it, and what constraints cost.

    Jobs that are compared take turns, so that both find the machine in the same state. Raises ConfigError where nothing
    makes tokens of text.
    """
    device = find_device()
    figures: list[dict[str, Any]] = []
    with model_of(args, device) as model:
        if model.random_weights and not args.tokenizer:
            raise ConfigError(f"{model} has no tokenizer; name a folder with one by --tokenizer, or a --model")
        check_engine(args, [])
        options = engine_options(model, TEXT_JOBS[device][0]["plain"], args)
        options |= {"tokenizer": args.tokenizer} if args.tokenizer else {}
        with closing(load_engine(model, options, args)) as engine:
            for jobs in TEXT_JOBS[device]:
                speeds = time_jobs(engine, jobs, model.config.vocab_size, args)
                plain = statistics.median(speeds["plain"])
                figures += [print_job(name, load, speeds[name], plain) for name, load in jobs.items()]
    return {"model": model.name, **describe_machine(device), "jobs": figures}


def time_jobs(
    engine: Engine, jobs: dict[str, Load], vocab_size: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return output tokens a second of jobs that take turns, by name. The first turn compiles, and is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for seed in range(args.seed, args.seed + args.runs + 1):
        for name, load in jobs.items():
            seconds, counts, _ = time_workload(engine, draw_workload(seed, load, vocab_size))
            speeds[name].append(sum(counts) / seconds)
    return {name: its[1:] for name, its in speeds.items()}


def print_job(name: str, load: Load, runs: list[float], plain: float) -> dict[str, Any]:
    """Print and return tokens a second of a job of text, and how they compare with the plain one's."""
    median, max_tokens = statistics.median(runs), load.output_len[1]
    change = "" if name == "plain" else f", {median / plain - 1:+.1%}"
    listed = " / ".join(f"{run:,.0f}" for run in runs)
    print(
        f"{load.num_seqs} prompts, {max_tokens} tokens out, {name}: {median:,.0f} output tokens/s{change} ({listed})",
        flush=True,
    )
    return {"name": name, "num_prompts": load.num_seqs, "max_tokens": max_tokens, "runs": runs}


def run_embed(args: argparse.Namespace) -> dict[str, Any]:
    """Time texts in, vectors out, with sentence-transformers beside it where that is installed.

    Both read the same folder: random weights that transformers writes, and a tokenizer whose every word is one token.
    So tokenization counts, and lengths are known.
    """
    device = find_device()
    name = args.embedding_model or ("qwen3-0.6B" if device == "cuda" else "tiny")
    figures: dict[str, Any] = {"model": name, **describe_machine(device)}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_embedder(folder, name, args.seed)
        config = read_native_folder(folder)
        rates = measure_rates(device, config)
        for load_name in args.texts or EMBEDDED_TEXTS[device]:
            workload = draw_workload(args.seed, EMBEDDED_TEXTS[device][load_name], NUM_WORDS)
            floor = embedding_flops(config, [*map(len, workload.prompts)]) / rates.matrix_rate
            figures[load_name] = time_embeddings(folder, workload, floor, device, args)
    return figures


def time_embeddings(
    folder: Path, workload: Workload, floor: float, device: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Time both engines on the same texts; sentence-transformers gets the best of its batch sizes and attentions.

    floor: the least seconds.
    """
    texts = as_texts(workload)

    def report(name: str, seconds: float) -> dict[str, Any]:
        texts_per_second, tokens_per_second = len(workload.prompts) / seconds, workload.num_input_tokens / seconds
        speed = f"{texts_per_second:,.0f} texts and {tokens_per_second:,.0f} tokens a second"
        print(f"  {name}: {speed}, {floor / seconds:.0%} of the floor")
        return {"name": name, "seconds": seconds, "texts_per_second": texts_per_second}

    with LLM(folder, max_num_seqs=args.max_num_seqs) as llm:
        ours = Engine(
            lambda its: [output.embedding for output in llm.embed(its.prompts, use_tqdm=False)],
            reset=llm.reset_prefix_cache,
        )
        _, seconds, embeddings = best_engine([("nanoinfer", ours)], texts)
    figures: dict[str, Any] = {"floor_seconds": floor, "num_tokens": workload.num_input_tokens}
    figures["nanoinfer"] = report("nanoinfer", seconds)
    if find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed, and is left out")
        return figures
    name, its_seconds, its_embeddings = best_engine(load_sentence_transformers(folder, device), texts)
    figures["sentence-transformers"] = report(name, its_seconds)
    figures["speedup"] = its_seconds / seconds
    cosine = min(float(a @ b) for a, b in zip(embeddings, its_embeddings, strict=True))
    figures["lowest_cosine"] = cosine
    print(f"  {figures['speedup']:.2f} times as fast; the least alike of both engines' embeddings: cosine {cosine:.5f}")
    return figures


def best_engine(engines: Iterable[tuple[str, Engine]], texts: Workload) -> tuple[str, float, Any]:
    """Return the name of the fastest engine, the median seconds of its runs (the first warms up), and its outputs."""
    timed = []
    for name, engine in engines:
        runs = [time_workload(engine, texts)[:2] for _ in range(1 + NUM_EMBEDDINGS)]
        timed.append((name, statistics.median(seconds for seconds, _ in runs[1:]), runs[-1][1]))
    if not timed:
        raise ConfigError("sentence-transformers has no attention that runs here; uninstall it, or mend it")
    return min(timed, key=lambda one: one[1])
