"""Holds a request as its user sees it: its samples, their text, stream and log-probabilities, and how it ends.

A sample of a request ends for one of these reasons:

    "stop"    its newest token is a stop token, or completes what its grammar asks for (`stopping.py`), or a stop string
              is complete (`Completion.advance`)
    "length"  it has max_tokens, or the sequence has max_model_len tokens (`stopping.py`)
    "error"   its logits were NaN or infinite, no token was allowed, or a logits processor failed (`stopping.py`)
    "abort"   the user aborted the request (`LLM.abort`)
"""

from dataclasses import dataclass
from typing import Any

from nanoinfer.engine.engine import Recipient
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.request_logprobs import PromptLogprobs, end_text, logprobs_of_tokens
from nanoinfer.engine.sequence import Sequence
from nanoinfer.flat_logprobs import FlatLogprobs
from nanoinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk, TokenLogprobs
from nanoinfer.text.completion_text import CompletionText
from nanoinfer.text.tokenizer import Tokenizer, completion_text


@dataclass(slots=True, eq=False)
class Completion:
    """Holds what the engine keeps of one sample of a request besides its sequence."""

    seq: Sequence
    tokenizer: Tokenizer | None
    recipient: Recipient
    logprobs: list[TokenLogprobs] | FlatLogprobs  # empty unless they are asked for
    num_read: int = 0  # how many tokens of the completion are in the text and in the stream
    output: CompletionOutput | None = None  # set once the sample has finished
    start_time: float | None = None  # when its first step was launched (perf_counter)
    first_token_time: float | None = None  # when its first token was collected
    routed_experts: Any = None  # the experts of its tokens, from the runner; None unless they are asked for
    _text: CompletionText | None = None

    def text(self) -> CompletionText:
        """Return the text, which grows with the tokens. The first call makes it, and needs the prompt for that."""
        if self._text is None:
            self._text = completion_text(self.tokenizer, self.seq.sampling_params, self.seq.prompt_token_ids)
        return self._text

    @property
    def is_followed(self) -> bool:
        """Return whether the text matters before the completion has finished."""
        return self.recipient.chunks is not None or bool(self.seq.sampling_params.stop)

    def advance(self) -> bool:
        """Read the tokens collected since the last time; return whether a stop string is complete."""
        token_ids = self._unread()
        if self._read(token_ids):
            return True
        self._stream(token_ids, finish_reason=None)
        return False

    def finish(self) -> CompletionOutput:
        """Read the rest, end the stream, and make the output. If EOS ended the sample, stop_reason is None."""
        seq, reason = self.seq, self.seq.finish_reason
        assert reason is not None, f"sequence {seq.seq_id} is returned before it finished"
        error, kind = self._error() if reason == "error" else (None, None)
        if seq.stopping.ends_with_prompt:
            self.output = CompletionOutput(seq.sample, "", [], reason, error=error, error_kind=kind)
            return self.output
        params, text = seq.sampling_params, self.text()
        end_text(self.logprobs, text.of_tokens)
        stop_reason: str | int | None = None
        rest = unread = self._unread()
        if reason == "stop" and text.stop_string is None and seq.token_ids[-1] in seq.stopping.tokens.ids:
            is_eos = self.tokenizer is not None and seq.token_ids[-1] == self.tokenizer.eos_token_id
            stop_reason = seq.token_ids[-1] if not is_eos or params.ignore_eos else None
            rest = rest if params.include_stop_str_in_output else rest[:-1]
        if self._read(rest, final=True):  # the token that completes a stop string may also be the last one allowed
            reason, stop_reason = "stop", text.stop_string
        self._stream(unread, reason)
        token_ids = seq.completion_token_ids
        logprobs: Any = None if params.num_logprobs is None else self.logprobs
        total = None if logprobs is None else sum(logprobs_of_tokens(logprobs, token_ids))
        routed = None if self.routed_experts is None else self.routed_experts.to_array()
        self.output = CompletionOutput(
            index=seq.sample,
            text=str(text),
            token_ids=token_ids,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=logprobs,
            cumulative_logprob=total,
            error=error,
            error_kind=kind,
            routed_experts=routed,
        )
        return self.output

    def _error(self) -> tuple[str, str]:
        """Return the message and the error_kind that say why a token could not be drawn."""
        seq = self.seq
        if seq.error:
            return str(seq.error), seq.error.kind
        if seq.constraint and seq.constraint.error:
            return seq.constraint.error, "no_allowed_token"
        num_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        return f"the logits are NaN or infinite after {num_tokens} tokens", "nan_logits"

    def _read(self, token_ids: list[int], final: bool = False) -> bool:
        """Extend the text; return whether a stop string is complete. The first min_tokens tokens complete none."""
        early = self.seq.stopping.num_early(self.num_read)
        if early:
            self.text().extend(token_ids[:early], may_stop=False)
        self.text().extend(token_ids[early:], final)
        return self.text().stop_string is not None

    def _unread(self) -> list[int]:
        return self.seq.token_ids[self.seq.num_prompt_tokens + self.num_read :].tolist()

    def _stream(self, token_ids: list[int], finish_reason: str | None) -> None:
        """Count these tokens as read, and send them to the stream, if there is one."""
        start, self.num_read = self.num_read, self.num_read + len(token_ids)
        if self.recipient.chunks is not None:
            seq, text = self.seq, self.text().take()
            wanted = seq.sampling_params.num_logprobs is not None
            logprobs: Any = self.logprobs[start : self.num_read] if wanted else None
            index = seq.request_id - self.recipient.first_id
            chunk = StreamChunk(index, text, token_ids, finish_reason, seq.sample, logprobs, request_id=seq.request_id)
            self.recipient.chunks.append(chunk)


@dataclass(slots=True, eq=False)
class Request:
    """Holds what the engine keeps of a request until its output is handed over."""

    request_id: int
    prompt: str | None  # None if it was given as token ids
    completions: list[Completion]  # its samples
    recipient: Recipient
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states_request: HiddenStatesRequest | None = None

    def output(self) -> RequestOutput | None:
        """Return the output for the user, or None until all samples have finished."""
        outputs = [completion.output for completion in self.completions if completion.output is not None]
        if len(outputs) < len(self.completions):
            return None
        first = self.completions[0]  # the first to run
        num_later = max(len(completion.token_ids) for completion in outputs) - 1
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.seq.prompt_token_ids,
            num_cached_tokens=first.seq.num_cached_tokens or 0,
            outputs=outputs,
            metrics=RequestMetrics.of(self.recipient.arrival_time, first.start_time, first.first_token_time, num_later),
            prompt_logprobs=None if self.prompt_logprobs is None else self.prompt_logprobs.for_user(),
        )
        wanted = self.hidden_states_request
        return output if wanted is None else wanted.to_output(output)
