"""Step events say what the engine did, and the page of a run shows it; a browser opens it where there is one."""

import base64
import json
import re
import shutil
import subprocess
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from nanoinfer import LLM, ConfigError, RequestError, SamplingParams, StepEvent
from nanoinfer.control import run_trace
from nanoinfer.control.run_trace import RunTrace
from nanoinfer.metrics import RequestChange

Checkpoint = Callable[..., Path]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
OPTIONS = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 14, "max_model_len": 200}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def eventful_run(llm: LLM) -> tuple[list[StepEvent], dict[str, int]]:
    """Some requests wait, share prefixes, are cut, preempted, paused, resumed and aborted; return events and ids."""
    events: list[StepEvent] = []
    end = llm.on_step(events.append)
    llm.engine.scheduler.reserved_tokens = 0  # so that blocks run short
    prompts = [[1] * 40 + [i] * 10 for i in range(6)]
    ids = [llm.add_request(prompt, replace(PARAMS, max_tokens=30 + i)) for i, prompt in enumerate(prompts)]
    names = {"paused": ids[0], "aborted": ids[5], "several": -1}
    names["several"] = llm.add_request([7] * 5, replace(PARAMS, temperature=1, n=2))
    number = 0
    while not llm.is_finished():
        llm.step()
        number += 1
        if number == 8:
            llm.pause(ids[0])
            llm.abort(ids[5])
        if number == 12:
            llm.resume(ids[0])
    end()
    llm.generate([[1, 2]], PARAMS, use_tqdm=False)  # nobody listens
    llm.add_request([1, 2], PARAMS)
    llm.step()
    late: list[StepEvent] = []
    llm.on_step(late.append)
    while not llm.is_finished():
        llm.step()
    assert [event.index for event in late] == [*range(19)]
    return events, names


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def recorded(random_checkpoint: Checkpoint, request: pytest.FixtureRequest) -> tuple[list[StepEvent], Any, Any, Any]:
    with LLM(random_checkpoint(), max_num_seqs=5, max_num_batched_tokens=32, overlap=request.param, **OPTIONS) as llm:
        events, names = eventful_run(llm)
        return events, names, llm.get_metrics(), llm


def test_the_events_of_a_run_add_up(recorded: tuple) -> None:
    events, _, metrics, _ = recorded
    assert [event.index for event in events] == [*range(len(events))]
    assert sum(event.num_prefill_tokens for event in events) == metrics.prefill_tokens - 4
    assert not any(event.num_prefill_tokens and event.num_decode_tokens for event in events)
    assert max(event.num_waiting for event in events) > 0
    assert {event.num_paused for event in events} == {0, 1}
    assert all(event.num_used_blocks + event.num_free_blocks == 14 for event in events)
    assert max(event.num_cached_blocks for event in events) > 4
    assert max(event.num_preempted for event in events) > 0
    for event in events:
        assert event.started < event.launched <= event.arrived < event.ended
        assert 0 < event.host_seconds <= event.ended - event.started
        assert event.gpu_seconds is None
    assert all(one.started < other.started and one.arrived < other.arrived for one, other in pairwise(events))


def test_the_changes_of_a_request_tell_its_life(recorded: tuple) -> None:
    events, names, metrics, _ = recorded
    changes = [change for event in events for change in event.changes]

    def life(request_id: int, sample: int = 0) -> list[RequestChange]:
        return [change for change in changes if (change.request_id, change.sample) == (request_id, sample)]

    paused = life(names["paused"])
    whats = [change.what for change in paused]
    assert whats[:4] == ["arrived", "admitted", "chunk", "chunk"], "50 tokens, 32 a step"
    assert [change.num_tokens for change in paused[:4]] == [50, 0, 32, 18]
    assert whats.index("paused") < whats.index("resumed") < whats.index("finished") == len(whats) - 1
    assert (paused[-1].num_tokens, paused[-1].finish_reason) == (30, "length")
    assert all(one.time <= other.time for one, other in pairwise(paused))
    second = life(names["paused"] + 1)
    assert second[1][2:5:2] == ("admitted", 32), "two blocks came from the prefix cache"
    assert life(names["aborted"])[-1].finish_reason == "abort"
    assert [change.what for change in life(names["several"], 1)][-1] == "finished"
    counts = Counter(change.what for change in changes)
    assert counts["arrived"] == counts["finished"] == 8
    assert counts["paused"] == counts["resumed"] == 1
    assert 0 < counts["preempted"] <= metrics.num_preemptions
    assert counts["admitted"] >= 7 + counts["preempted"] - 1, "the aborted one may have waited"


