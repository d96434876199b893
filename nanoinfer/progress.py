"""Progress of `generate`, `chat`, `score`, batch jobs and grammars: a bar, or lines where a bar cannot move."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nanoinfer.metrics import EngineMetrics

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # in a notebook without ipywidgets, where it draws with characters
    from tqdm.auto import tqdm

SECONDS_PER_LINE = 30.0


class LogLines:
    """Stands in for tqdm's bar in a log file: writes a line every SECONDS_PER_LINE, and one at the end.

    delay: seconds before which nothing is written. The other arguments and the methods are tqdm's.
    """

    def __init__(self, desc: str, unit: str, total: int, initial: int = 0, delay: float = 0.0) -> None:
        self.n, self._initial, self._total = initial, initial, total
        self._desc, self._unit, self._postfix, self._delay = desc, unit, "", delay
        self._stream = sys.stderr
        self._started = self._written = time.monotonic()

    def __enter__(self) -> "LogLines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        self._postfix = f", {text}"

    def update(self, num: int = 1) -> None:
        self.n += num
        if time.monotonic() - self._written >= SECONDS_PER_LINE:
            self._write()

    def close(self) -> None:
        if time.monotonic() - self._started >= self._delay:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._stream is None:  # a program without a console has no standard error, and print would use its output
            return
        passed, num_new, num_left = self._written - self._started, self.n - self._initial, self._total - self.n
        left = tqdm.format_interval(passed * num_left / num_new) if num_new else "?"
        line = f"{self._desc}: {self.n}/{self._total} {self._unit}{self._postfix}"
        with suppress(OSError, ValueError):  # a log that is closed or full must not end the work
            print(f"{line}, {tqdm.format_interval(passed)} passed, {left} left", file=self._stream, flush=True)


class NoBar(LogLines):
    """Stands in for a bar that is not to be shown.

    A disabled bar of tqdm still makes a semaphore, which a worker, as it ends at once, would not free.
    """

    def _write(self) -> None:
        pass


def progress_bar(desc: str, unit: str, total: int, use_tqdm: bool, initial: int = 0, delay: float = 0.0) -> Any:
    """Return tqdm's bar for a terminal or a notebook, LogLines where standard error is neither.

    use_tqdm: False returns NoBar. delay: seconds before which nothing is shown. The other arguments are tqdm's.
    """
    if not use_tqdm:
        return NoBar(desc, unit, total, initial, delay)
    is_terminal = False
    with suppress(OSError, ValueError):  # where standard error is closed
        is_terminal = getattr(sys.stderr, "isatty", bool)()
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel.")  # no terminal, but it can redraw a line
    if not (is_terminal or in_notebook):
        return LogLines(desc, unit, total, initial, delay)
    # Drawn a few times a second at most, whether or not anything has finished.
    return tqdm(desc=desc, unit=unit, total=total, initial=initial, mininterval=0.2, miniters=0, delay=delay)


class Progress:
    """Shows the progress of a call: finished requests, and tokens a second since it began.

    num_before: how many had finished before it. reads: what is done with texts that are only read, such as "Scoring";
    None where tokens are generated.
    """

    def __init__(
        self,
        get_metrics: Callable[[], EngineMetrics],
        num_requests: int,
        use_tqdm: bool,
        num_before: int = 0,
        reads: str | None = None,
    ) -> None:
        self._bar: Any = None
        if use_tqdm:
            self._get_metrics, self._before, self._generates = get_metrics, get_metrics(), reads is None
            desc, unit = ("Generating", "req") if reads is None else (reads, "text")
            self._bar = progress_bar(desc, unit, num_requests, use_tqdm, num_before)

    def show(self, num_finished: int) -> None:
        if self._bar is None:  # called after each step
            return
        now, before = self._get_metrics(), self._before
        prefill = (now.prefill_tokens - before.prefill_tokens) / max(1e-9, now.prefill_seconds - before.prefill_seconds)
        decode = (now.decode_tokens - before.decode_tokens) / max(1e-9, now.decode_seconds - before.decode_seconds)
        rates = f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s" if self._generates else f"{prefill:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(num_finished - self._bar.n)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
