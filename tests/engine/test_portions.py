"""Calls whose prompts are prepared a portion at a time: they begin early, and give what they gave at once."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nanoinfer import LLM, EngineStateError, RequestError, SamplingParams, tiny_model_path
from nanoinfer.engine.preparer import Portions
from nanoinfer.sampling_params import SamplingParams as Params
from nanoinfer.text.arguments import Errors
from nanoinfer.text.prompts import PreparedRequest

PROMPTS = [f"{number} + {number} =" for number in range(11)]
DRAWN = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
LONG = [5] * 300  # longer than the model takes


@pytest.fixture(scope="module")
def loaded() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_model_len=256, max_num_seqs=4) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """One whose portions have three requests."""
    monkeypatch.setattr(loaded.preparer, "portion_size", 3)
    return loaded


def requests_of(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
    """A request for each index, whose prompt says it; 7 and 9 cannot be served."""
    errors |= {index: RequestError(f"prompt {index} is wrong") for index in indices if index in (7, 9)}
    return [PreparedRequest(prompt=str(i), token_ids=[i], sampling_params=Params()) for i in indices]


def taken(portions: Portions) -> list[list[str | None]]:
    found = []
    with portions:
        while requests := portions.take(wait=True):
            found.append([request.prompt for request in requests])
    return found


def test_portions_come_in_order_and_the_last_may_be_short() -> None:
    assert taken(Portions(requests_of, range(5), size=2)) == [["0", "1"], ["2", "3"], ["4"]]
    assert taken(Portions(requests_of, [4, 1, 3], size=2)) == [["4", "1"], ["3"]]
    assert taken(Portions(requests_of, [], size=2)) == []
    assert taken(Portions.of(requests_of([1, 2], {}))) == [["1", "2"]]


def test_later_portions_grow_up_to_the_size_and_without_one_there_is_a_single_portion() -> None:
    def lengths(count: int, size: int | None) -> list[int]:
        return [len(portion) for portion in taken(Portions(requests_of, range(1000, 1000 + count), size=size))]

    assert lengths(2048, size=512) == [256, 256, 256, 384, 512, 384]
    assert lengths(700, size=256) == [256, 256, 188]
    assert lengths(700, size=None) == [700]


def test_a_portion_that_is_not_ready_is_not_waited_for_unless_that_is_asked() -> None:
    may_go_on = threading.Event()

    def slowly(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
        assert indices[0] == 0 or may_go_on.wait(20)
        return requests_of(indices, errors)

    with Portions(slowly, range(4), size=2) as portions:
        assert [request.prompt for request in portions.take()] == ["0", "1"]
        assert portions.take() == []
        may_go_on.set()
        assert [request.prompt for request in portions.take(wait=True)] == ["2", "3"]
        assert portions.take(wait=True) == []


def test_an_error_names_every_prompt_that_is_wrong_also_those_of_later_portions() -> None:
    with Portions(requests_of, range(12), size=2) as portions:
        for _ in range(3):
            portions.take(wait=True)
        with pytest.raises(RequestError, match="2 of 12 prompts cannot be served") as raised:
            portions.take(wait=True)
    assert "prompt 7 is wrong\n  prompt 9 is wrong" in str(raised.value)
    with pytest.raises(RequestError, match=r"^prompt 7 is wrong$"):
        Portions(requests_of, [7])


def test_prompts_that_are_wrong_may_come_back_with_their_error() -> None:
    with Portions(requests_of, range(10), size=4, on_error="return") as portions:
        found = [portions.take(wait=True) for _ in range(3)]
    assert [request.error is not None for portion in found for request in portion] == [i in (7, 9) for i in range(10)]


def test_portions_give_the_tokens_and_the_order_of_prompts_that_are_prepared_at_once(loaded: LLM) -> None:
    expected, found = [], []
    for size in (256, 3):
        with LLM(tiny_model_path(), device="cpu", max_model_len=256, max_num_seqs=4) as llm:
            llm.preparer.portion_size = size
            (found if size == 3 else expected).extend(llm.generate(PROMPTS, DRAWN, use_tqdm=False))
    assert [output.prompt for output in found] == PROMPTS
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.request_id for output in found] == [*range(11)]


def test_steps_run_before_the_last_prompts_are_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    has_finished, original = threading.Event(), llm.preparer.prompt_processor.prepare

    def wait_for_a_step(prompts: dict[int, Any], *arguments: Any) -> Any:
        assert 9 not in prompts or has_finished.wait(20), "no step has run before the last portion is prepared"
        return original(prompts, *arguments)

    callback = llm.on_step(lambda event: has_finished.set())
    monkeypatch.setattr(llm.preparer.prompt_processor, "prepare", wait_for_a_step)
    assert len(llm.generate(PROMPTS, DRAWN, use_tqdm=False)) == 11
    callback()


def test_a_prompt_of_a_later_portion_that_cannot_be_served_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompt 10 has 300 tokens") as raised:
        llm.generate([*PROMPTS[:10], LONG], DRAWN, use_tqdm=False)
    assert "shorten it" in str(raised.value)
    assert llm.is_finished()
    outputs = llm.generate([*PROMPTS[:10], LONG], DRAWN, use_tqdm=False, on_error="return")
    assert [output.finish_reason == "error" for output in outputs] == [False] * 10 + [True]


def test_all_prompts_are_checked_first_where_outputs_are_handed_over_as_they_finish(llm: LLM) -> None:
    seen: list[Any] = []
    for options in ({"on_finish": seen.append}, {"priority": [0] * 11}):
        before = llm.get_metrics().num_prompt_tokens
        with pytest.raises(RequestError, match=r"^prompt 10 has 300 tokens"):
            llm.generate([*PROMPTS[:10], LONG], DRAWN, use_tqdm=False, **options)  # type: ignore[arg-type]
        assert llm.get_metrics().num_prompt_tokens == before
    assert seen == []


def test_chats_and_scores_come_in_portions_too(llm: LLM) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=3)
    alone = [llm.chat(chat, params, use_tqdm=False)[0].token_ids for chat in chats]
    assert [output.token_ids for output in llm.chat(chats, params, use_tqdm=False)] == alone
    with pytest.raises(RequestError, match=r"2 of 5 prompts cannot be served(.|\n)*conversation 3 is (.|\n)*on 4 is"):
        llm.chat([*chats[:3], [], []], params, use_tqdm=False)
    answers = [str(2 * number) for number in range(11)]
    found = llm.score(PROMPTS, answers, use_tqdm=False)
    each = [llm.score(prompt, answer, use_tqdm=False)[0] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert [score.token_ids for score in found] == [score.token_ids for score in each]
    assert [sum(score.logprobs) for score in found] == pytest.approx([sum(score.logprobs) for score in each], abs=1e-4)
    assert llm.score(PROMPTS[0], answers[:3], use_tqdm=False) == llm.score(PROMPTS[:1] * 3, answers[:3], use_tqdm=False)
    assert len(llm.score([5, 6], [[7], [8, 9]], use_tqdm=False)) == 2
    for prompts, completions in (PROMPTS[:2], answers[:3]), (PROMPTS[:3], answers[:1]), (PROMPTS[0], []):
        with pytest.raises(RequestError, match="give one for each, or one prompt for all"):
            llm.score(prompts, completions, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^completion 10 is empty"):
        llm.score(PROMPTS, [*answers[:10], []], use_tqdm=False)


def test_embeddings_come_in_the_order_of_the_texts_though_the_longest_are_read_first(llm: LLM) -> None:
    texts = ["1 + 1 " * (1 + number * 5 % 11) for number in range(11)]
    found = llm.embed(texts, use_tqdm=False)
    assert [output.prompt for output in found] == texts
    for output, text in zip(found, texts, strict=True):
        assert output.embedding == pytest.approx(llm.embed(text, use_tqdm=False)[0].embedding, abs=1e-4)
    with pytest.raises(RequestError, match="2 of 11 prompts cannot be served; mend them, or let a call") as raised:
        llm.embed([*texts[:9], LONG, []], use_tqdm=False)
    assert "prompt 9 has 300 tokens" in str(raised.value)
    assert "prompt 10 is empty" in str(raised.value)
    with pytest.raises(RequestError, match=r"^prompt 1 is a int"):
        llm.embed([[1], 5], use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 3})  # type: ignore[list-item]


def test_ids_of_a_call_follow_each_other_while_another_thread_queues_its_own(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[int] = []
    original = llm.preparer.prompt_processor.prepare

    def add_between(prompts: dict[int, Any], *arguments: Any) -> Any:
        if 3 in prompts and threading.current_thread() is not threading.main_thread():
            others.append(llm.add_request("1 + 1 =", SamplingParams(max_tokens=1)))
        return original(prompts, *arguments)

    monkeypatch.setattr(llm.preparer.prompt_processor, "prepare", add_between)
    ids = [output.request_id for output in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]
    assert ids == [*range(ids[0], ids[0] + 11)]
    while not llm.is_finished():
        llm.step()
    assert len(others) == 1
    assert others[0] not in ids


@pytest.fixture
def paused_portions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events: that the second portion is about to be prepared, and that it may be."""
    is_there, may_go_on, original = threading.Event(), threading.Event(), llm.preparer.prompt_processor.prepare

    def wait(prompts: dict[int, Any], *arguments: Any) -> Any:
        if 3 in prompts:
            is_there.set()
            assert may_go_on.wait(20)
        return original(prompts, *arguments)

    monkeypatch.setattr(llm.preparer.prompt_processor, "prepare", wait)
    yield is_there, may_go_on
    may_go_on.set()


