"""`nanoinfer bench trace`: a page of the whole run, and where a step's time goes, with host and GPU on one clock.

The page is that of `LLM(..., trace=...)`. For single steps, every call of `LLM.step` lies in a span named "step 7".
PyTorch's profiler records the name and time of what the GPU does, and the number of the host's call that launched it.
That call lies in a span, so each kernel can be assigned to its step, even if a CUDA graph launched hundreds at once.
The profiler itself takes time, on the host for each call and on the GPU for each kernel, so steps are longer here.
"""

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench.engines import engine_options, make_params
from nanoinfer.bench.report import describe_machine, find_device
from nanoinfer.bench.workloads import Workload, draw_workload, loads_of, model_of
from nanoinfer.control.run_trace import RunTrace
from nanoinfer.errors import ConfigError

HOST_SPAN = re.compile(r"step (\d+)")
HOST_CALLS = ("cuda_runtime", "cuda_driver")  # categories of trace events
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Microseconds. From one kernel of a graph to the next it takes less; in a longer gap the GPU waits for the host.
LONGEST_LAUNCH_LATENCY = 10.0
NUM_TRACED_STEPS = 30  # from the middle of a run
NUM_SETTLING_STEPS = 2  # traced before those and not counted: the GPU ran dry while the profiler started
NUM_TOP_KERNELS = 12
NUM_DRAWN_STEPS = 5
STEP_COLORS = ("#1f5a99", "#b3470e", "#2f7d32")  # white numbers are legible on them


class Span(NamedTuple):
    """Says what took from `start` to `end`, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


class StepTrace(NamedTuple):
    """Holds a call of `step`: the host's span, its waits for the GPU, and the GPU work that it asked for, in order.

    With overlap the host waits for the step before the one that it has just launched.
    """

    number: int
    host: Span
    waits: list[Span]
    gpu: list[Span]


class GpuTime(NamedTuple):
    """Counts the GPU's microseconds over `num_steps` steps, from their first kernel or copy to the last one's end."""

    num_steps: int
    total: float
    between_steps: float  # idle from the end of one step's work to the first of the next one's
    waiting: float  # idle inside steps, in gaps longer than LONGEST_LAUNCH_LATENCY
    latency: float  # idle inside steps, in gaps up to that


class KernelTime(NamedTuple):
    """Sums all runs of a kernel (or copies of a kind): microseconds and runs for each step, share of all GPU work."""

    name: str
    microseconds: float
    num_runs: float
    share: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trace the load that is asked for, and return the figures."""
    if args.data_parallel_size > 1:
        raise ConfigError("a trace shows the GPU of one engine; leave --data-parallel-size out")
    device = find_device()
    [*_, (_, load)] = loads_of(args, device)
    with model_of(args, device) as model:
        workload = draw_workload(args.seed, load, model.config.vocab_size)
        params = make_params(SamplingParams, workload, n=workload.num_samples, top_k=args.top_k, top_p=args.top_p)
        with LLM(model.folder, **model.options, **engine_options(model, load, args)) as llm:
            return {"trace": trace(llm, workload, params, args.folder), **describe_machine(device)}


