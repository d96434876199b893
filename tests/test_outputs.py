"""Outputs: attributes, the keys that users of nano-vllm write, how they look; and how progress is shown."""

import dataclasses
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from nanoinfer import CompletionOutput, Logprob, RequestOutput, SamplingParams, Score, progress
from nanoinfer.metrics import EngineMetrics
from nanoinfer.outputs import RequestMetrics, RequestOutputs, StreamChunk

ROOT = Path(__file__).parent.parent
FIRST = CompletionOutput(index=0, text=" four", token_ids=[19, 2], finish_reason="stop")
SECOND = CompletionOutput(index=1, text=" five", token_ids=[20], finish_reason="length")
OUTPUT = RequestOutput(
    request_id=7, prompt="2 + 2 =", prompt_token_ids=[17, 10, 17, 28], num_cached_tokens=0, outputs=[FIRST, SECOND]
)


def test_attributes_and_keys_are_those_of_the_first_completion() -> None:
    assert (OUTPUT.text, OUTPUT.token_ids, OUTPUT.finish_reason) == (" four", [19, 2], "stop")
    assert (OUTPUT["text"], OUTPUT["token_ids"], OUTPUT["finish_reason"]) == (" four", [19, 2], "stop")


@pytest.mark.parametrize("name", ["tokens", "prompt", "__class__", "outputs"])
def test_any_other_key_is_an_error_that_lists_the_keys(name: str) -> None:
    with pytest.raises(KeyError, match=f"{name}.*use 'text', 'token_ids' or 'finish_reason'"):
        OUTPUT[name]


REFUSED = RequestOutput(
    request_id=8,
    prompt=None,
    prompt_token_ids=[],
    num_cached_tokens=0,
    outputs=[CompletionOutput(0, "", [], "error", error="prompt 1 is empty", error_kind="empty_prompt")],
)
FLAT = {
    "request_id": 7,
    "sample": 0,
    "prompt": "2 + 2 =",
    "text": " four",
    "finish_reason": "stop",
    "stop_reason": "2",
    "error": None,
    "error_kind": None,
    "num_prompt_tokens": 4,
    "num_cached_tokens": 0,
    "num_generated_tokens": 2,
    "cumulative_logprob": None,
    "prompt_token_ids": [17, 10, 17, 28],
    "token_ids": [19, 2],
}


def test_a_row_of_a_table_is_flat_and_a_column_has_values_of_one_type() -> None:
    output = dataclasses.replace(OUTPUT, outputs=[dataclasses.replace(FIRST, stop_reason=2), SECOND])
    assert output.to_dict() == FLAT
    second = {"sample": 1, "text": " five", "finish_reason": "length", "stop_reason": None}
    assert output.to_dict(1) == FLAT | second | {"num_generated_tokens": 1, "token_ids": [20]}
    assert REFUSED.to_dict().keys() == FLAT.keys()
    assert (REFUSED.text, REFUSED.finish_reason, REFUSED.error) == ("", "error", "prompt 1 is empty")


def test_the_fields_that_pandas_makes_columns_of_have_what_the_rows_have() -> None:
    """pandas calls dataclasses.asdict where the first item is a dataclass and cannot be iterated over."""
    assert not hasattr(OUTPUT, "__iter__")
    columns, row = dataclasses.asdict(OUTPUT), OUTPUT.to_dict()
    assert [*columns][:10] == [
        "request_id",
        "prompt",
        "text",
        "finish_reason",
        "stop_reason",
        "error",
        "error_kind",
        "num_prompt_tokens",
        "num_generated_tokens",
        "cumulative_logprob",
    ]
    same = row.keys() - {"sample", "stop_reason"}
    assert {name: columns[name] for name in same} == {name: row[name] for name in same}
    replaced = dataclasses.replace(OUTPUT, outputs=[SECOND])
    assert (replaced.text, replaced.num_generated_tokens) == (" five", 1)


def test_pandas_and_datasets_take_outputs_as_they_are() -> None:
    pandas = pytest.importorskip("pandas")
    outputs = RequestOutputs([OUTPUT, REFUSED])
    frame = pandas.DataFrame(outputs)
    assert frame["text"].tolist() == [" four", ""]
    assert frame["num_generated_tokens"].sum() == 2
    assert frame["error"].tolist()[1] == "prompt 1 is empty"
    assert frame.groupby("error_kind").size().to_dict() == {"empty_prompt": 1}
    assert outputs.to_dataframe()["sample"].tolist() == [0, 0]
    assert outputs.to_dataframe(samples=True)["text"].tolist() == [" four", " five", ""]
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([output.to_dict() for output in outputs])
    assert rows["text"][:] == [" four", ""]
    assert rows[0] == OUTPUT.to_dict()