def in_a_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_a_call_is_unfinished_while_its_next_portion_is_prepared(
    llm: LLM, paused_portions: tuple[threading.Event, threading.Event]
) -> None:
    is_there, may_go_on = paused_portions
    first = llm.get_metrics().num_generated_tokens
    thread, results = in_a_thread(lambda: llm.generate(PROMPTS[:6], DRAWN, use_tqdm=False))
    assert is_there.wait(20)
    scheduler = llm.engine.scheduler
    while scheduler.running or scheduler.num_waiting or llm.get_metrics().num_generated_tokens == first:
        time.sleep(0.001)  # until the first portion is done
    assert not llm.is_finished()
    with pytest.raises(EngineStateError, match="update_weights while 3 requests are unfinished"):
        llm.update_weights({})
    may_go_on.set()
    thread.join(20)
    assert [output.finish_reason for output in results[0]] == ["length"] * 6
    assert llm.is_finished()
    llm.update_weights({})


def test_what_is_aborted_before_it_is_queued_ends_then(
    llm: LLM, paused_portions: tuple[threading.Event, threading.Event]
) -> None:
    is_there, may_go_on = paused_portions
    last = llm.generate("1", SamplingParams(max_tokens=1), use_tqdm=False)[0].request_id
    thread, results = in_a_thread(lambda: llm.generate(PROMPTS[:6], DRAWN, use_tqdm=False))
    assert is_there.wait(20)
    llm.abort([last + 5, last + 6])
    may_go_on.set()
    thread.join(20)
    assert [output.finish_reason for output in results[0]] == ["length"] * 4 + ["abort"] * 2


