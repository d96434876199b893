"""Where a step's time goes: host and GPU on one clock, as a trace (for Perfetto), a few figures and a picture.

The host's halves of step 7 are spans named "launch 7" and "collect 7". What the GPU does is known by name and time, and
by a number of the call that asked for it, which lies in a launch: so each kernel is known to belong to its step, also
where a CUDA graph asked for hundreds at once.

The profiler itself takes time, on the host for each call and on the GPU for each kernel: steps are somewhat longer
here.
"""

import json
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanoinfer.engine.llm_engine import LLMEngine

HOST_SPAN = re.compile(r"(launch|collect) (\d+)")
HOST_CALLS = ("cuda_runtime", "cuda_driver")  # categories of trace events
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Microseconds. From one kernel of a graph to the next it takes less; in a longer gap the GPU waits for the host.
LONGEST_LAUNCH_LATENCY = 10.0
NUM_PREFILL_STEPS = 4  # to trace: the first ones,
NUM_MIDDLE_STEPS = 30  # and these from the middle of a run
NUM_SETTLING_STEPS = 2  # traced before those and not counted: the GPU ran dry while the profiler started
NUM_TOP_KERNELS = 12
NUM_DRAWN_STEPS = 5


class Window(NamedTuple):
    """Steps to trace, counted from 0, and the file to trace them to."""

    steps: range
    path: Path


def profile_steps(
    engine: LLMEngine, run: Callable[[], object], num_prefill: int, num_decode: int, folder: Path
) -> dict[str, Any]:
    """Call `run`, which has `engine` do so many steps; trace some to `folder`, draw them, print what is seen there."""
    folder.mkdir(parents=True, exist_ok=True)
    first, middle = choose_windows(num_prefill, num_decode, folder)
    with StepRecorder(engine, [first, middle]):
        run()
    figures = {"first": print_timeline("The first steps", read_trace(first.path))}
    print(f"  trace: {first.path}, for https://ui.perfetto.dev")
    if middle.steps:
        steps = read_trace(middle.path)[NUM_SETTLING_STEPS:]
        figures["middle"] = print_timeline("Steps from the middle", steps)
        print(f"  trace: {middle.path}")
        try:
            draw_steps(steps, folder / "steps.png")
            print(f"  picture: {folder / 'steps.png'}")
        except ImportError:
            print("  no picture, as matplotlib is not installed: pip install -e '.[profile]'")
    return figures