def test_a_callback_may_ask_for_requests_and_control_them(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        asked: list[int] = []

        def ask(event: StepEvent) -> None:
            if event.index == 2:
                asked.append(llm.add_request([4, 5], PARAMS))
                llm.abort(asked)

        llm.on_step(ask)
        [output] = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        assert len(output.token_ids) == 20
        assert [output.finish_reason for output in llm.step()] == ["abort"]


def test_an_error_in_a_callback_ends_the_call_and_leaves_nothing_behind(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        end = llm.on_step(lambda event: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        end(), end()
        assert llm.is_finished()
        events: list[StepEvent] = []
        end = llm.on_step(events.append)
        finish = {"use_tqdm": False, "on_finish": lambda output: 1 / 0}
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1], [2], [3]], [replace(PARAMS, max_tokens=2), PARAMS, PARAMS], **finish)  # type: ignore[arg-type]
        llm.generate([[4]], PARAMS, use_tqdm=False)
        end()
        ends = [change.finish_reason for event in events for change in event.changes if change.what == "finished"]
        assert ends == ["length", "abort", "abort", "length"], "those that were dropped have ended too"
        assert len(llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids) == 20
        with pytest.raises(RequestError, match="callback=7 cannot be called; give a function of a StepEvent"):
            llm.on_step(7)  # type: ignore[arg-type]


