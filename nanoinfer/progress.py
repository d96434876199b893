"""The progress bar of `generate`, `chat`, `score` and batch jobs."""

from collections.abc import Callable

from tqdm.auto import tqdm

from nanoinfer.outputs import EngineMetrics


class Progress:
    """Shows the progress of a call: finished requests, and tokens a second since it began.

    num_before: how many had finished before it.
    """

    def __init__(
        self, get_metrics: Callable[[], EngineMetrics], num_requests: int, use_tqdm: bool, num_before: int = 0
    ) -> None:
        self._get_metrics, self._before = get_metrics, get_metrics()
        # A few times a second at most, whether or not a request has finished.
        drawn = {"mininterval": 0.2, "miniters": 0, "disable": not use_tqdm}
        self._bar = tqdm(desc="Generating", unit="req", total=num_requests, initial=num_before, **drawn)

    def show(self, num_finished: int) -> None:
        now, before = self._get_metrics(), self._before
        prefill = (now.prefill_tokens - before.prefill_tokens) / max(1e-9, now.prefill_seconds - before.prefill_seconds)
        decode = (now.decode_tokens - before.decode_tokens) / max(1e-9, now.decode_seconds - before.decode_seconds)
        self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
        self._bar.update(num_finished - self._bar.n)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
