"""Describes the work of an engine: its counts, and an event for each step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import NamedTuple

from nanoinfer.outputs import html_table, short_repr, shown


@dataclass(slots=True)
class EngineMetrics:
    """Counts the work of an LLM since it was made, and the blocks of KV cache that it uses now.

    num_prompt_tokens: tokens of the prompts that were begun, once for each sample.
    cached_tokens: those whose keys and values came from the prefix cache; prefix_hit_rate: their share.
    num_generated_tokens: tokens out.
    prefill_tokens: prompt tokens computed.
    decode_tokens: tokens generated in decode steps; a request's first comes out of its prefill.
    num_preemptions: how often a request had to give its blocks up.
    num_snapshots: recurrent states that are kept for prefix hits, of models that have any.
    num_drafts: rows of a step for which tokens were proposed, with speculative_config.
    num_draft_tokens: those tokens; num_accepted_tokens: those that were right and wanted;
    num_accepted_tokens_per_pos: the same for the first proposal of a row, the second, ...
    draft_seconds_saved: what proposals have saved, by the times that plain steps and those with proposals take.
    prefill_seconds, decode_seconds: of the steps, from launch to collection; where steps overlap, the time counts once.
    """

    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    num_snapshots: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    draft_seconds_saved: float = 0.0

    __repr__ = short_repr

    def count_step(self, num_prefill_tokens: int, num_generated: int, seconds: float) -> None:
        """Count a step that computed so many tokens of prompts, and gave so many sequences a token that was wanted."""
        self.num_generated_tokens += num_generated
        if num_prefill_tokens > 0:
            self.num_prefill_steps += 1
            self.prefill_tokens += num_prefill_tokens
            self.prefill_seconds += seconds
        else:
            self.num_decode_steps += 1
            self.decode_tokens += num_generated
            self.decode_seconds += seconds

    def count_drafts(self, num_proposed: list[int], num_accepted: list[int]) -> None:
        """Count proposals for each row of a step, and accepted ones by place: the first of a row, the second, ..."""
        self.num_drafts += sum(map(bool, num_proposed))
        self.num_draft_tokens += sum(num_proposed)
        self.num_accepted_tokens += sum(num_accepted)
        self.num_accepted_tokens_per_pos = sum_by_place([self.num_accepted_tokens_per_pos, num_accepted])

    @property
    def prefix_hit_rate(self) -> float:
        """Return the share of the prompts' tokens that came from the prefix cache."""
        return self.cached_tokens / max(1, self.num_prompt_tokens)


def sum_by_place(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sums of the first counts, of the second ones, and so on; some may have fewer than others."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


class RequestChange(NamedTuple):
    """Says what happened to one sample of a request.

    `what` is one of these, each with the meaning of `num_tokens`:

        "arrived"    it was queued: the tokens of its prompt
        "admitted"   it got its blocks: the tokens that came from the prefix cache
        "chunk"      the step computes a part of its prompt: the tokens of that part
        "preempted"  it gave its blocks up: the tokens to be computed again
        "paused"     the tokens whose keys and values it keeps for now
        "resumed"    the tokens of which it still has keys and values; 0: it waits to be admitted
        "finished"   the tokens that were generated
    """

    request_id: int
    sample: int  # which of the request's completions, from 0
    what: str
    time: float  # seconds, on the clock of time.perf_counter
    num_tokens: int
    finish_reason: str | None = None  # as in CompletionOutput, where it finished


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Holds what one step did: what `LLM.on_step` calls its functions with. Sequences are samples of requests.

    Times are seconds on the clock of time.perf_counter. Steps overlap: the next one is usually launched before the
    tokens of this one arrive.
    """

    index: int  # of the step, counted from 0 while functions are registered; a step that fails has no event
    started: float  # when the host began to schedule it
    launched: float  # when the host had given all its work to the device
    arrived: float  # when the host had its tokens
    ended: float  # when the host had made texts and outputs of these
    gpu_seconds: float | None  # from its first work on the GPU (rank 0's) to its last; None without a GPU
    num_prefill_tokens: int  # prompt tokens computed, those of preempted sequences again included
    num_decode_tokens: int  # sequences that decode a token; 0 in a prefill step
    num_running: int  # sequences that hold a row and run, as this step was scheduled; so are the counts below
    num_waiting: int  # sequences in the queue
    num_preempted: int  # sequences in the queue that ran before, and gave their blocks up
    num_paused: int  # sequences that compute nothing until they are resumed
    num_used_blocks: int  # blocks of the KV cache that sequences hold
    num_cached_blocks: int  # blocks, in use or free, that the prefix cache would find
    num_free_blocks: int  # blocks that can be handed out; free and used ones are all there are
    changes: tuple[RequestChange, ...]  # what happened to requests since the event before, in order
    replica: int = 0  # whose step it was; each counts its own
    num_draft_tokens: int = 0  # proposed beside the newest token of the sequences that decode
    num_accepted_tokens: int = 0  # of those, the ones that were right and wanted

    @property
    def host_seconds(self) -> float:
        """Return how long the host worked for this step: until it was launched, and once its tokens had come."""
        return (self.launched - self.started) + (self.ended - self.arrived)


def engine_html(engine: str, description: str, metrics: EngineMetrics) -> str:
    """Return a table for notebooks of what an engine is and what it has done so far."""
    done = [[one.name, shown(getattr(metrics, one.name))] for one in fields(metrics)]
    return html_table([["", engine], ["loaded", description], *done])
