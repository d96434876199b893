"""What the engine says of its work while it works. It knows its listener by this class alone."""

from nanoinfer.engine.batch import ScheduledBatch
from nanoinfer.engine.request import Request
from nanoinfer.engine.sequence import Sequence


class Listener:
    """Is told what happens, and does nothing about it; `StepEvents` overrides every method.

    All calls come from the thread that runs the step or queues the request. Times are those of time.perf_counter.
    """

    def arrived(self, request: Request) -> None:
        """A request was queued."""

    def launching(self, batch: ScheduledBatch, started: float) -> None:
        """A step was scheduled, which began at `started`; its work is about to be given to the device."""

    def launched(self, batch: ScheduledBatch) -> None:
        """All its work was given to the device."""

    def collected(self, batch: ScheduledBatch, arrived: float) -> None:
        """Its tokens came, at `arrived`, and were added to their sequences."""

    def failed(self) -> None:
        """A step failed: all that were not collected are forgotten, and their sequences are queued again."""

    def finished(self, seq: Sequence) -> None:
        """A sequence finished and was handed over, or dropped."""

    def stepped(self) -> None:
        """`LLMEngine.step` has done its work."""


SILENT = Listener()