def test_a_slice_is_shown_as_a_table_too() -> None:
    outputs = RequestOutputs([OUTPUT] * 5)
    assert isinstance(outputs[1:3], RequestOutputs)
    assert outputs[1:3] == [OUTPUT] * 2
    assert len(cells(outputs[1:3]._repr_html_())) == 1 + 2 * 2
    assert outputs[-1] is OUTPUT


def test_outputs_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIRST.text = ""  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        OUTPUT.prompt = ""  # type: ignore[misc]


# --- how they look ---


def test_a_repr_has_the_fields_that_say_something() -> None:
    assert repr(FIRST) == "CompletionOutput(index=0, text=' four', token_ids=[19, 2], finish_reason='stop')"
    failed = dataclasses.replace(FIRST, stop_reason=5, error="NaN")
    assert repr(failed).endswith("finish_reason='stop', stop_reason=5, error='NaN')")
    assert repr(OUTPUT) == (
        "RequestOutput(request_id=7, prompt='2 + 2 =', prompt_token_ids=[17, 10, 17, 28], num_cached_tokens=0, "
        f"outputs=[{FIRST!r}, ... 2 in all])"
    )
    assert repr(dataclasses.replace(OUTPUT, prompt=None)).startswith("RequestOutput(request_id=7, prompt=None, ")
    assert repr(StreamChunk(0, "a", [1], None, request_id=3)) == (
        "StreamChunk(index=0, text='a', token_ids=[1], finish_reason=None, sample=0, request_id=3)"
    )


def test_long_texts_lists_and_numbers_are_cut_and_what_is_left_out_is_counted_outside_of_the_quotes() -> None:
    long = dataclasses.replace(FIRST, text="ab\n" * 100, token_ids=[*range(1000)])
    assert repr(long) == (
        f"CompletionOutput(index=0, text={('ab' + chr(10)) * 26 + 'ab'!r}... of 300 characters, "
        f"token_ids=[{', '.join(map(str, range(23)))}, ... 1000 in all], finish_reason='stop')"
    )
    assert repr("...") in repr(dataclasses.replace(FIRST, text="...")), "a text of dots is one"
    entry = Logprob(-1 / 3, 1, "a")
    assert repr(entry) == "Logprob(logprob=-0.333333, rank=1, decoded_token='a')"
    places = [dict.fromkeys(range(1000), entry)] * 1000
    assert len(repr(dataclasses.replace(FIRST, logprobs=places))) < 300
    assert repr(Score([1], [-math.inf], math.nan, False)) == (
        "Score(token_ids=[1], logprobs=[-inf], total=nan, is_greedy=False)"
    )
    assert repr(RequestMetrics(0.123456789)) == "RequestMetrics(queue_time=0.123457)"
    assert "prefill_seconds=0.0, " in repr(EngineMetrics())


def test_sampling_params_show_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0, max_tokens=None, stop="a", ignore_eos=True, logit_bias={1: 2})
    shown = "SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, stop=('a',), logit_bias={1: 2.0})"
    assert repr(params) == shown
    assert eval(shown) == params


def test_how_outputs_look_changes_neither_equality_nor_pickles() -> None:
    assert pickle.loads(pickle.dumps(OUTPUT)) == OUTPUT
    assert pickle.loads(pickle.dumps(RequestOutputs([OUTPUT]))) == [OUTPUT]
    assert dataclasses.replace(OUTPUT, metrics=RequestMetrics(1.0)) != OUTPUT, "though it is not shown"
    assert SamplingParams(seed=1) == SamplingParams(seed=1)


def cells(html: str) -> list[list[str | None]]:
    """The texts of a table by rows; it must be well-formed, with nothing but texts in its cells."""
    table = ElementTree.fromstring(html)
    assert {cell.tag for row in table for cell in row} <= {"th", "td"}
    assert all(len(cell) == 0 for row in table for cell in row)
    return [[cell.text for cell in row] for row in table]


