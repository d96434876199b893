"""Random histories of scheduler and block manager: every request gets the answer that it would get alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoinfer.engine.batch import ScheduledBatch
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from tests.engine.helpers import (
    FakeDevice,
    always_seven,
    check_batch,
    check_cache_contents,
    check_invariants,
    completion_alone,
    make_sequence,
)

VOCAB_SIZE = 2  # so few that prompts share prefixes, and completions meet prompts
STOP_TOKEN_ID = 0
MAX_STEPS = 2000  # the longest history needs a few hundred


@dataclass(frozen=True)
class Options:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    hash_function: Callable[[bytes], int]
    reserved_tokens: int
    overlap: bool  # a step is scheduled and run before the tokens of the last one are collected

    @property
    def max_model_len(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class Add:
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    priority: int


@dataclass(frozen=True)
class Step:
    fails: bool = False


@dataclass(frozen=True)
class Abort:
    seq_ids: set[int]


@dataclass(frozen=True)
class ResetPrefixCache:
    pass


Event = Add | Step | Abort | ResetPrefixCache

prompts = st.builds(
    lambda num_shared, rest: [1] * num_shared + rest,
    num_shared=st.integers(0, 12),
    rest=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
)
priorities = st.sampled_from([0, 0, 0, 1, -1])
adds = st.builds(
    Add,
    prompt=prompts,
    max_tokens=st.integers(1, 24),
    ignore_eos=st.booleans(),
    priority=priorities,
)
events = st.one_of(
    adds,
    adds,
    st.just(Step()),
    st.just(Step()),
    st.just(Step()),
    st.just(Step(fails=True)),
    st.builds(Abort, seq_ids=st.sets(st.integers(0, 8), min_size=1, max_size=2)),
    st.just(ResetPrefixCache()),
)
options = st.builds(
    Options,
    num_blocks=st.integers(2, 24),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 16),
    hash_function=st.sampled_from([xxhash.xxh64_intdigest, always_seven]),
    reserved_tokens=st.integers(0, 4),
    overlap=st.booleans(),
)
histories = st.builds(
    lambda first_requests, events: first_requests + events,
    st.lists(adds, min_size=1, max_size=8),
    st.lists(events, min_size=2, max_size=40),
)


class History:
    """An engine without a model; after each event everything that can be checked is checked."""

    def __init__(self, options: Options) -> None:
        self.manager = BlockManager(options.num_blocks, options.block_size, hash_function=options.hash_function)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            stop_token_ids=frozenset({STOP_TOKEN_ID}),
            reserved_tokens=options.reserved_tokens,
        )
        self.device = FakeDevice(options.block_size, VOCAB_SIZE)
        self.overlap = options.overlap
        self.in_flight: list[tuple[ScheduledBatch, list[int] | None]] = []  # None: it failed
        self.seqs: list[Sequence] = []
        self.aborted: set[int] = set()
        self.seen: Counter[str] = Counter()  # what happened, so that a test can tell that it does
        self.first_admissions: list[int] = []

    def play(self, event: Event) -> None:
        match event:
            case Add(prompt, max_tokens, ignore_eos, priority):
                prompt = prompt[: self.scheduler.max_model_len - 1]
                self.seqs.append(make_sequence(len(self.seqs), prompt, max_tokens, ignore_eos))
                self.seqs[-1].priority = priority
                self.scheduler.add(self.seqs[-1])
            case Step(fails):
                self.step(fails)
            case Abort(seq_ids):
                self.collect_all_but(0)
                self.aborted |= {
                    seq.seq_id
                    for seq in self.seqs
                    if seq.seq_id in seq_ids and seq.status is not SequenceStatus.FINISHED
                }
                self.scheduler.abort(seq_ids)
            case ResetPrefixCache():
                self.manager.reset_prefix_cache()
                assert self.manager.num_cached_blocks == 0
        check_invariants(self.scheduler)
        if all(token_ids is not None for _, token_ids in self.in_flight):
            check_cache_contents(self.manager, self.device)

    def step(self, fails: bool = False) -> None:
        in_flight = bool(self.in_flight)
        batch = self.scheduler.schedule(in_flight)
        assert in_flight or bool(batch) != self.scheduler.is_finished()
        check_batch(self.scheduler, batch, in_flight)
        check_invariants(self.scheduler)
        self.first_admissions += [seq.seq_id for seq in batch.admitted if seq.seq_id not in self.first_admissions]
        if batch:
            fails = fails or any(token_ids is None for _, token_ids in self.in_flight)  # what follows a failure fails
            token_ids = self.device.run(batch, fails)
            self.seen["several running"] += len(self.scheduler.running) > 1
            self.seen["blocks shared"] += any(block.ref_count > 1 for block in self.manager.blocks)
            self.seen["chunks cut"] += any(not chunk.samples for chunk in batch.prefill)
            self.seen["overlaps"] += in_flight
            self.seen["failures"] += fails
            self.in_flight.append((batch, None if fails else token_ids))
        self.collect_all_but(1 if batch and self.overlap else 0)

    def collect_all_but(self, max_in_flight: int) -> None:
        while len(self.in_flight) > max_in_flight:
            if self.in_flight[0][1] is None:
                self.scheduler.discard([batch for batch, _ in self.in_flight])
                self.in_flight.clear()
                return
            for seq in self.scheduler.update(*self.in_flight.pop(0)):
                expected = completion_alone(seq, self.scheduler, VOCAB_SIZE)
                assert (seq.completion_token_ids, seq.finish_reason) == expected

    def finish(self) -> None:
        """Run what is left; nothing may leak."""
        for _ in range(MAX_STEPS):
            if self.scheduler.is_finished():
                break
            self.play(Step())
        self.collect_all_but(0)
        self.seen["preemptions"] += self.scheduler.num_preemptions
        assert self.scheduler.is_finished(), f"not finished after {MAX_STEPS} steps"
        assert {seq.seq_id for seq in self.seqs if seq.finish_reason == "abort"} == self.aborted
        for priority in {seq.priority for seq in self.seqs}:
            admitted = [seq_id for seq_id in self.first_admissions if self.seqs[seq_id].priority == priority]
            assert admitted == sorted(admitted), "not first come, first served"
        assert self.manager.num_free_blocks == self.manager.num_blocks


def play(options: Options, events: list[Event]) -> Counter[str]:
    history = History(options)
    for event in events:
        history.play(event)
    history.finish()
    return history.seen


def test_in_any_history_every_request_gets_the_answer_it_would_get_alone() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=1000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(options=options, events=histories)
    def play_all(options: Options, events: list[Event]) -> None:
        seen.update(play(options, events))

    play_all()
    wanted = ("several running", "blocks shared", "chunks cut", "overlaps", "failures", "preemptions")
    assert all(seen[event] >= 100 for event in wanted), f"the histories are too tame: {seen}"


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=options, events=histories)
def test_in_thousands_of_histories_every_request_gets_the_answer_it_would_get_alone(
    options: Options, events: list[Event]
) -> None:
    play(options, events)


def random_history(random: Random, num_steps: int) -> Counter[str]:
    """A long history, without hypothesis, which makes short ones and takes its time; what happened in it."""
    history = History(
        Options(
            num_blocks=random.randint(2, 24),
            block_size=random.randint(1, 4),
            max_num_seqs=random.randint(1, 6),
            max_num_batched_tokens=random.randint(1, 16),
            hash_function=random.choice([xxhash.xxh64_intdigest, always_seven]),
            reserved_tokens=random.randint(0, 4),
            overlap=random.random() < 0.5,
        )
    )
    for _ in range(num_steps):
        history.play(Step(fails=random.random() < 0.01))
        while history.scheduler.num_waiting < 6 and random.random() < 0.4:
            prompt = [1] * random.randint(0, 12) + random.choices(range(VOCAB_SIZE), k=random.randint(1, 4))
            priority = random.choice([0, 0, 0, 1, -1])
            history.play(Add(prompt, random.randint(1, 24), random.random() < 0.5, priority))
        if random.random() < 0.02:
            newest = len(history.seqs)
            history.play(Abort({random.randint(max(0, newest - 8), newest)}))
        if random.random() < 0.005:
            history.play(ResetPrefixCache())
    history.finish()
    return history.seen


@pytest.mark.parametrize("num_steps", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_in_long_histories_every_request_gets_the_answer_it_would_get_alone(num_steps: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_steps // 500):
        seen.update(random_history(Random(seed), num_steps=500))
    wanted = ("several running", "blocks shared", "chunks cut", "overlaps", "failures", "preemptions")
    assert all(seen[event] >= num_steps / 200 for event in wanted), f"the histories are too tame: {seen}"
