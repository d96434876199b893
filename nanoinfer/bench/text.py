"""`nanoinfer bench text`: text in and text out, as evaluations and synthetic data have it, and what constraints cost.

The prompts are words of Python's documentation in random order, so that no two begin alike. Jobs that are compared take
turns, so that both find the machine in the same state.
"""

import argparse
import random
import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any, NamedTuple

from nanoinfer.bench.engines import engine_options
from nanoinfer.bench.throughput import describe_machine
from nanoinfer.bench.workloads import Load, choose_model
from nanoinfer.errors import ConfigError

REGEX = "[a-zA-Z0-9 ,.]*"
FIELDS: list[dict[str, Any]] = [{"type": "integer"}, {"type": "string", "maxLength": 12}, {"enum": ["low", "high"]}]
SCHEMA = {
    "type": "object",
    "properties": {f"field_{index}": FIELDS[index % 3] for index in range(30)},
    "required": [f"field_{index}" for index in range(30)],
    "additionalProperties": False,
}


class Job(NamedTuple):
    """Says how many prompts a job has, how many tokens come out of each, and how many are constrained by what."""

    name: str
    num_prompts: int
    max_tokens: int
    num_constrained: int = 0
    constraint: dict[str, Any] | None = None  # as StructuredOutputsParams takes it


# By device; those of a group are compared.
JOBS = {
    "cuda": [
        [Job("plain", 1024, 256), Job("regular expression on all", 1024, 256, 1024, {"regex": REGEX})],
        [Job("plain", 256, 256), Job("regular expression on one", 256, 256, 1, {"regex": REGEX})],
        [Job("plain", 256, 400), Job("JSON of 30 fields on all", 256, 400, 256, {"json": SCHEMA})],
    ],
    "cpu": [
        [Job("plain", 16, 32), Job("regular expression on all", 16, 32, 16, {"regex": REGEX})],
        [Job("plain", 16, 32), Job("JSON of 30 fields on all", 16, 32, 16, {"json": SCHEMA})],
    ],
}
WORDS = {"cuda": (100, 400), "cpu": (10, 40)}  # of a prompt


def run(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time all jobs, print their speeds, and return them. Raises ConfigError where nothing makes tokens of text."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = choose_model(args.model, args.size, device, Path(scratch), args.quantization)
        if model.random_weights and not args.tokenizer:
            raise ConfigError(f"{model} has no tokenizer; name a folder with one by --tokenizer, or a --model")
        options = engine_options(model, Load(1, (1, 1), (1, 1)), args) | model.options
        if args.tokenizer:
            options["tokenizer"] = args.tokenizer
        engine = load_engine(args.engine, model.folder, options)
        with closing(engine.llm):
            for jobs in JOBS[device]:
                speeds: dict[str, list[float]] = {job.name: [] for job in jobs}
                for seed in range(args.seed, args.seed + args.runs + 1):  # the first turn compiles, and is not counted
                    for job in jobs:
                        prompts = draw_prompts(seed, job.num_prompts, WORDS[device])
                        speeds[job.name].append(tokens_per_second(engine, job, prompts, args))
                figures += report(jobs, speeds)
    return {"model": model.name, **describe_machine(device), "jobs": figures}


class TextEngine(NamedTuple):
    """Holds an engine, and its classes of sampling parameters and of constraints, which have the same names."""

    llm: Any
    params: Any
    constraint: Any


def load_engine(engine: str, folder: Path, options: dict[str, Any]) -> TextEngine:
    """Start an engine. Raises ConfigError where it is not installed."""
    if engine == "nanoinfer":
        from nanoinfer import LLM, SamplingParams, StructuredOutputsParams

        return TextEngine(LLM(folder, **options), SamplingParams, StructuredOutputsParams)
    try:
        import vllm
        from vllm.sampling_params import StructuredOutputsParams as Rule
    except ImportError as error:
        raise ConfigError(f"--engine {engine} cannot be imported here ({error}); install it first") from error
    llm = vllm.LLM(model=str(folder), **options)
    llm.close = lambda: None
    return TextEngine(llm, vllm.SamplingParams, Rule)


def tokens_per_second(engine: TextEngine, job: Job, prompts: list[str], args: argparse.Namespace) -> float:
    """Run a job once, without cached prefixes."""
    common = {"temperature": 0.6, "top_k": args.top_k, "top_p": args.top_p, "ignore_eos": True}
    common["max_tokens"] = job.max_tokens
    params = [engine.params(**common)] * len(prompts)
    for index in range(job.num_constrained):
        rule = engine.constraint(**job.constraint or {})
        params[index] = engine.params(**common, structured_outputs=rule)
    engine.llm.reset_prefix_cache()
    started = perf_counter()
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    seconds = perf_counter() - started
    if failed := [output for output in outputs if output.outputs[0].finish_reason == "error"]:
        raise RuntimeError(f"{len(failed)} of {len(outputs)} requests of {job.name!r} failed; the first: {failed[0]}")
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def draw_prompts(seed: int, num_prompts: int, num_words: tuple[int, int]) -> list[str]:
    """Draw words of Python's documentation; lengths are uniform from the least to the most."""
    rng, words = random.Random(seed), " ".join(topics[name] for name in sorted(topics)).split()
    return [" ".join(rng.choices(words, k=rng.randint(*num_words))) for _ in range(num_prompts)]


def report(jobs: list[Job], speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print and return tokens a second of each job, and how they compare with the first one's."""
    plain, figures = statistics.median(speeds[jobs[0].name][1:]), []
    for job in jobs:
        timed = speeds[job.name][1:]
        median = statistics.median(timed)
        change = "" if job is jobs[0] else f", {median / plain - 1:+.1%}"
        requests = f"{job.num_prompts} prompts, {job.max_tokens} tokens out, {job.name}"
        runs = " / ".join(f"{speed:,.0f}" for speed in timed)
        print(f"{requests}: {median:,.0f} output tokens/s{change} ({runs})", flush=True)
        figures.append({"name": job.name, "num_prompts": job.num_prompts, "max_tokens": job.max_tokens, "runs": timed})
    return figures