def test_a_call_that_ends_early_waits_for_no_more_than_the_portion_that_is_being_prepared() -> None:
    is_there, may_go_on, prepared = threading.Event(), threading.Event(), list[int]()

    def slowly(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
        if indices[0] == 7:  # which is wrong, so that all others would be looked at
            is_there.set()
            assert may_go_on.wait(20)
        prepared.append(indices[0])
        return requests_of(indices, errors)

    with Portions(slowly, [1, *range(7, 1000)], size=1) as portions:
        portions.take()
        assert is_there.wait(20)
        threading.Timer(0.2, may_go_on.set).start()
    assert prepared == [1, 7]


@pytest.mark.parametrize("size", [3, 256])
def test_options_that_cannot_be_served_are_said_once_or_with_their_prompts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(llm.preparer, "portion_size", size)
    wrong = SamplingParams(max_tokens=2, logit_bias={10**6: 1.0})
    with pytest.raises(RequestError, match=r"^logit_bias") as raised:
        llm.generate(PROMPTS, wrong, use_tqdm=False)
    assert "\n" not in str(raised.value)
    with pytest.raises(RequestError, match="3 of 11 prompts cannot be served") as raised:
        llm.generate(PROMPTS, [*[DRAWN] * 3, *[wrong] * 3, *[DRAWN] * 5], use_tqdm=False)
    assert "\n  prompt 3: logit_bias" in str(raised.value)