def trace(llm: LLM, workload: Workload, params: list[SamplingParams], folder: Path) -> dict[str, Any]:
    """Run the workload, then again with its middle traced to `folder`; print and draw it, and return the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    page, path, picture = folder / "run.html", folder / "trace.json", folder / "steps.png"
    run = RunTrace(f"{llm!r}: {len(workload.prompts)} requests, seed {workload.seed}")
    end = llm.on_step(run)
    add_requests(llm, workload, params)
    num_steps = run_steps(llm, count())
    end()
    run.write(page)
    trace_steps(llm, workload, params, choose_window(num_steps), path)
    traced = read_trace(path)
    steps = traced[NUM_SETTLING_STEPS:] or traced
    figures = print_steps(steps)
    print(f"  the whole run: {page}")
    print(f"  trace of these steps, for https://ui.perfetto.dev: {path}")
    try:
        draw_steps(steps, picture)
        print(f"  picture: {picture}")
    except ImportError:
        print("  no picture, as matplotlib is not installed: pip install matplotlib")
    return figures


def add_requests(llm: LLM, workload: Workload, params: list[SamplingParams]) -> list[int]:
    """Queue the workload without cached prefixes; return the ids of its requests."""
    llm.reset_prefix_cache()
    return [llm.add_request(prompt, its) for prompt, its in zip(workload.prompts, params, strict=True)]


def run_steps(llm: LLM, numbers: Iterable[int]) -> int:
    """Run a step for each of these numbers while there is work, each in its own span; return how many were run."""
    num_steps = 0
    for number in numbers:
        if llm.is_finished():
            break
        with record_function(f"step {number}"):
            llm.step()
        num_steps += 1
    return num_steps


def choose_window(num_steps: int) -> range:
    """Return the steps to trace of a run that has so many: those in its middle, or all of a short one."""
    start = max(0, (num_steps - NUM_TRACED_STEPS) // 2 - NUM_SETTLING_STEPS)
    return range(start, min(start + NUM_SETTLING_STEPS + NUM_TRACED_STEPS, num_steps))


def trace_steps(llm: LLM, workload: Workload, params: list[SamplingParams], window: range, path: Path) -> None:
    """Run the workload up to the end of `window`, and write a Chrome trace of the steps in it."""
    with_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    request_ids = add_requests(llm, workload, params)
    run_steps(llm, range(window.start))
    with profile(activities=[ProfilerActivity.CPU, *with_gpu]) as profiler:
        run_steps(llm, window)
    profiler.export_chrome_trace(str(path))
    llm.abort(request_ids)
    run_steps(llm, count())


def read_trace(path: Path) -> list[StepTrace]:
    """Return the steps of a trace, each with the GPU work that was asked for from its start to the next one's.

    Work whose call is not in the trace goes with what ran before it: there is one stream, and steps run in order.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    steps: list[StepTrace] = []
    step_of_call: dict[int, int] = {}  # index of the step, by the number that call and GPU work have in common
    work: list[tuple[int, Span]] = []  # that number, and what the GPU did
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        span = Span(event["name"], event["ts"], event["ts"] + event["dur"])
        category, number = event.get("cat"), event.get("args", {}).get("correlation")
        if category == "user_annotation" and (match := HOST_SPAN.fullmatch(span.name)):
            steps.append(StepTrace(int(match[1]), span, waits=[], gpu=[]))
        elif category in HOST_CALLS and "Synchronize" in span.name:
            if steps and span.end <= steps[-1].host.end:
                steps[-1].waits.append(span)
        elif category in HOST_CALLS:
            step_of_call[number] = len(steps) - 1
        elif category in GPU_WORK:
            work.append((number, span))
    index = -1  # of a step that was launched before the trace began
    for number, span in work:
        index = step_of_call.get(number, index)
        if index >= 0:
            steps[index].gpu.append(span)
    return steps


def measure_gaps(steps: list[StepTrace]) -> GpuTime | None:
    """Measure how long the GPU idled, and where; None where it did nothing (or there is none)."""
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
    """Return the kernels that took the most time, the longest first.

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


def print_steps(steps: list[StepTrace]) -> dict[str, Any]:
    """Print what is seen in a trace, and return the figures."""
    waiting = [sum(wait.end - wait.start for wait in step.waits) for step in steps]
    wait = statistics.median(waiting)
    work = statistics.median(step.host.end - step.host.start - its for step, its in zip(steps, waiting, strict=True))
    print(
        f"Steps {steps[0].number} to {steps[-1].number}: the host works for {work:,.0f} us of a step "
        f"and waits for {wait:,.0f} us"
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
    figures = {"num_steps": len(steps), "host_microseconds": {"work": work, "wait": wait}}
    return figures | {"gpu": gpu and gpu._asdict(), "kernels": [kernel._asdict() for kernel in kernels]}


def busy_intervals(work: list[Span]) -> list[tuple[float, float]]:
    """Return start and end of the stretches in which the GPU is busy; gaps from kernel to kernel count as busy."""
    intervals: list[tuple[float, float]] = []
    for _, start, end in work:
        if intervals and start - intervals[-1][1] <= LONGEST_LAUNCH_LATENCY:
            start, last_end = intervals.pop()
            end = max(end, last_end)
        intervals.append((start, end))
    return intervals


def draw_steps(steps: list[StepTrace], path: Path) -> None:
    """Draw a few steps in lanes for host and GPU. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    steps = steps[:NUM_DRAWN_STEPS]
    origin = steps[0].host.start
    total = max(span.end for step in steps for span in (step.host, *step.gpu)) - origin
    lanes = ["host\n(pale: waits)", *(["GPU"] if any(step.gpu for step in steps) else [])]
    figure = Figure(figsize=(12, 1 + 0.8 * len(lanes)), layout="constrained", facecolor="white")
    axes = figure.subplots()

    def draw(work: list[Span], lane: int, text: str, text_color: str, **style: Any) -> None:
        bars = [((start - origin) / 1e3, (end - start) / 1e3) for start, end in busy_intervals(work)]
        axes.broken_barh(bars, (lane - 0.35, 0.7), **style)
        start, width = max(bars, key=lambda bar: bar[1], default=(0.0, 0.0))
        if width > 0.03 * total / 1e3:  # a number would not fit into less
            axes.text(start + width / 2, lane, text, ha="center", va="center", color=text_color, weight="bold")

    for step in steps:
        number, color = str(step.number), STEP_COLORS[step.number % len(STEP_COLORS)]
        draw([step.host], 0, "" if step.waits else number, "white", facecolors=color)
        draw(step.waits, 0, number, "black", facecolors="white", alpha=0.6)
        draw(step.gpu, 1, number, "white", facecolors=color)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; a color and a number for each step")
    figure.savefig(path, dpi=150)