def test_a_step_that_fails_has_no_event_and_the_next_ones_have_theirs(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        events: list[StepEvent] = []
        llm.on_step(events.append)
        llm.add_request([1, 2, 3], PARAMS)
        llm.step()
        wait = llm.engine.runner.wait  # type: ignore[union-attr]
        monkeypatch.setattr(llm.engine.runner, "wait", lambda handle: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
        monkeypatch.setattr(llm.engine.runner, "wait", wait)
        num_failed = 2 - len(events)
        while not llm.is_finished():
            llm.step()
        assert num_failed > 0
        assert sum(event.num_decode_tokens for event in events) == 19
        assert [change.what for change in events[-1].changes] == ["finished"]


# --- The page ---


def read_page(path: Path) -> dict[str, Any]:
    """What the page shows, with its columns as lists."""
    [text] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', path.read_text(encoding="utf-8"))
    page = json.loads(text)
    kinds = {"Int8": "b", "Int32": "i", "Float32": "f", "Float64": "d"}
    for part in ("steps", "changes"):
        for name, column in page[part].items():
            page[part][name] = array(kinds[column["type"]], base64.b64decode(column["base64"])).tolist()
    return page


def test_the_page_holds_every_step_and_every_change(recorded: tuple, tmp_path: Path) -> None:
    events, *_ = recorded
    trace = RunTrace("a <title> & more")
    for event in events:
        trace(event)
    trace.write(tmp_path / "run.html")
    page = read_page(tmp_path / "run.html")
    assert page["title"] == "a <title> & more"
    assert page["steps"]["num_decode_tokens"] == [event.num_decode_tokens for event in events]
    assert page["steps"]["gpu_seconds"] == [-1] * len(events)
    assert page["steps"]["started"] == sorted(page["steps"]["started"])
    assert len(page["changes"]["row"]) == sum(len(event.changes) for event in events)
    assert page["requests"]["request_id"] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert page["requests"]["sample"] == [0] * 7 + [1]
    text = (tmp_path / "run.html").read_text()
    assert not re.findall(r"(?:src|href)=|https?:|url\(|@import|fetch\(", text), "it needs nothing else"


def test_the_trace_is_written_when_the_llm_is_closed_or_forgotten(
    random_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with LLM(random_checkpoint(), trace=tmp_path / "closed.html", **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    assert len(read_page(tmp_path / "closed.html")["steps"]["started"]) == 20
    (tmp_path / "closed.html").unlink()
    llm.close()
    assert not (tmp_path / "closed.html").exists(), "closing twice writes it once"
    llm = LLM(random_checkpoint(), trace=str(tmp_path / "forgotten.html"), **OPTIONS)
    llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    llm.on_step(print)
    del llm
    assert read_page(tmp_path / "forgotten.html")["reasons"] == ["length"]


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no folder" / "run.html"):
        with pytest.raises(ConfigError, match="cannot be written; give a file in a folder that exists"):
            LLM("no model", trace=path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a\0b", "embedded null"), ("a" * 300, "too long"), ("\ud800", "surrogates not allowed")],
    ids=ascii,
)
def test_a_name_that_no_file_can_have_is_refused_before_the_model_is_loaded(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM("no model", trace=name)
    message = (
        f"trace={name!r} cannot be written; give a file in a folder that exists, with a name that the system takes ("
    )
    assert str(error.value).startswith(message)
    assert reason in str(error.value)


def test_a_disk_that_is_full_costs_the_trace_and_not_the_run(
    random_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    with LLM(random_checkpoint(), trace=tmp_path / "folder" / "run.html", **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        (tmp_path / "folder").rmdir()
    assert "the trace was not written to" in caplog.text


def test_a_run_that_is_too_long_is_recorded_up_to_a_limit(
    recorded: tuple, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_trace, "MAX_STEPS", 5)
    trace = RunTrace("long")
    for event in recorded[0]:
        trace(event)
    trace.write(tmp_path / "run.html")
    page = read_page(tmp_path / "run.html")
    assert (len(page["steps"]["started"]), page["num_left_out"]) == (5, len(recorded[0]) - 5)


def large_trace(num_requests: int, num_steps: int) -> RunTrace:
    """A run in which each request runs for 100 steps of 5 ms."""
    trace = RunTrace("large")
    changes = [RequestChange(i, 0, "arrived", 0.0, 300) for i in range(num_requests)]
    for index in range(num_steps):
        now = 0.005 * index
        started = range(index * num_requests // num_steps, (index + 1) * num_requests // num_steps)
        for i in started:
            changes += [RequestChange(i, 0, "admitted", now, 0), RequestChange(i, 0, "chunk", now, 300)]
            changes += [RequestChange(i, 0, "finished", now + 0.5, 100, "length")]
        counts = (300 * len(started), 100, 100, num_requests - started.stop, 0, 0, 500, 400, 700)
        times = (now, now + 0.001, now + 0.008, now + 0.009)
        trace(StepEvent(index, *times, 0.0049, *counts, tuple(changes)))
        changes = []
    return trace


# Moves as a user would; what it finds is read from the attributes of <html>.
ACT = """<script>
const box = canvas.getBoundingClientRect();
function act(kind, x, y, more) {
  const Kind = kind === "wheel" ? WheelEvent : kind === "keydown" ? KeyboardEvent : PointerEvent;
  const place = { clientX: box.left + x, clientY: box.top + y };
  canvas.dispatchEvent(new Kind(kind, { ...place, bubbles: true, cancelable: true, ...more }));
}
const started = performance.now();
const written = [], fillText = context.fillText.bind(context);
context.fillText = (text, x, y) => { written.push({ x, y }); fillText(text, x, y); };
draw();
page.topLabels = panels.filter(panel => written.some(
  ({ x, y }) => x === LEFT - 5 && y >= panel.y && y < panel.y + panel.height / 4)).length;
page.drawMs = performance.now() - started;
act("pointermove", LEFT + 40, rowsTop + 2);
page.tip = tip.textContent;
for (let i = 0; i < 10; i++) act("wheel", LEFT + 40, 100, { deltaY: -1 });
page.zoomed = (view.end - view.begin) / endOfRun;
act("wheel", LEFT + 40, rowsTop + 20, { deltaY: 1, shiftKey: true });
act("wheel", LEFT + 40, rowsTop + 20, { deltaY: -1, altKey: true });
for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "+", "-"]) act("keydown", 0, 0, { key });
draw();
act("pointermove", LEFT + 40, rowsTop + 2);
const find = document.getElementById("find");
find.value = rows.length ? nameOf(rows[rows.length - 1]) : "7";
find.dispatchEvent(new Event("change"));
page.tipAfterJump = tip.style.display;
act("keydown", 0, 0, { key: "0" });
page.all = view.begin === 0 && view.end === endOfRun;
act("pointerleave", 0, 0);
page.tipAfter = tip.style.display;
draw();
page.dark = matchMedia("(prefers-color-scheme: dark)").matches;
page.background = colors.back;
</script>"""


def open_in_browser(path: Path, dark: bool = False) -> dict[str, str]:
    """Open a page, act on it, and return the attributes of <html>."""
    assert BROWSER is not None
    acting = path.with_suffix(".acting.html")
    acting.write_text(path.read_text(encoding="utf-8").replace("</html>", f"{ACT}</html>"), encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=10000",
        "--window-size=1200,900",
    ]
    options += [f"--user-data-dir={path.parent / 'browser'}", "--blink-settings=preferredColorScheme=" + "10"[dark]]
    command = [BROWSER, *options, "--dump-dom", acting.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    [tag] = re.findall(r"<html [^>]*>", shown)
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', tag))


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_run(recorded: tuple, tmp_path: Path, dark: bool) -> None:
    trace = RunTrace("a run")
    for event in recorded[0]:
        trace(event)
    trace.write(tmp_path / "run.html")
    shown = open_in_browser(tmp_path / "run.html", dark)
    assert "error" not in shown
    assert (shown["steps"], shown["rows"]) == (str(len(recorded[0])), "8")
    assert int(shown["drawn"]) >= 16, "a request waits, is computed, decodes"
    assert "request 0: length\nprompt of 50 tokens, 0 found in the prefix cache\n30 tokens generated" in shown["tip"]
    assert re.search(r"\nstep \d+ at .*: (prefill|decode) of \d+ tokens\nrunning ", shown["tip"])
    assert float(shown["zoomed"]) < 0.2
    assert shown["top-labels"] == "6", "the largest value of a panel is written at its top"
    assert (shown["all"], shown["tip-after"]) == ("true", "none")
    assert shown["tip-after-jump"] == "none", "what lay under the pointer is somewhere else now"
    assert (shown["dark"], shown["background"]) == (("true", "#15181c") if dark else ("false", "#ffffff"))


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_ten_thousand_requests_and_fifty_thousand_steps_at_once(tmp_path: Path) -> None:
    large_trace(10_000, 50_000).write(tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 8e6
    shown = open_in_browser(tmp_path / "run.html")
    assert (shown["steps"], shown["rows"]) == ("50000", "10000")
    assert "error" not in shown
    assert int(shown["drawn"]) < 5000, "only what is visible"
    assert float(shown["draw-ms"]) < 1000, "about 40 on an idle machine"


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_a_run_without_steps(tmp_path: Path) -> None:
    RunTrace("nothing").write(tmp_path / "run.html")
    shown = open_in_browser(tmp_path / "run.html")
    assert "error" not in shown
    assert shown["steps"] == "0"


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_a_request_of_no_step_and_a_step_of_unknown_gpu_time(recorded: tuple, tmp_path: Path) -> None:
    trace = RunTrace("ends early")
    trace._add([RequestChange(0, 0, "arrived", 1.0, 5), RequestChange(0, 0, "finished", 2.0, 0, "abort")], 0.0)
    trace.write(tmp_path / "run.html")
    shown = open_in_browser(tmp_path / "run.html")
    assert "error" not in shown
    assert (shown["steps"], shown["rows"]) == ("0", "1")
    assert "request 0: abort\nprompt of 5 tokens" in shown["tip"]
    trace = RunTrace("on a GPU")
    for second, gpu_seconds in enumerate([None, 0.5]):
        times = {"started": second, "launched": second + 0.1, "arrived": second + 0.9, "ended": second + 1}
        trace(replace(recorded[0][0], **times, gpu_seconds=gpu_seconds, changes=()))
    trace.write(tmp_path / "run.html")
    shown = open_in_browser(tmp_path / "run.html")
    assert "error" not in shown
    assert shown["tip"].endswith("GPU time not known")


def test_recording_a_step_takes_microseconds() -> None:
    started = perf_counter()
    large_trace(100, 5000)
    assert (perf_counter() - started) / 5000 < 500e-6, "about 8 us on an idle machine"
