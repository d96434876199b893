"""Two replicas on a CPU, compared with one engine: the same answers by every call."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import (
    LLM,
    ConfigError,
    EngineStateError,
    ModelError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    tiny_model_path,
)
from nanoinfer.batch.batch_job import run_batch
from nanoinfer.engine.engine import ReservedIds
from nanoinfer.engine.request_queue import Inbox
from nanoinfer.flat_logprobs import FlatLogprobs
from nanoinfer.metrics import StepEvent
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput
from nanoinfer.replicas.replica_messages import Call
from nanoinfer.text.prompts import PreparedRequest
from tests.proposers import KnownTexts

PROMPTS = [f"{a}+{b}=?" for a in range(7) for b in range(2)]
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)


def favour_the_prompt_length(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[40 + len(token_ids)] += 100
    return logits


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", num_kvcache_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", num_kvcache_blocks=64, data_parallel_size=2) as llm:
        yield llm


@pytest.fixture(autouse=True)
def equal_numbers(one: LLM, two: LLM) -> Iterator[None]:
    """Seeds follow from the number of a request: both engines count on from the same one."""
    for llm in (one, two):
        assert llm.is_finished()
    one.engine.reserved_ids, two.engine.reserved_ids = ReservedIds(), ReservedIds()
    yield
    assert two.is_finished()


def rounded(value: Any) -> Any:
    """The same with logarithms to three places: sums over other batches round otherwise."""
    match value:
        case Logprob():
            return round(value.logprob, 3), value.rank, value.decoded_token
        case float():
            return round(value, 3)
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list() | FlatLogprobs():
            return [type(value).__name__, *map(rounded, value)]
    return value


def contents(outputs: list[RequestOutput]) -> list[Any]:
    """All that is said of requests, but for times."""
    return [
        (
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            rounded(output.prompt_logprobs and [*output.prompt_logprobs]),
            [[rounded(getattr(sample, name.name)) for name in fields(CompletionOutput)] for sample in output.outputs],
        )
        for output in outputs
    ]


MIXED = [
    SamplingParams(temperature=0.8, max_tokens=9),
    SamplingParams(temperature=0.8, max_tokens=5, n=3),
    SamplingParams(temperature=0.9, max_tokens=7, seed=5, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12, stop=["3", "5"]),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, logprobs=0, detokenize=False),
    SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}")),
    SamplingParams(max_tokens=4, allowed_token_ids=[15, 16]),
    SamplingParams(max_tokens=4, bad_words=["1"]),
    SamplingParams(max_tokens=4, logits_processors=[favour_the_prompt_length]),
    SamplingParams(max_tokens=None, temperature=0),
    SamplingParams(max_tokens=6, logit_bias={20: 5.0}, presence_penalty=1.0, min_tokens=4),
    SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1, flat_logprobs=True),
    SamplingParams(temperature=0, max_tokens=4, logprob_token_ids=[15, 16]),
]


def test_outputs_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    expected, found = (llm.generate(PROMPTS, MIXED, use_tqdm=False) for llm in (one, two))
    assert contents(found) == contents(expected)
    assert {output.outputs[0].finish_reason for output in found} == {"stop", "length"}
    for output in found:
        metrics = output.metrics
        assert metrics.queue_time is not None
        assert metrics.time_to_first_token is not None
        assert 0 <= metrics.queue_time <= metrics.time_to_first_token


def test_both_replicas_work_and_their_metrics_are_summed(two: LLM) -> None:
    before = two.get_metrics()
    two.generate(PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True), use_tqdm=False)
    after = two.get_metrics()
    generated = [
        now.num_generated_tokens - then.num_generated_tokens
        for now, then in zip(after.replicas, before.replicas, strict=True)
    ]
    assert generated == [70, 70]
    assert after.num_generated_tokens - before.num_generated_tokens == 140
    assert after.num_blocks == 128
    assert after.num_used_blocks == 0
    assert after.decode_seconds < sum(replica.decode_seconds for replica in after.replicas)


def test_streams_bring_the_same_texts_side_by_side(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=12, n=2, logprobs=1)
    streams = []
    for llm in (one, two):
        parts: dict[tuple[int, int, int], list[Any]] = {}
        for chunk in llm.stream(PROMPTS[:4], params):
            part = parts.setdefault((chunk.index, chunk.sample, chunk.request_id), ["", [], [], None])
            for place, new in enumerate((chunk.text, chunk.token_ids, [*map(rounded, chunk.logprobs or [])])):
                part[place] += new
            part[3] = chunk.finish_reason
        streams.append(parts)
    assert len(streams[0]) == 8
    assert streams[0] == streams[1]


def test_a_stream_that_is_left_frees_its_requests(two: LLM) -> None:
    for chunk in two.stream(PROMPTS[:2], LONG):
        assert chunk.token_ids
        break
    two.generate("1", SamplingParams(max_tokens=1), use_tqdm=False)
    two.sleep()  # which needs an idle engine
    two.wake_up()


def test_tasks_share_the_replicas(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)

    async def ask() -> list[Any]:
        calls = [two.agenerate(prompt, params) for prompt in PROMPTS[:5]]
        chunks = [chunk async for chunk in two.astream(PROMPTS[5], params)]
        return [[output.text for [output] in await asyncio.gather(*calls)], "".join(chunk.text for chunk in chunks)]

    texts = [output.text for output in one.generate(PROMPTS[:6], params, use_tqdm=False)]
    assert asyncio.run(ask()) == [texts[:5], texts[5]]


def test_scores_chats_and_steps_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    chat = [{"role": "user", "content": "12+34=?"}]
    found = []
    for llm in (one, two):
        ids = [llm.add_request(prompt, params) for prompt in PROMPTS[:3]]
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        steps = {output.request_id: output.text for output in outputs}
        scores = llm.score(PROMPTS[:4], ["7", "8", "9", "10"], use_tqdm=False)
        numbers = [(one.token_ids, rounded(one.logprobs), rounded(one.total), one.is_greedy) for one in scores]
        found.append((llm.chat(chat, params, use_tqdm=False)[0].text, ids, steps, numbers))
    assert found[0] == found[1]


def test_what_cannot_be_served_is_refused_or_returned_in_its_place(two: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        two.generate(["1", []], use_tqdm=False)
    first, second = two.generate(["1", []], SamplingParams(max_tokens=2), use_tqdm=False, on_error="return")
    assert (first.finish_reason, second.finish_reason, second.request_id) == ("length", "error", 1)
    for outputs in (
        two.score(["1", ""], ["7", "8"], use_tqdm=False, on_error="return"),
        two.embed(["1", ""], use_tqdm=False, on_error="return"),
    ):
        assert [output.error_kind for output in outputs] == [None, "empty_prompt"]
    with pytest.raises(RequestError, match="regex"):
        two.generate("1", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[")), use_tqdm=False)


def test_a_function_that_does_not_pickle_is_refused_by_name(two: LLM) -> None:
    def inner(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    with pytest.raises(RequestError, match=r"logits_processors has <function .*inner.*top of a module"):
        two.generate("1", SamplingParams(logits_processors=[inner]), use_tqdm=False)


class ReadNowhere:
    """Can be pickled, and not read again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits


