"""Steps and their GPU work are read off a trace, gaps are told apart, and a run without a GPU is traced too."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.bench.trace import (
    LONGEST_LAUNCH_LATENCY,
    Span,
    StepTrace,
    busy_intervals,
    choose_window,
    draw_steps,
    measure_gaps,
    print_steps,
    read_trace,
    top_kernels,
    trace_steps,
)
from nanoinfer.bench.workloads import Workload


def event(category: str, name: str, start: float, duration: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


# A step runs when the trace begins. Step 7 asks for a copy and a graph of two kernels and waits for that step; step 8
# asks for a kernel of Triton's and waits for step 7.
TWO_STEPS = (
    {"ph": "M", "name": "process_name"},
    event("user_annotation", "step of something else", 0, 1),
    event("kernel", "six", 95, 20, correlation=1),
    event("user_annotation", "step 7", 100, 16),
    event("cuda_runtime", "cudaMemcpyAsync", 101, 1, correlation=2),
    event("cuda_runtime", "cudaGraphLaunch", 105, 2, correlation=3),
    event("cuda_runtime", "cudaEventSynchronize", 111, 4, correlation=7),
    event("gpu_memcpy", "copy", 120, 5, correlation=2),
    event("gpu_user_annotation", "step 7", 120, 50),
    event("kernel", "multiply", 126, 20, correlation=3),
    event("kernel", "add", 147, 3, correlation=3),
    event("user_annotation", "step 8", 118, 36),
    event("cuda_driver", "cuLaunchKernelEx", 119, 1, correlation=4),
    event("cuda_runtime", "cudaEventSynchronize", 127, 24, correlation=8),
    event("kernel", "multiply", 154, 16, correlation=4),
    event("kernel", "unknown", 190, 10, correlation=5),
)


@pytest.fixture
def steps(tmp_path: Path) -> list[StepTrace]:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": TWO_STEPS}))
    return read_trace(tmp_path / "trace.json")


def test_gpu_work_and_waits_belong_to_the_step_that_asked_for_them(steps: list[StepTrace]) -> None:
    seven, eight = steps
    assert (seven.number, seven.host) == (7, Span("step 7", 100, 116))
    assert seven.waits == [Span("cudaEventSynchronize", 111, 115)]
    assert [work.name for work in seven.gpu] == ["copy", "multiply", "add"]
    assert (eight.number, len(eight.waits)) == (8, 1)
    # a call that is not in the trace: its work goes with what ran before it
    assert eight.gpu == [Span("multiply", 154, 170), Span("unknown", 190, 200)]


def test_idling_between_steps_is_told_from_gaps_inside_them(steps: list[StepTrace]) -> None:
    gpu = measure_gaps(steps)
    assert gpu is not None
    assert (gpu.num_steps, gpu.total) == (2, 200 - 120)
    assert gpu.between_steps == 154 - 150
    assert gpu.latency == (126 - 125) + (147 - 146)
    assert gpu.waiting == 190 - 170 > LONGEST_LAUNCH_LATENCY


def test_work_that_overlaps_leaves_no_gap_and_short_gaps_are_drawn_as_busy() -> None:
    gpu_work = [Span("long", 2, 30), Span("short", 3, 5), Span("next", 31, 40)]
    gpu = measure_gaps([StepTrace(0, Span("step 0", 0, 1), [], gpu_work)])
    assert gpu is not None
    assert (gpu.total, gpu.between_steps, gpu.waiting, gpu.latency) == (38, 0, 0, 1)
    assert measure_gaps([StepTrace(0, Span("step 0", 0, 1), [], [])]) is None
    assert busy_intervals([*gpu_work, Span("late", 60, 70)]) == [(2, 40), (60, 70)]


def test_kernels_are_summed_by_name(steps: list[StepTrace]) -> None:
    kernels = top_kernels(steps)
    assert [kernel.name for kernel in kernels] == ["multiply", "unknown", "copy", "add"]
    assert (kernels[0].microseconds, kernels[0].num_runs) == ((20 + 16) / 2, 1)
    assert sum(kernel.share for kernel in kernels) == pytest.approx(1)


def test_the_report_tells_work_from_waiting(steps: list[StepTrace], capsys: pytest.CaptureFixture[str]) -> None:
    figures = print_steps(steps)
    printed = capsys.readouterr().out
    assert "Steps 7 to 8: the host works for 12 us of a step and waits for 14 us" in printed
    assert "GPU: 40 us a step, of which it idles 5.00% between steps" in printed
    assert "multiply" in printed
    assert json.loads(json.dumps(figures))["gpu"]["between_steps"] == 4


def test_a_picture_has_a_lane_for_the_gpu_where_there_is_one(steps: list[StepTrace], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_steps(steps, tmp_path / "gpu.png")
    draw_steps([step._replace(waits=[], gpu=[]) for step in steps], tmp_path / "host.png")
    height = {name: int.from_bytes((tmp_path / name).read_bytes()[20:24], "big") for name in ("gpu.png", "host.png")}
    assert height["gpu.png"] > height["host.png"] > 0


@pytest.mark.parametrize(
    ("num_steps", "window"), [(1032, range(499, 531)), (41, range(3, 35)), (7, range(7)), (1, range(1))]
)
def test_steps_to_trace_are_the_middle_of_a_run_or_all_of_a_short_one(num_steps: int, window: range) -> None:
    assert choose_window(num_steps) == window


def test_only_the_steps_of_the_window_are_traced_and_nothing_is_left_to_run(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(tiny_model_path(), device="cpu") as llm:
        trace_steps(llm, Workload(0, [[1, 2, 3]], [6]), [params], range(1, 3), tmp_path / "trace.json")
        assert llm.is_finished()
    assert [step.number for step in read_trace(tmp_path / "trace.json")] == [1, 2]
