"""Proposals are made where steps have been found to pay for them."""

import itertools
from collections.abc import Callable
from itertools import takewhile
from typing import Any, cast

import pytest

from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.metrics import EngineMetrics
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.speculation import speculator, watch
from nanoinfer.speculation.controller import GUESSED_LINES, Acceptance, Controller, Size
from nanoinfer.speculation.speculator import FORM_PRIOR, Speculator
from nanoinfer.speculation.text_index import num_right
from nanoinfer.speculation.watch import MAX_WATCHED
from tests.engine.test_host_work import counted_calls
from tests.speculation.test_drafts import options_of


def learned(plain: float, costs: dict[int, float], num_rows: int = 1) -> Controller:
    """A controller that has seen plain steps of so many seconds, and steps of so many proposals a row of these."""
    controller = Controller()
    for _ in range(3):
        controller.note_plain(num_rows, plain)
        for num_proposals, seconds in costs.items():
            controller.note(num_rows, num_proposals and num_rows * (1 + num_proposals), seconds)
    return controller


def choose(controller: Controller, num_rows: int, expected: list[float]) -> int:
    """The number of proposals of each row. expected: how many rows have a right one in the first place, and so on."""
    most = len(expected)
    sizes = [Size(num_rows * (1 + number), sum(expected[:number])) for number in (1, 2, 4, 8) if number < 2 * most]
    size = controller.choose(num_rows, sizes)
    return 0 if size is None else size.num_lines // num_rows - 1


def test_nothing_is_proposed_before_plain_steps_were_measured() -> None:
    controller = Controller()
    assert choose(controller, 1, [1.0] * 8) == 0
    controller.note_plain(1, 1.0)
    assert choose(controller, 1, [1.0] * 8) == 0, "the first step captures a graph"
    controller.note_plain(1, 1.0)
    assert choose(controller, 1, [1.0] * 8) == 8


def test_the_number_of_proposals_is_the_one_with_most_tokens_a_second() -> None:
    costs = {1: 1.2, 2: 1.3, 4: 1.6, 8: 4.0}
    controller = learned(1.0, costs)
    assert choose(controller, 1, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]) == 4  # (1 + 3.0) / 1.6, and 5.4 / 4.0
    assert choose(controller, 1, [0.6, 0.1, 0, 0, 0, 0, 0, 0]) == 1
    assert choose(controller, 1, [0.2, 0.05, 0, 0, 0, 0, 0, 0]) == 0, "waiting costs more than that"


def test_rows_without_proposals_count() -> None:
    controller = learned(1.0, {1: 1.5, 2: 1.5, 4: 1.5, 8: 1.5}, num_rows=4)
    assert choose(controller, 4, [4.0, 4.0] + [0.0] * 6) == 2
    assert choose(controller, 4, [1.0, 1.0] + [0.0] * 6) == 0, "one row of four gains two tokens"


def test_costs_are_relative_to_plain_steps_of_their_time() -> None:
    """Later, contexts are longer and all steps slower: proposals still pay."""
    controller = learned(1.0, {1: 1.2, 2: 1.3, 4: 1.6, 8: 4.0})
    for _ in range(5):
        controller.note_plain(1, 3.0)
    assert choose(controller, 1, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]) == 4


def test_plain_steps_that_took_longer_than_steps_with_proposals_take_now_do_not_count_for_ever() -> None:
    """Masks, say, took most of their time. While steps wait, no plain ones are measured."""
    controller = learned(16.0, {0: 17.0, 4: 26.0}, num_rows=64)
    for _ in range(3):
        controller.note(64, 0, 9.0)
        controller.note(64, 64 * 5, 12.0)
    assert choose(controller, 64, [20.0] * 4) > 0, "2.25 tokens pay for 1.33 of a step"
    assert choose(controller, 64, [3.0] * 4) == 0, "1.19 do not"