class HeldNowhere(float):
    """Likewise: a temperature."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    "option", [{"logits_processors": [ReadNowhere()]}, {"temperature": HeldNowhere(0.5)}], ids=["function", "number"]
)
def test_what_no_replica_can_read_ends_its_request_with_an_error(two: LLM, option: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=2, n=3, **option), SamplingParams(max_tokens=2)]
    first, second = two.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [sample.finish_reason for sample in first.outputs] == ["error"] * 3
    assert "sampling_params cannot be read by a replica (ValueError" in str(first.error)
    assert second.finish_reason == "length"


def test_a_stream_of_what_no_replica_can_read_ends_with_an_error(two: LLM, caplog: pytest.LogCaptureFixture) -> None:
    chunks = [*two.stream(PROMPTS[0], SamplingParams(n=2, logits_processors=[ReadNowhere()]))]
    assert [(chunk.index, chunk.sample, chunk.finish_reason) for chunk in chunks] == [(0, 0, "error"), (0, 1, "error")]
    assert "request 0 ends in an error: sampling_params cannot be read by a replica (ValueError" in caplog.text


def test_aborted_requests_end_as_they_are_wherever_they_are(two: LLM) -> None:
    ids = [two.add_request(prompt, LONG) for prompt in PROMPTS[:4]]
    two.abort(ids[:1])  # waits in the parent
    outputs = two.step()
    two.abort(ids[1:])
    while not two.is_finished():
        outputs += two.step()
    assert {output.request_id: output.finish_reason for output in outputs} == dict.fromkeys(ids, "abort")
    assert min(outputs, key=lambda output: output.request_id).token_ids == []


def test_paused_requests_wait_and_get_the_tokens_that_they_would_have_got(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    expected = [output.token_ids for output in one.generate(PROMPTS[:3], params, use_tqdm=False)]
    ids = [two.add_request(prompt, params) for prompt in PROMPTS[:3]]
    two.pause(ids[0])  # before a replica has it
    two.step()
    two.pause(ids[1])
    found: dict[int, list[int]] = {}
    while ids[2] not in found:
        found |= {output.request_id: output.token_ids for output in two.step()}
    assert set(found) == {ids[2]}
    two.resume(ids)
    while not two.is_finished():
        found |= {output.request_id: output.token_ids for output in two.step()}
    assert [found[request_id] for request_id in ids] == expected


def test_calls_of_several_threads_are_served_together(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    texts: dict[int, str] = {}

    def ask(index: int) -> None:
        texts[index] = two.generate(PROMPTS[index], params, use_tqdm=False)[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [output.text for output in one.generate(PROMPTS[:4], params, use_tqdm=False)]
    assert [texts[index] for index in range(4)] == expected


def test_steps_of_all_replicas_have_events_while_somebody_listens(two: LLM) -> None:
    events: list[StepEvent] = []
    end = two.on_step(events.append)
    two.generate(PROMPTS[:4], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    end()
    assert {event.replica for event in events} == {0, 1}
    for replica in (0, 1):
        counts = [event.num_decode_tokens for event in events if event.replica == replica]
        assert counts == [0, 2, 2]
    num_seen = len(events)
    two.generate("1", SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(events) == num_seen


def test_a_job_in_a_file_gets_the_answers_of_one_engine(one: LLM, two: LLM, tmp_path: Any) -> None:
    lines = [f'{{"prompt": "{prompt}", "max_tokens": 6, "temperature": 0.7}}' for prompt in PROMPTS]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    found = []
    for name, llm in (("one", one), ("two", two)):

        class Kept:  # the job would close it
            def __enter__(self, llm: LLM = llm) -> LLM:
                return llm

            def __exit__(self, *_: object) -> None:
                pass

        path = tmp_path / f"{name}.jsonl"
        summary = run_batch(Kept, tmp_path / "in.jsonl", path, use_tqdm=False)  # type: ignore[arg-type]
        assert (summary.num_done, summary.num_errors) == (14, 0)
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.append(
            {
                record["custom_id"]: record["response"]["body"]["choices"][0]["text"]
                for record in records
                if "custom_id" in record
            }
        )
    assert len(found[0]) == 14
    assert found[0] == found[1]


def test_new_weights_reach_all_replicas_and_the_iterator_is_read_once(one: LLM, two: LLM) -> None:
    name, greedy = "model.norm.weight", SamplingParams(temperature=0, max_tokens=4)
    kept = load_file(tiny_model_path() / "model.safetensors")[name]
    before = two.generate(PROMPTS, greedy, use_tqdm=False)
    two.update_weights({name: torch.zeros_like(kept)})
    outputs = two.generate(PROMPTS, greedy, use_tqdm=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 1, "all logits are 0"
    read = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        read.append(name)
        yield name, kept

    two.update_weights(pairs())
    assert read == [name]
    after = two.generate(PROMPTS, greedy, use_tqdm=False)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]


def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(two: LLM) -> None:
    norm = load_file(tiny_model_path() / "model.safetensors")["model.norm.weight"]
    with pytest.raises(ModelError, match=r"'model.norms' cannot be updated.*close ones are"):
        two.update_weights({"model.norm.weight": torch.zeros_like(norm), "model.norms": norm})
    for second in (("model.norms", norm), ("model.norm.weight", "text"), "no pair"):
        with pytest.raises(ModelError, match="the 1 before it were copied, and stay"):
            two.update_weights(iter([("model.norm.weight", norm), second]))  # type: ignore[list-item]

    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", norm
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        two.update_weights(fail())
    assert two.generate("1+1=?", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].text


def test_a_tensor_larger_than_the_ring_is_read_while_it_is_written(two: LLM) -> None:
    large = torch.zeros(5 * 2**20)  # 20 MiB
    with pytest.raises(ModelError, match=r"model.norm.weight.*has shape \(5242880,\)"):
        two.update_weights(iter([("model.norm.weight", large)]))


@pytest.mark.parametrize("then", ["generate", "sleep"])
def test_ctrl_c_while_a_tensor_is_sent_ends_the_update_of_all_replicas(
    two: LLM, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    weights = load_file(tiny_model_path() / "model.safetensors")
    send = two._control._send

    def interrupted(*arguments: Any) -> list[Exception]:
        errors = send(*arguments)
        signal.raise_signal(signal.SIGINT)
        return errors

    monkeypatch.setattr(two._control, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two.update_weights(iter(weights.items()))
    if then == "sleep":
        two.sleep()
        with pytest.raises(EngineStateError, match="sleeps"):
            two.generate("1", use_tqdm=False)
        two.wake_up()
    assert two.generate("1+1=?", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].text


def test_a_stream_that_is_begun_before_the_replicas_sleep_ends_and_they_wake_up(two: LLM) -> None:
    chunks = two.stream("1", SamplingParams(max_tokens=4))  # checked, and queued when the first chunk is asked for
    two.sleep()
    with pytest.raises(EngineStateError, match="sleeps"):
        next(chunks)
    two.wake_up()
    assert two.generate("1+1=?", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].text


def test_sleeping_replicas_refuse_requests_until_they_wake_up(two: LLM) -> None:
    two.sleep(level=2)
    with pytest.raises(EngineStateError, match="sleeps"):
        two.generate("1", use_tqdm=False)
    two.wake_up()
    with pytest.raises(EngineStateError, match="lacks weights"):
        two.generate("1", use_tqdm=False)
    two.update_weights(load_file(tiny_model_path() / "model.safetensors"))
    assert two.generate("1+1=?", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].text
    request_id = two.add_request("1", LONG)
    with pytest.raises(EngineStateError, match="sleep while 1 requests are unfinished"):
        two.sleep()
    two.abort(request_id)
    two.sleep()
    assert [output.finish_reason for output in two.step()] == ["abort"]
    two.wake_up()


@pytest.mark.parametrize(
    "tags", [[lambda: None], [], "weights", ["scheduling"]], ids=["no text", "none", "text", "other"]
)
def test_wrong_tags_are_refused_before_they_are_sent(two: LLM, tags: Any) -> None:
    with pytest.raises(ConfigError, match=r"^tag"):
        two.wake_up(tags)
    two.wake_up()


def test_weights_that_only_some_replicas_can_take_leave_none_waiting_for_them(two: LLM) -> None:
    """As where one of them has found too little memory to wake up."""
    first = two.engine.replicas[0]
    first.send(Call("sleep", (1,)))
    while not first.replies:
        two.engine.receive(0.01)
    first.replies.clear()
    with pytest.raises(EngineStateError, match="this engine sleeps; call wake_up"):
        two.update_weights(load_file(tiny_model_path() / "model.safetensors").items())
    two.sleep()
    assert all(replica.unready_reason for replica in two.engine.replicas)
    two.wake_up()
    assert two.generate("1+1=?", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].text


def test_a_cache_that_is_reset_is_empty_on_all_replicas(two: LLM) -> None:
    prompt = [*range(100, 400)]
    two.reset_prefix_cache()
    counts = []
    for _ in range(2):
        outputs = two.generate([prompt] * 4, SamplingParams(max_tokens=1), use_tqdm=False)
        counts.append(sum(output.num_cached_tokens for output in outputs))
    assert counts[1] > counts[0]
    two.reset_prefix_cache()
    outputs = two.generate([prompt] * 4, SamplingParams(max_tokens=1), use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) == counts[0]


def test_the_stream_of_a_request_that_is_refused_ends_as_that_of_one_engine(one: LLM, two: LLM) -> None:
    refused = {"prompt": "?", "token_ids": [], "sampling_params": SamplingParams(n=2), "error": RequestError("no")}
    for llm in (one, two):
        inbox = Inbox(is_stream=True)
        llm.queue.add_requests([PreparedRequest(**refused)], inbox)
        assert [(chunk.sample, chunk.finish_reason) for chunk in inbox.chunks] == [(0, "error"), (1, "error")]
        assert [sample.error for sample in inbox.outputs[0].outputs] == ["no", "no"]


def test_a_proposer_is_refused_because_it_would_see_no_sequence(two: LLM) -> None:
    with pytest.raises(
        ConfigError, match=r"data_parallel_size=2 .*KnownTexts sees no sequence; use data_parallel_size=1"
    ):
        two.engine.proposer = KnownTexts([], vocab_size=2)
    two.engine.proposer = None
    assert two.engine.proposer is None
