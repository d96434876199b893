"""bench.py --profile: steps and their GPU work are read off a trace, gaps are told apart, and no GPU is needed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
from bench import (
    LONGEST_LAUNCH_LATENCY,
    NUM_SETTLING_STEPS,
    Span,
    StepTrace,
    busy_intervals,
    choose_window,
    draw_steps,
    measure_gaps,
    print_timeline,
    read_trace,
    top_kernels,
    trace_steps,
)
from nanoinfer import LLM, SamplingParams, tiny_model_path


def event(category: str, name: str, start: float, duration: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


def write_trace(path: Path, *events: dict[str, Any]) -> Path:
    others = [{"ph": "M", "name": "process_name"}, event("user_annotation", "launch of something else", 0, 1)]
    path.write_text(json.dumps({"traceEvents": [*others, *events]}))
    return path


# Step 6 runs when the trace begins. Step 7 asks for a copy and a graph of two kernels, step 8 for a kernel of Triton's.
# Step 9 is not collected before the trace ends.
TWO_STEPS = (
    event("kernel", "six", 95, 20, correlation=1),
    event("user_annotation", "launch 7", 100, 10),
    event("cuda_runtime", "cudaMemcpyAsync", 101, 1, correlation=2),
    event("cuda_runtime", "cudaGraphLaunch", 105, 2, correlation=3),
    event("user_annotation", "collect 6", 111, 4),
    event("gpu_memcpy", "copy", 120, 5, correlation=2),
    event("gpu_user_annotation", "launch 7", 120, 50),
    event("kernel", "multiply", 126, 20, correlation=3),
    event("kernel", "add", 147, 3, correlation=3),
    event("user_annotation", "launch 8", 116, 10),
    event("cuda_driver", "cuLaunchKernelEx", 118, 1, correlation=4),
    event("user_annotation", "collect 7", 127, 24),
    event("kernel", "multiply", 154, 16, correlation=4),
    event("kernel", "unknown", 190, 10, correlation=5),
    event("user_annotation", "launch 9", 152, 10),
    event("cuda_driver", "cuLaunchKernelEx", 153, 1, correlation=6),
    event("user_annotation", "collect 8", 163, 40),
    event("kernel", "nine", 201, 9, correlation=6),
)


def test_gpu_work_belongs_to_the_step_whose_launch_asked_for_it(tmp_path: Path):
    seven, eight = read_trace(write_trace(tmp_path / "trace.json", *TWO_STEPS))
    assert (seven.number, seven.launch, seven.collect) == (7, Span("launch 7", 100, 110), Span("collect 7", 127, 151))
    assert [work.name for work in seven.gpu] == ["copy", "multiply", "add"]
    assert eight.number == 8
    # a call that is not in the trace: its work goes with what ran before it
    assert eight.gpu == [Span("multiply", 154, 170), Span("unknown", 190, 200)]


def test_idling_between_steps_is_told_from_gaps_inside_them(tmp_path: Path):
    gpu = measure_gaps(read_trace(write_trace(tmp_path / "trace.json", *TWO_STEPS)))
    assert gpu is not None
    assert (gpu.num_steps, gpu.total) == (2, 200 - 120)
    assert gpu.between_steps == 154 - 150
    assert gpu.latency == (126 - 125) + (147 - 146)
    assert gpu.waiting == 190 - 170 > LONGEST_LAUNCH_LATENCY


def test_work_that_overlaps_leaves_no_gap():
    launch, collect = Span("launch 0", 0, 1), Span("collect 0", 2, 50)
    step = StepTrace(0, launch, collect, [Span("long", 2, 30), Span("short", 3, 5), Span("next", 31, 40)])
    gpu = measure_gaps([step])
    assert gpu is not None
    assert (gpu.total, gpu.between_steps, gpu.waiting, gpu.latency) == (38, 0, 0, 1)
    assert measure_gaps([StepTrace(0, launch, collect, [])]) is None


def test_kernels_are_summed_by_name(tmp_path: Path):
    kernels = top_kernels(read_trace(write_trace(tmp_path / "trace.json", *TWO_STEPS)))
    assert [kernel.name for kernel in kernels] == ["multiply", "unknown", "copy", "add"]
    assert (kernels[0].microseconds, kernels[0].num_runs) == ((20 + 16) / 2, 1)
    assert sum(kernel.share for kernel in kernels) == pytest.approx(1)


def test_short_gaps_are_drawn_as_busy():
    work = [Span("a", 0, 10), Span("b", 2, 4), Span("c", 12, 20), Span("d", 40, 50)]
    assert busy_intervals(work) == [(0, 20), (40, 50)]


def test_the_report_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps = read_trace(write_trace(tmp_path / "trace.json", *TWO_STEPS))
    figures = print_timeline(steps)
    printed = capsys.readouterr().out
    assert "Steps 7 to 8: host 10 us to launch, 32 us to collect" in printed
    assert "GPU: 40 us a step, of which it idles 5.00% between steps" in printed
    assert "multiply" in printed
    assert json.loads(json.dumps(figures))["gpu"]["between_steps"] == 4


def test_a_picture_has_a_lane_for_the_gpu_where_there_is_one(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw_steps(read_trace(write_trace(tmp_path / "trace.json", *TWO_STEPS)), tmp_path / "gpu.png")
    host_only = [one for one in TWO_STEPS if one["cat"] == "user_annotation"]
    draw_steps(read_trace(write_trace(tmp_path / "trace.json", *host_only)), tmp_path / "host.png")
    height = {name: int.from_bytes((tmp_path / name).read_bytes()[20:24], "big") for name in ("gpu.png", "host.png")}
    assert height["gpu.png"] > height["host.png"] > 0


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "window"),
    [
        (9, 1023, range(499, 531)),
        (1, 40, range(3, 35)),
        (1, 6, range(7)),
        (1, 0, range(1)),
    ],
)
def test_steps_to_trace_are_the_middle_of_a_run_or_all_of_a_short_one(num_prefill: int, num_decode: int, window: range):
    assert choose_window({"num_prefill_steps": num_prefill, "num_decode_steps": num_decode}) == window


@pytest.fixture
def llm():
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_only_the_steps_of_the_window_are_traced_and_the_engine_is_left_as_it_was(llm: LLM, tmp_path: Path):
    plain = llm.generate([1, 2, 3], PARAMS, use_tqdm=False)
    with trace_steps(llm.engine, range(1, 3), tmp_path / "trace.json"):
        assert llm.generate([1, 2, 3], PARAMS, use_tqdm=False)[0].token_ids == plain[0].token_ids
    assert not {"_launch", "_collect"} & vars(llm.engine).keys()
    first, second = read_trace(tmp_path / "trace.json")
    assert (first.number, second.number) == (1, 2)
    assert first.collect.start > second.launch.end, "a step is collected when the next is under way"


def test_an_error_ends_the_trace_and_a_window_that_is_never_reached_leaves_no_file(llm: LLM, tmp_path: Path):
    def run_and_fail():
        llm.generate([1, 2, 3], PARAMS, use_tqdm=False)
        raise ValueError("in between")

    for window in (range(4, 99), range(98, 99)):
        with (
            pytest.raises(ValueError, match="in between"),
            trace_steps(llm.engine, window, tmp_path / f"{window}.json"),
        ):
            run_and_fail()
        assert not {"_launch", "_collect"} & vars(llm.engine).keys()
    assert [step.number for step in read_trace(tmp_path / "range(4, 99).json")] == [4, 5]
    assert not (tmp_path / "range(98, 99).json").exists()


@pytest.mark.parametrize(("output_len", "num_steps"), [(6, 6 - NUM_SETTLING_STEPS), (1, 1)])
def test_without_gpu_and_matplotlib_the_trace_is_written_and_both_are_named(
    output_len: int,
    num_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder, figures = tmp_path / "new" / "folder", tmp_path / "figures.json"
    options = ["--num-seqs", "2", "--input-len", "4", "--output-len", str(output_len), "--json", str(figures)]
    bench.main([*options, "--profile", str(folder)])
    printed = capsys.readouterr().out
    assert "no GPU was at work, so only the host's part is shown" in printed
    assert "matplotlib is not installed: pip install -e '.[profile]'" in printed
    assert [path.name for path in folder.iterdir()] == ["trace.json"]
    profile = json.loads(figures.read_text())["profile"]
    assert profile["num_steps"] == num_steps
    assert profile["gpu"] is None