def test_costs_of_other_sizes_say_nothing_and_a_slow_trial_is_the_last() -> None:
    controller = learned(1.0, dict.fromkeys((1, 2, 4, 8), 50.0), num_rows=1)
    assert choose(controller, 1, [1.0] * 8) == 0
    for _ in range(3):
        controller.note_plain(16, 1.0)
    assert choose(controller, 16, [16.0] * 8) > 0


def test_acceptance_knows_after_how_many_equal_tokens_texts_differ() -> None:
    acceptance = Acceptance(prior=0.5, most_equal=8)
    for _ in range(50):
        acceptance.judge(0, 4, 5)
        acceptance.judge(8, 8, 8)
    chances = acceptance.probabilities(0, 12)
    assert min(chances[:4]) > 0.9
    assert chances[4] < 0.1
    assert chances[5:8] == [0.5] * 3, "nobody knows"
    assert min(chances[8:]) > 0.9
    assert acceptance.probabilities(3, 2) == chances[3:5]
    for _ in range(2000):
        acceptance.judge(0, 0, 1)
    assert acceptance.probabilities(0, 1)[0] < 0.1, "what happened lately counts"


def test_a_number_of_lines_that_was_not_measured_costs_what_lies_between_those_that_were() -> None:
    controller = learned(1.0, {0: 1.0, 1: 1.1, 3: 1.2}, num_rows=128)
    assert controller.cost(128, 256) == pytest.approx(1.1)
    assert controller.cost(128, 384) == pytest.approx(1.15)
    assert controller.cost(128, 640) == pytest.approx(1.2 + 128 / GUESSED_LINES), "it is worth a trial"
    assert controller.plain_seconds(96) == pytest.approx(0.875)
    assert controller.cost(96, 512) == pytest.approx(1.2 / 0.875), "no more than with more rows"