def choose_windows(num_prefill: int, num_decode: int, folder: Path) -> tuple[Window, Window]:
    """The first steps, and some from the middle (none, if there are too few) of a run of so many steps."""
    num_steps = num_prefill + num_decode
    first = range(min(num_prefill, NUM_PREFILL_STEPS))
    start = max(first.stop + 1, (num_steps - NUM_MIDDLE_STEPS) // 2 - NUM_SETTLING_STEPS)
    middle = range(start, min(start + NUM_SETTLING_STEPS + NUM_MIDDLE_STEPS, num_steps))
    if len(middle) <= NUM_SETTLING_STEPS:
        middle = range(0)
    return Window(first, folder / "prefill.json"), Window(middle, folder / "trace.json")


class StepRecorder:
    """While it is open, every step of `engine` is marked by two spans, and those in `windows` are traced.

    windows: apart by a step at least, as a window ends when its last step is collected, with the next under way. An
    empty one, or one that the engine never reaches, leaves no file.
    """

    def __init__(self, engine: LLMEngine, windows: list[Window]) -> None:
        self._engine = engine
        self._windows = windows
        self._launch, self._collect = engine._launch, engine._collect
        self._num_launched = self._num_collected = 0
        self._window: Window | None = None  # the one being traced
        self._profiler: profile | None = None
        self._activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            self._activities.append(ProfilerActivity.CUDA)

    def __enter__(self) -> "StepRecorder":
        # An instance's attribute comes before its class's method.
        vars(self._engine).update(_launch=self._marked_launch, _collect=self._marked_collect)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in ("_launch", "_collect"):
            del vars(self._engine)[name]
        self._end_window()

    def _marked_launch(self) -> bool:
        for window in self._windows:
            if self._window is None and window.steps and self._num_launched == window.steps.start:
                self._begin_window(window)
        with record_function(f"launch {self._num_launched}"):
            launched = self._launch()
        self._num_launched += launched
        return launched

    def _marked_collect(self) -> None:
        with record_function(f"collect {self._num_collected}"):
            self._collect()
        self._num_collected += 1
        if self._window and self._num_collected == self._window.steps.stop:
            self._end_window()

    def _begin_window(self, window: Window) -> None:
        self._window, self._profiler = window, profile(activities=self._activities)
        self._profiler.start()

    def _end_window(self) -> None:
        if self._window and self._profiler:
            self._profiler.stop()  # when all launched work is done
            self._profiler.export_chrome_trace(str(self._window.path))
            self._window = self._profiler = None


class Span(NamedTuple):
    """Something that took from `start` to `end`, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step: the host's two halves, and the GPU's work by its start."""

    index: int
    launch: Span
    collect: Span
    gpu: list[Span]


def read_trace(path: Path) -> list[StepTrace]:
    """The steps that were launched and collected in a trace."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    halves: dict[str, dict[int, Span]] = {"launch": {}, "collect": {}}
    for event in events:
        match = HOST_SPAN.fullmatch(event["name"])
        if match and event["cat"] == "user_annotation":
            halves[match[1]][int(match[2])] = _span(event)
    gpu = _share_out_gpu_work(events, halves["launch"])
    return [
        StepTrace(index, launch, halves["collect"][index], gpu[index])
        for index, launch in sorted(halves["launch"].items())
        if index in halves["collect"]
    ]


def _span(event: dict[str, Any]) -> Span:
    return Span(event["name"], event["ts"], event["ts"] + event["dur"])


def _correlation(event: dict[str, Any]) -> int | None:
    """The number that a call of the host and the GPU work that it asked for have in common."""
    return event.get("args", {}).get("correlation")


def _share_out_gpu_work(events: list[dict[str, Any]], launches: dict[int, Span]) -> dict[int, list[Span]]:
    """For each step launched, the GPU work that was asked for from then to the next launch.

    Work whose call is not in the trace goes with what ran before it: there is one stream, and steps run in order.
    """
    calls = {_correlation(event): event["ts"] for event in events if event.get("cat") in HOST_CALLS}
    calls.pop(None, None)
    indices = sorted(launches)
    starts = [launches[index].start for index in indices]
    gpu: dict[int, list[Span]] = {index: [] for index in indices}
    place = -1  # that of a step launched before the trace began
    for event in sorted((event for event in events if event.get("cat") in GPU_WORK), key=lambda event: event["ts"]):
        called = calls.get(_correlation(event))
        if called is not None:
            place = bisect_right(starts, called) - 1
        if place >= 0:
            gpu[indices[place]].append(_span(event))
    return gpu


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Microseconds of the GPU over `num_steps` steps, from their first kernel or copy to the end of their last."""

    num_steps: int
    total: float
    between_steps: float  # idle from the end of one step's work to the first of the next one's
    waiting: float  # idle inside steps, in gaps longer than LONGEST_LAUNCH_LATENCY
    latency: float  # idle inside steps, in gaps up to that


def measure_gaps(steps: list[StepTrace]) -> GpuTime | None:
    """How long the GPU idled, and where; None where it did nothing (or there is none)."""
    steps = [step for step in steps if step.gpu]
    if not steps:
        return None
    start = end = steps[0].gpu[0].start
    between = waiting = latency = 0.0
    for step in steps:
        for number, work in enumerate(step.gpu):
            gap = max(0.0, work.start - end)
            if number == 0:
                between += gap
            elif gap > LONGEST_LAUNCH_LATENCY:
                waiting += gap
            else:
                latency += gap
            end = max(end, work.end)
    return GpuTime(len(steps), end - start, between, waiting, latency)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All runs of a kernel (or copies of a kind): microseconds and runs for each step, share of all GPU work."""

    name: str
    microseconds: float
    num_runs: float
    share: float


def top_kernels(steps: list[StepTrace]) -> list[KernelTime]:
    """The kernels that took the most time, the longest first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for work in step.gpu:
            times[work.name].append(work.end - work.start)
    total = sum(map(sum, times.values()))
    kernels = [
        KernelTime(name, sum(runs) / len(steps), len(runs) / len(steps), sum(runs) / total)
        for name, runs in times.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)[:NUM_TOP_KERNELS]


def print_timeline(title: str, steps: list[StepTrace]) -> dict[str, Any]:
    """Print what is seen in a trace, and return the figures."""
    launches = [step.launch.end - step.launch.start for step in steps]
    collects = [step.collect.end - step.collect.start for step in steps]
    host = {"launch": statistics.median(launches), "collect": statistics.median(collects)}
    print(f"{title} ({len(steps)}): host {host['launch']:,.0f} us to launch, {host['collect']:,.0f} us to collect")
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
    return {
        "num_steps": len(steps),
        "host_microseconds": host,
        "gpu": gpu and asdict(gpu),
        "kernels": [*map(asdict, kernels)],
    }


def busy_intervals(work: list[Span]) -> list[tuple[float, float]]:
    """Start and end of the stretches in which the GPU is busy; gaps from kernel to kernel count as busy."""
    intervals: list[tuple[float, float]] = []
    for _, start, end in work:
        if intervals and start - intervals[-1][1] <= LONGEST_LAUNCH_LATENCY:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((start, end))
    return intervals


def draw_steps(steps: list[StepTrace], path: Path) -> None:
    """Draw a few steps in lanes for launch, collect and GPU. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    first = max(0, (len(steps) - NUM_DRAWN_STEPS) // 2)
    steps = steps[first : first + NUM_DRAWN_STEPS]
    lanes = ["launch", "collect", *(["GPU"] if any(step.gpu for step in steps) else [])]
    origin = steps[0].launch.start
    figure = Figure(figsize=(12, 1 + 0.7 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for step in steps:
        color = f"C{step.index % 10}"
        stretches = [busy_intervals(work) for work in ([step.launch], [step.collect], step.gpu)]
        for height, intervals in enumerate(stretches[: len(lanes)]):
            bars = [((start - origin) / 1e3, (end - start) / 1e3) for start, end in intervals]
            axes.broken_barh(bars, (height - 0.35, 0.7), color=color)
            if bars:
                axes.text(bars[0][0], height, f" {step.index}", va="center", clip_on=True)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; a color and a number for each step")
    figure.savefig(path, dpi=150)