def test_a_notebook_shows_a_table_of_completions_in_which_no_text_is_markup() -> None:
    hostile = "<script>alert('&amp;')</script>\n\"</td>"
    failed = dataclasses.replace(SECOND, text="", error="a < b")
    output = dataclasses.replace(OUTPUT, prompt=hostile, outputs=[dataclasses.replace(FIRST, text=hostile), failed])
    head, *rows = cells(output._repr_html_())
    assert head == ["request", "prompt", "completion", "tokens in + out", "finish_reason"]
    assert rows == [["7", hostile, hostile, "4 + 2", "stop"], ["7", hostile, "[20]", "4 + 1", "length: a < b"]]


def test_a_notebook_shows_the_first_twenty_completions_of_a_list_and_cuts_long_texts() -> None:
    long = dataclasses.replace(FIRST, text="a" * 3000)
    output = dataclasses.replace(OUTPUT, prompt=None, outputs=[long])
    rows = cells(RequestOutputs([output] * 1000)._repr_html_())
    assert rows[1][1:3] == ["[17, 10, 17, 28]", "a" * 2000 + "... of 3000 characters"]
    assert len(rows) == 22
    assert rows[-1] == ["980 more"]
    assert len(cells(RequestOutputs()._repr_html_())) == 1


# --- progress ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that progress sees."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_log_gets_a_line_every_thirty_seconds_and_one_at_the_end(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = EngineMetrics()
    with progress.Progress(lambda: dataclasses.replace(metrics), 110, True, num_before=10) as shown:
        for second in range(1, 72):
            clock.now = float(second)
            metrics.decode_tokens, metrics.decode_seconds = 500 * second, float(second)
            shown.show(10 + second)
    assert capsys.readouterr().err.splitlines() == [
        "Generating: 40/110 req, prefill 0 tok/s, decode 500 tok/s, 00:30 passed, 01:10 left",
        "Generating: 70/110 req, prefill 0 tok/s, decode 500 tok/s, 01:00 passed, 00:40 left",
        "Generating: 81/110 req, prefill 0 tok/s, decode 500 tok/s, 01:11 passed, 00:29 left",
    ]


def test_progress_that_nobody_sees_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    with progress.Progress(lambda: asked.append(0) or EngineMetrics(), 9, use_tqdm=False) as shown:  # type: ignore[func-returns-value]
        shown.show(1)
    assert asked == []
    assert capsys.readouterr() == ("", "")


def test_a_log_says_when_nothing_has_finished_and_nothing_of_what_was_quick(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress_bar("Generating", "req", 9, use_tqdm=True) as bar:
        clock.now = 3700.0
        bar.update(0)
    line = "Generating: 0/9 req, 1:01:40 passed, ? left\n"
    assert capsys.readouterr().err == 2 * line
    for use_tqdm, delay in ((True, 0.5), (False, 0.0)):
        with progress.progress_bar("Compiling", "grammar", 9, use_tqdm, delay=delay) as bar:
            bar.update()
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_and_a_notebook_get_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    streams: list[Callable[[], io.StringIO]] = [Terminal, notebook]
    for make in streams:
        monkeypatch.setattr(sys, "stderr", stream := make())
        with progress.progress_bar("Generating", "req", 2, use_tqdm=True) as bar:
            bar.update(2)
        assert "\rGenerating: 100%|" in stream.getvalue()


def test_a_log_that_is_closed_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.progress_bar("Generating", "req", 2, use_tqdm=True) as bar:
        sys.stderr.close()
        bar.update(2)


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_a_log_that_was_closed_before_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch, use_tqdm: bool) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.close()
    with progress.progress_bar("Generating", "req", 2, use_tqdm) as bar:
        bar.update(2)


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_without_standard_error_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], use_tqdm: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress.progress_bar("Generating", "req", 2, use_tqdm) as bar:
        bar.update(2)
    assert capsys.readouterr().out == ""


NOTEBOOK_WITHOUT_WIDGETS = """
import sys, types
sys.modules["ipywidgets"] = None
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = object
import tqdm.std
from nanoinfer.progress import tqdm as chosen
assert issubclass(chosen, tqdm.std.tqdm)
"""


def test_a_notebook_without_ipywidgets_gets_no_warning() -> None:
    arguments = [sys.executable, "-W", "always", "-c", NOTEBOOK_WITHOUT_WIDGETS]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
