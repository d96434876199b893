"""What requests may want beside their text: log-probabilities, hidden states of their prompts, routed experts.

The loop calls these methods in the order in which they stand; the file of each feature does the work.
"""

from collections.abc import Mapping

from nanoinfer.config import EngineConfig
from nanoinfer.engine.extras.hidden_states_request import collect_states, hand_over_states
from nanoinfer.engine.extras.request_logprobs import collect_logprobs, end_texts, make_room
from nanoinfer.engine.extras.routed_experts import RoutedExperts
from nanoinfer.engine.interfaces import Runner, SampledStep
from nanoinfer.engine.request import Completion, Request
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer


class Extras:
    """Starts, collects and completes what was asked for."""

    def __init__(self, config: EngineConfig, runner: Runner, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._routed_experts = RoutedExperts(runner) if config.enable_return_routed_experts else None
        # What the scheduler is to call with a sequence that finishes, while it holds its blocks.
        self.on_finish = self._routed_experts.on_finish if self._routed_experts else None

    def start(self, request: Request, prepared: PreparedRequest) -> None:
        """Note what a request wants that is about to be queued."""
        make_room(request, prepared, self._tokenizer)
        request.hidden_states_request = prepared.hidden_states_request
        request.completions[0].seq.hidden_states_request = prepared.hidden_states_request

    def launched(self, batch: ScheduledBatch, handle: SampledStep) -> None:
        """Hand over what a step brings on the device."""
        if handle.hidden_states:
            hand_over_states(batch.prefill, handle.hidden_states)

    def collected(
        self, requests: Mapping[int, Request], batch: ScheduledBatch, handle: SampledStep, wanted: list[bool]
    ) -> None:
        """Keep what a step has brought. wanted: for each of its tokens, whether its sequence was still running."""
        collect_logprobs(requests, batch, handle, wanted)
        if handle.hidden_states:
            collect_states(batch.prefill, handle.hidden_states)

    def finished(self, requests: Mapping[int, Request], seqs: list[Sequence]) -> None:
        """Start what is to be read of sequences that have just finished, before another step has their blocks."""
        if self._routed_experts is not None:
            self._routed_experts.read(requests, seqs)

    def complete(self, completion: Completion) -> None:
        """Complete what belongs to a sample, before its output is made."""
        end_texts(completion)