class FakeTime:
    """Plain steps take a second, and steps with proposals a fifth more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(speculator.time, "perf_counter", lambda: self.now)


def run(spec: Speculator, stats: EngineMetrics, seqs: list[Sequence], texts: list[list[int]], clock: FakeTime) -> int:
    """Run steps over fixed texts until all have ended; return their number. Plain steps overlap."""
    num_steps, pending = 0, False
    while any(len(seq.token_ids) < len(text) for seq, text in zip(seqs, texts, strict=True)):
        if pending and spec.waits(seqs):
            pending = False
            take(seqs, texts, [[]] * len(seqs), stats)
            continue  # the step in flight was collected
        proposed: Any = spec.propose(seqs)
        clock.now += 1.2 if proposed else 1.0
        num_steps += 1
        if proposed:
            assert not pending
            assert spec.waits(seqs), "its tokens are not known"
            take(seqs, texts, proposed, stats)
        else:
            if pending:
                take(seqs, texts, [[]] * len(seqs), stats)
            pending = True
    return num_steps


def take(seqs: list[Sequence], texts: list[list[int]], proposed: list[list[int]], stats: EngineMetrics) -> None:
    for seq, text, its in zip(seqs, texts, proposed, strict=True):
        rest = text[len(seq.token_ids) :]
        came = rest[: num_right(its, rest) + 1]
        seq.token_ids.extend(came)
        stats.num_generated_tokens += len(came)


def sequences(num: int, prompt: int = 20) -> list[Sequence]:
    seqs = [Sequence(index, [*range(index * 1000, index * 1000 + prompt)], SamplingParams()) for index in range(num)]
    for seq in seqs:
        seq.status = SequenceStatus.RUNNING
    return seqs


@pytest.mark.parametrize("num_rows", [1, 16, 256])
def test_text_that_repeats_nothing_has_plain_steps_and_few_rows_are_indexed(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, seqs = EngineMetrics(), sequences(num_rows)
    spec = Speculator(options_of("suffix", most=8), 8, True, stats)
    texts = [[*seq.prompt_token_ids, *range(10**6 + 100 * seq.seq_id, 10**6 + 100 * seq.seq_id + 50)] for seq in seqs]
    assert run(spec, stats, seqs, texts, FakeTime(monkeypatch)) >= 50
    assert len(spec._rows) == min(num_rows, MAX_WATCHED)
    assert stats.draft_seconds_saved == 0


@pytest.mark.parametrize(("num_rows", "most"), [(1, 23), (16, 120), (256, 100)])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_step_of_text_that_repeats_nothing_takes_few_calls(
    method: str, num_rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows there are; a step of 256 rows calls 150 functions without proposals. Steps are so long here
    that each begins to watch one more row."""
    spec, clock = Speculator(options_of(method, most=8), 8, True, EngineMetrics()), FakeTime(monkeypatch)
    seqs, steps = sequences(num_rows), list[int]()
    for step in range(12):
        clock.now += 1.0
        with counted_calls() as calls:
            assert step == 0 or not spec.waits(seqs)
            assert spec.propose(seqs) == []
        steps.append(calls.total())
        for seq in seqs:
            seq.token_ids.append(10**6 + 1000 * seq.seq_id + step)
    assert max(steps[4:]) <= most, steps


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_text_that_copies_its_prompt_has_proposals_and_what_they_save_is_counted(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, seqs = EngineMetrics(), sequences(num_rows)
    spec = Speculator(options_of("suffix", most=8), 8, True, stats)
    texts = [seq.prompt_token_ids * 6 for seq in seqs]
    assert run(spec, stats, seqs, texts, FakeTime(monkeypatch)) < 50, "single steps would be a hundred"
    assert stats.draft_seconds_saved > 30


def test_texts_are_indexed_while_plain_steps_run_and_no_step_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 takes a tenth of a step."""
    stats, seqs, clock = EngineMetrics(), sequences(64), FakeTime(monkeypatch)
    spec, row_of, propose = (
        Speculator(options_of("suffix", most=8), 8, True, stats),
        Speculator._row_of,
        Speculator.propose,
    )
    num_new = list[int]()

    def slow_row_of(spec: Speculator, seq: Sequence, catches_up: bool) -> Any:
        clock.now += 0.0 if seq in spec._rows else 0.1
        return row_of(spec, seq, catches_up)

    def noted(spec: Speculator, seqs: list[Sequence]) -> list[list[int]]:
        num_before, proposed = len(spec._rows), propose(spec, seqs)
        num_new.append(len(spec._rows) - num_before)
        return proposed

    monkeypatch.setattr(Speculator, "_row_of", slow_row_of)
    monkeypatch.setattr(Speculator, "propose", noted)
    assert run(spec, stats, seqs, [seq.prompt_token_ids * 6 for seq in seqs], clock) < 60
    assert max(num_new) <= MAX_WATCHED
    assert len(spec._rows) == 64


@pytest.mark.parametrize("first", [0, 20, 36])
def test_rows_that_begin_to_repeat_are_found_wherever_they_are(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 40 rows. All have 300 tokens of nothing before."""
    stats, seqs = EngineMetrics(), sequences(40, prompt=100)
    monkeypatch.setattr(watch, "TOKENS_A_SECOND", 50)  # so that a turn takes two to nine steps
    spec = Speculator(options_of("suffix", most=8), 8, True, stats)
    texts = []
    for seq in seqs:
        its_own = [*seq.prompt_token_ids, *range(10**6 + 1000 * seq.seq_id, 10**6 + 1000 * seq.seq_id + 300)]
        repeats = first <= seq.seq_id < first + 4
        rest = its_own[-300:] * 4 if repeats else range(10**7 * (1 + seq.seq_id), 10**7 * (1 + seq.seq_id) + 400)
        texts.append([*its_own, *rest])
    assert run(spec, stats, seqs, texts, FakeTime(monkeypatch)) < 700 + 150, "1,200 tokens of four rows"


def test_one_row_of_many_that_repeats_does_not_make_all_wait_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, seqs, clock = EngineMetrics(), sequences(64), FakeTime(monkeypatch)
    spec = Speculator(options_of("suffix", most=8), 8, True, stats)
    texts = [[*seq.prompt_token_ids, *range(10**6 * (1 + seq.seq_id), 10**6 * (1 + seq.seq_id) + 500)] for seq in seqs]
    texts[0] = seqs[0].prompt_token_ids * 26
    waited = []
    monkeypatch.setattr(Speculator, "waits", noting(Speculator.waits, waited))
    run(spec, stats, seqs, texts, clock)
    assert sum(waited) < 12, "it looks at all after 2, 4, 8 promises, and so on"
    assert sum(waited) > 2


def noting(method: Callable[..., bool], results: list[bool]) -> Callable[..., bool]:
    def call(*args: Any) -> bool:
        results.append(method(*args))
        return results[-1]

    return call


class Form:
    """Forces the tokens of a text where it has even ones, up to the next odd one."""

    def __init__(self, seq: Sequence, text: list[int]) -> None:
        self.seq, self.text = seq, text

    def forced(self) -> list[int]:
        return [*takewhile(lambda token_id: token_id % 2 == 0, self.text[len(self.seq.token_ids) :])]


@pytest.mark.parametrize("num_rows", [1, 16])
def test_what_a_form_forces_is_proposed_and_believed(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, seqs = EngineMetrics(), sequences(num_rows)
    spec = Speculator(options_of("ngram", most=8), 8, True, stats)
    texts = []
    for seq in seqs:  # each odd token is followed by five even ones; none comes twice
        numbers = itertools.count(10**6 * (1 + seq.seq_id), 2)
        texts.append(seq.prompt_token_ids + [next(numbers) + (place % 6 == 0) for place in range(120)])
        seq.constraint = cast(Any, Form(seq, texts[-1]))
    assert run(spec, stats, seqs, texts, FakeTime(monkeypatch)) < 50
    assert spec._form_acceptance.probabilities(0, 1)[0] > 0.95


def test_a_text_is_repeated_behind_what_a_form_forces() -> None:
    [seq] = sequences(1)
    seq.token_ids.extend([1, 2, 3, 50, 51, 52, 53, 9, 1, 2, 3])
    seq.constraint = cast(Any, Form(seq, [*seq.token_ids, 60, 62]))
    spec = Speculator(options_of("suffix", most=4, suffix_decoding_max_spec_factor=2.0), 4, True, EngineMetrics())
    spec.propose([seq])
    assert spec._rows[seq].draft == [60, 62, 52, 53]
    seq.token_ids.extend([60, 62, 7])
    spec.propose([seq])
    spec._learn()
    assert spec._form_acceptance.probabilities(0, 1)[0] > FORM_PRIOR
    assert spec._text_acceptance.probabilities(5, 1)[0] < 0.5


def test_rows_with_a_users_function_never_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = EngineMetrics()
    seqs = [Sequence(0, [1, 2, 3, 4, 5] * 4, SamplingParams(logits_processors=[lambda _, logits: logits]))]
    spec = Speculator(options_of("suffix", most=8), 8, True, stats)
    assert run(spec, stats, seqs, [[1, 2, 3, 4, 5] * 8], FakeTime(monkeypatch)) >= 20


def test_sequences_that_have_finished_are_forgotten_and_their_answers_found() -> None:
    spec = Speculator(options_of("suffix", most=4), 4, True, EngineMetrics())
    [seq, other] = sequences(2)
    spec.propose([seq])
    seq.token_ids.extend([7, 8, 9, 10])
    seq.status = SequenceStatus.FINISHED
    spec.propose([other])
    assert seq not in spec._rows
    other.token_ids.extend([7, 8, 9])
    spec.propose([other])
    assert spec._rows[other].draft == [10]
