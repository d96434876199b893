"""Records a whole run from its StepEvents, and writes it as one HTML page that needs nothing else.

Numbers are kept in columns (`array`) and written as base64: a page of 50,000 steps and 10,000 requests has about 6 MB.
The page itself, `run_trace.html`, says how they are read; its script puts them into typed arrays and draws what is
visible.
"""

import base64
import json
import logging
import sys
import weakref
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanoinfer.engine.engine import EventSource
from nanoinfer.metrics import RequestChange, StepEvent

logger = logging.getLogger("nanoinfer")

PAGE = Path(__file__).with_name("run_trace.html")
MAX_STEPS = 500_000  # of a run that is recorded: they take some 50 MB, in memory and in the page
# Columns and their types in `array`. Times are seconds since the first one recorded; the rest are fields of StepEvent.
STEP_TIMES = ("started", "launched", "arrived", "ended")
STEP_COUNTS = (
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_running",
    "num_waiting",
    "num_preempted",
    "num_paused",
    "num_used_blocks",
    "num_cached_blocks",
    "num_free_blocks",
)
JAVASCRIPT_TYPES = {"b": "Int8", "i": "Int32", "f": "Float32", "d": "Float64"}  # of typed arrays, by type in `array`
KINDS = ("arrived", "admitted", "chunk", "preempted", "paused", "resumed", "finished")


class RunTrace:
    """Records every StepEvent that it is called with.

    title: what the page says above the picture.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._num_left_out = 0
        self._times = {name: array("d") for name in STEP_TIMES}
        self._counts = {name: array("i") for name in STEP_COUNTS}
        self._gpu_seconds = array("f")  # -1: there is no GPU
        self._replicas = array("i")
        self._reasons: dict[str, int] = {}  # why requests finished -> a number
        self._rows: dict[tuple[int, int], int] = {}  # (request_id, sample) -> line in the picture
        # Changes of requests, one column for each of their numbers:
        self._row, self._num_tokens = array("i"), array("i")
        self._kind, self._reason = array("b"), array("b")  # indices of KINDS, and of `_reasons` (-1: none)
        self._time, self._until = array("d"), array("d")  # a chunk lasts until its step's tokens come

    def __call__(self, event: StepEvent) -> None:
        if len(self._gpu_seconds) >= MAX_STEPS:
            self._num_left_out += 1
            return
        for name, times in self._times.items():
            times.append(getattr(event, name))
        for name, counts in self._counts.items():
            counts.append(getattr(event, name))
        self._gpu_seconds.append(-1.0 if event.gpu_seconds is None else event.gpu_seconds)
        self._replicas.append(event.replica)
        self._add(event.changes, event.arrived)

    def _add(self, changes: Iterable[RequestChange], chunks_end: float) -> None:
        """Record changes of requests. chunks_end: when the tokens of the chunks among them came."""
        for request_id, sample, what, time, num_tokens, reason in changes:
            self._row.append(self._rows.setdefault((request_id, sample), len(self._rows)))
            self._kind.append(KINDS.index(what))
            self._time.append(time)
            self._until.append(chunks_end if what == "chunk" else time)
            self._num_tokens.append(num_tokens)
            self._reason.append(-1 if reason is None else self._reasons.setdefault(reason, len(self._reasons)))

    def write(self, path: str | Path) -> None:
        """Write the page. Raises OSError where that is not possible."""
        data = json.dumps(self._as_json()).replace("<", "\\u003c")
        page = PAGE.read_text(encoding="utf-8").replace("__DATA__", data)
        Path(path).write_text(page, encoding="utf-8")

    def write_on_close(
        self, engine: object, events: EventSource, path: str
    ) -> "weakref.finalize[[EventSource, str], Any]":
        """Write the page when the engine is forgotten or the script ends; return a function that writes it before that.

        events: where the recorded events come from; it also has what happened after the last of them.
        """
        return weakref.finalize(engine, self._try_to_write, events, path)

    def _try_to_write(self, events: EventSource, path: str) -> None:
        for event in events.take():
            self(event)
        if not self._num_left_out:
            self._add(*events.take_rest())
        try:
            self.write(path)
        except OSError as error:  # the run itself went well
            logger.error("the trace was not written to %s: %s", path, error)
        else:
            logger.info("trace of %d steps: %s", len(self._gpu_seconds), path)

    def _as_json(self) -> dict[str, Any]:
        origin = min([*self._times["started"][:1], *self._time], default=0.0)

        def encode_times(times: "array[float]") -> dict[str, str]:
            return _encode(array("d", [time - origin for time in times]))

        steps = {name: encode_times(times) for name, times in self._times.items()}
        steps |= {name: _encode(counts) for name, counts in self._counts.items()}
        steps |= {"gpu_seconds": _encode(self._gpu_seconds), "replica": _encode(self._replicas)}
        changes = {
            "row": _encode(self._row),
            "kind": _encode(self._kind),
            "time": encode_times(self._time),
            "until": encode_times(self._until),
            "num_tokens": _encode(self._num_tokens),
            "reason": _encode(self._reason),
        }
        return {
            "title": self.title,
            "num_left_out": self._num_left_out,
            "steps": steps,
            "changes": changes,
            "requests": {"request_id": [key[0] for key in self._rows], "sample": [key[1] for key in self._rows]},
            "kinds": KINDS,
            "reasons": [*self._reasons],
        }


def _encode(column: "array[Any]") -> dict[str, str]:
    """Return a column for JSON: the name of its typed array in JavaScript, and its bytes, the lowest ones first."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return {"type": JAVASCRIPT_TYPES[column.typecode], "base64": base64.b64encode(column.tobytes()).decode("ascii")}
