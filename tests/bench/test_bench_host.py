"""bench.py --host-only times the steps that it says, in the engine's order, and needs no PyTorch."""

import subprocess
import sys
from pathlib import Path

import pytest

import bench


def test_nobody_finishes_and_nobody_is_admitted_while_the_clock_runs():
    case = bench.measure_host_case(num_running=3, num_waiting=5, num_steps=10)
    assert (case["num_running"], case["num_waiting"], case["num_steps"]) == (3, 5, 10)
    assert [*case["median"]] == [*case["percentile_90"]] == ["schedule", "pack", "update", "total"]
    assert all(0 < case["median"][part] <= case["median"]["total"] for part in case["median"])


def test_a_step_is_scheduled_before_the_one_before_it_is_updated(monkeypatch: pytest.MonkeyPatch):
    scheduler = bench.fill_scheduler(num_running=2, num_waiting=0, num_steps=2)
    schedule, calls = scheduler.schedule, []

    def watched_schedule(in_flight: bool):
        calls.append((in_flight, [seq.num_pending_tokens for seq in scheduler.running]))
        return schedule(in_flight)

    monkeypatch.setattr(scheduler, "schedule", watched_schedule)
    assert len(bench.time_host_steps(scheduler, num_steps=2)) == 2
    # the prompts, a decode step that is not timed, as it updates the prompts' step, and the two
    assert calls == [(False, []), *[(True, [1, 1])] * 3]


def test_the_report_has_a_line_for_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(bench, "HOST_CASES", ((2, 0), (2, 1000)))
    monkeypatch.setattr(bench, "NUM_HOST_STEPS", 4)
    bench.main(["--host-only"])
    printed = capsys.readouterr().out
    assert "2 running, 0 waiting" in printed
    assert "2 running, 1,000 waiting" in printed


def test_the_host_is_timed_without_pytorch():
    source = (
        "import sys, bench; bench.HOST_CASES = ((2, 0),); bench.main(['--host-only']); "
        "assert 'torch' not in sys.modules"
    )
    folder = Path(bench.__file__).parent
    subprocess.run([sys.executable, "-c", source], cwd=folder, check=True, capture_output=True, timeout=60)
