"""A request as its user sees it: its text and its stream while it runs, and its output in the end."""

import time
from collections import deque
from dataclasses import dataclass, field

from nanoinfer.engine.sequence import Sequence
from nanoinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from nanoinfer.utils.detokenizer import CompletionText


@dataclass(slots=True, eq=False)
class Request:
    """What the engine keeps of a request beside its sequence, until it is returned."""

    seq: Sequence
    prompt: str | None  # None if it was given as token ids
    text: CompletionText | None  # None if no text is to be made
    chunks: deque[StreamChunk] | None = None  # where its stream takes them, if it is streamed
    index: int = 0  # in that stream
    num_read: int = 0  # tokens of the completion that are in `text`
    num_streamed: int = 0  # and those that are in `chunks`
    arrived: float = field(default_factory=time.perf_counter)
    begun: float | None = None  # when its first step was launched (perf_counter)
    first_token: float | None = None  # when that was collected

    @property
    def is_followed(self) -> bool:
        """Whether it matters what the text is before the request has finished."""
        return self.chunks is not None or (self.text is not None and bool(self.text.stop))

    def advance(self) -> bool:
        """Read the tokens collected since the last time; return whether a stop string is complete."""
        if self.text is not None:
            unread = self._completion(self.num_read)
            self.num_read += len(unread)
            self.text.extend(unread)
            if self.text.stop_string is not None:
                return True
        self._stream(finish_reason=None)
        return False

    def finish(self) -> RequestOutput:
        """Read the rest, end the stream, and make the output."""
        seq, params = self.seq, self.seq.sampling_params
        reason, text = seq.finish_reason, ""
        stop_reason: str | int | None = None
        assert reason is not None, f"sequence {seq.seq_id} is returned before it finished"
        rest = self._completion(self.num_read)
        if reason == "stop" and (self.text is None or self.text.stop_string is None):  # by its last token
            stop_reason = seq.token_ids[-1] if seq.token_ids[-1] in (params.stop_token_ids or ()) else None
            rest = rest if params.include_stop_str_in_output else rest[:-1]
        if self.text is not None:
            self.text.extend(rest, final=True)
            text = str(self.text)
            if self.text.stop_string is not None:  # complete with the token that also made the length
                reason, stop_reason = "stop", self.text.stop_string
        self._stream(reason)
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=self.prompt,
            prompt_token_ids=seq.prompt_token_ids,
            num_cached_tokens=seq.num_cached_tokens or 0,
            outputs=[CompletionOutput(0, text, seq.completion_token_ids, reason, stop_reason)],
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        num_later = len(self.seq.token_ids) - self.seq.num_prompt_tokens - 1
        return RequestMetrics(
            queue_time=None if self.begun is None else self.begun - self.arrived,
            time_to_first_token=None if self.first_token is None else self.first_token - self.arrived,
            time_per_token=None
            if self.first_token is None or num_later < 1
            else (time.perf_counter() - self.first_token) / num_later,
        )

    def _completion(self, start: int) -> list[int]:
        return self.seq.token_ids[self.seq.num_prompt_tokens + start :]

    def _stream(self, finish_reason: str | None) -> None:
        """Put what is new in front of the stream, if there is one."""
        if self.chunks is not None:
            text = "" if self.text is None else self.text.take()
            token_ids = self._completion(self.num_streamed)
            self.num_streamed += len(token_ids)
            self.chunks.append(StreamChunk(self.index, text, token_ids, finish_reason))
