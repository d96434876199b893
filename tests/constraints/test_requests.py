"""Requests with constraints of every kind, through `LLM`: the same tokens in all the ways that a request can go."""

import builtins
import json
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from nanoinfer import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams, tiny_model_path

pytest.importorskip("llguidance")

EOS = 1017  # <|im_end|>
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
LIST = r"[a-z]{2,8}( [0-9]{1,3}){1,9}"
GBNF = 'root ::= item ("+" item)*\nitem ::= [1-9] [0-9]? | "(" root ")"'
TAG = {"structures": [{"begin": "8", "schema": {"enum": [1, 20]}, "end": "!"}], "triggers": ["8"]}


def halve_repeats(token_ids: list[int], logits: Tensor) -> Tensor:
    logits[token_ids] -= 3.0 + len(token_ids) / 8
    return logits


def prefer_digits(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits.index_add(0, logits.new_tensor([*range(15, 25)]).long(), logits.new_full((10,), 2.0))


def form(**options: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**options)}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "json": form(json=SCHEMA, disable_any_whitespace=True),
    "json object": form(json_object=True, whitespace_pattern=" ?"),
    "regex": form(regex=LIST),
    "choice": form(choice=["What is 8", "8, 80", "never mind", "9"]),
    "grammar": form(grammar=GBNF),
    "structural tag": form(structural_tag=TAG),
    "bias": {"logit_bias": {220: -4.0, 23: 1.5, 300: 2.0}},
    "allowed ids": {"allowed_token_ids": [*range(10, 60), *range(220, 400, 3)]},
    "bad words": {"bad_words": ["8", "3, 3", "eagle", "88"]},
    "function": {"logits_processors": [halve_repeats]},
    "form and sets": {
        **form(regex=LIST),
        "logprobs": 2,
        "bad_words": ["8", "1 2"],
        "allowed_token_ids": [*range(300), *range(600, 900)],
    },
    "all together": {
        **form(regex=r"[a-zA-Z0-9 ,.]*"),
        "logit_bias": {220: 1.0},
        "bad_words": ["8", "velvet"],
        "logits_processors": [halve_repeats, prefer_digits],
        "presence_penalty": 0.5,
        "min_tokens": 9,
        "top_p": 0.95,
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=1.2, max_tokens=16, seed=7)
PARAMS = [replace(how, **options) for how in (GREEDY, SEEDED) for options in KINDS.values()]
PROMPTS = [f"{prompt} {number}, " for number, prompt in enumerate(["Sort 3, 1, 2:", "What is", "Spell eagle"] * 9)]
PROMPTS = PROMPTS[: len(PARAMS)]


def load(**options: Any) -> LLM:
    return LLM(tiny_model_path(), **{"device": "cpu", "kvcache_block_size": 16, "max_model_len": 256, **options})


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with load(num_kvcache_blocks=512) as llm:
        yield llm


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str, Any]]:
    return [
        (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason)
        for output in outputs
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def alone(shared: LLM) -> list[tuple[list[int], str, str, Any]]:
    """What each of PARAMS says to its prompt when nothing else runs."""
    outputs = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        shared.reset_prefix_cache()
        outputs += shared.generate(prompt, params, use_tqdm=False)
    return said(outputs)


# --- the same tokens in all ways ---


def test_each_kind_changes_what_is_said_and_is_obeyed(alone: list[Any]) -> None:
    for how in (0, len(KINDS)):
        texts = {kind: alone[how + index] for index, kind in enumerate(KINDS)}
        for kind, pattern in (("regex", LIST), ("form and sets", LIST), ("choice", "What is 8|8, 80|never mind|9")):
            _, text, reason, _ = texts[kind]
            assert re.fullmatch(pattern, text) if reason == "stop" else text
        assert "8" not in texts["bad words"][1].split()
        assert {*texts["allowed ids"][0]} <= {*KINDS["allowed ids"]["allowed_token_ids"]}
        assert re.fullmatch(r"[a-zA-Z0-9 ,.]*", texts["all together"][1])
        if texts["json"][2] == "stop":
            assert [*json.loads(texts["json"][1])] == ["name", "size", "tags"]
    reasons = [reason for _, _, reason, _ in alone]
    assert {*reasons} == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 5},
        {"num_kvcache_blocks": 20, "max_model_len": 100},
        {"num_kvcache_blocks": 20, "max_model_len": 100, "overlap": False},
        pytest.param(
            {"tensor_parallel_size": 2},
            marks=pytest.mark.skipif(sys.platform != "linux", reason="two ranks need Linux"),
        ),
    ],
    ids=str,
)
def test_all_kinds_in_one_batch_say_what_each_says_alone(alone: list[Any], options: dict[str, Any]) -> None:
    with load(**{"num_kvcache_blocks": 512, **options}) as llm:
        if "max_model_len" in options:
            llm.engine.scheduler.reserved_tokens = 0  # so that blocks do run short
        assert said(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
        assert said(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone, "with a warm prefix cache, if there is one"
        assert (llm.get_metrics().num_preemptions > 0) == ("max_model_len" in options)


def test_plain_requests_get_the_same_tokens_and_logprobs_beside_constrained_ones(llm: LLM) -> None:
    plain = [replace(params, logprobs=logprobs) for params in (GREEDY, SEEDED) for logprobs in (None, 2)] * 3
    constrained = [replace(SEEDED, **options) for kind, options in KINDS.items() if kind != "plain"]
    # As many rows in both, since the order in which a step sums up depends on their number.
    prompts, others = ["What is 3, "] * len(plain), ["Sort 1"] * len(constrained)
    fill = [replace(SEEDED, ignore_eos=True)] * len(constrained)
    without = llm.generate([*prompts, *others], [*plain, *fill], use_tqdm=False)[: len(plain)]
    llm.reset_prefix_cache()
    beside = llm.generate([*prompts, *others], [*plain, *constrained], use_tqdm=False)[: len(plain)]
    assert said(beside) == said(without)
    for mine, theirs in zip(beside, without, strict=True):
        for place, expected in zip(mine.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            assert [*place] == [*expected]
            assert [entry.logprob for entry in place.values()] == pytest.approx(
                [entry.logprob for entry in expected.values()], abs=1e-4
            )


def test_streams_say_what_generate_says(llm: LLM, alone: list[Any]) -> None:
    texts, token_ids, reasons = [""] * len(PARAMS), [[] for _ in PARAMS], [""] * len(PARAMS)
    for chunk in llm.stream(PROMPTS, PARAMS):
        texts[chunk.index] += chunk.text
        token_ids[chunk.index] += chunk.token_ids
        reasons[chunk.index] = chunk.finish_reason or ""
    assert [*zip(token_ids, texts, reasons, strict=True)] == [one[:3] for one in alone]


def test_requests_that_come_one_by_one_say_what_each_says_alone(llm: LLM, alone: list[Any]) -> None:
    """Rows are taken over, in any order, from requests of other kinds."""
    for seed in range(4):
        rng = random.Random(seed)
        order = rng.sample(range(len(PARAMS)), len(PARAMS))
        found: dict[int, Any] = {}
        ids: dict[int, int] = {}
        for index in [*order, None]:
            if index is not None:
                ids[llm.add_request(PROMPTS[index], PARAMS[index])] = index
            for _ in range(1000 if index is None else rng.randint(0, 3)):
                if not llm.is_finished():
                    found |= {ids[output.request_id]: said([output])[0] for output in llm.step()}
        assert [found[index] for index in range(len(PARAMS))] == alone


def test_calls_from_several_threads_say_what_one_call_says(llm: LLM, alone: list[Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, PROMPTS[start::4], PARAMS[start::4], use_tqdm=False) for start in range(4)]
        for start, call in enumerate(calls):
            assert said(call.result(60)) == alone[start::4]


def test_chat_answers_in_the_form(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 312 + 48?"}]
    chosen, formed = llm.chat(
        [question] * 2,
        [
            replace(GREEDY, **form(choice=["359", "360", "361"])),
            replace(GREEDY, **form(regex=r"\d+ \+ \d+ = (36|35)\d")),
        ],
        use_tqdm=False,
    )
    assert (formed.text, formed.finish_reason, formed.outputs[0].stop_reason) == ("312 + 48 = 360", "stop", None)
    assert (chosen.text in ("359", "360", "361"), chosen.finish_reason) == (True, "stop")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_each_of_n_samples_is_the_one_that_its_seed_gives_alone(llm: LLM, kind: str) -> None:
    params = replace(SEEDED, n=3, **KINDS[kind])
    [output] = llm.generate("Spell", params, use_tqdm=False)
    [beside, _] = llm.generate(["Spell", "What"], [params, GREEDY], use_tqdm=False)
    assert said([beside]) == said([output])
    [one] = llm.generate("Spell", replace(params, n=1), use_tqdm=False)
    assert said([one]) == said([output])[:1]
    assert kind in ("choice", "grammar") or len({*map(str, said([output]))}) > 1


# --- how it ends ---


def test_a_stop_string_cuts_a_form_as_ever(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=60, ignore_eos=True, stop=["5", ", 1"], **form(regex=r"(\d,? ){40}"))
    [output] = llm.generate("1, 2, 3,", params, use_tqdm=False)
    [whole] = llm.generate("1, 2, 3,", replace(params, stop=None), use_tqdm=False)
    assert ", 1" in whole.text
    assert output.text == whole.text.split(", 1")[0]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", ", 1")
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 60)


def test_a_stop_id_that_is_text_ends_a_form_only_where_it_may_end(llm: LLM) -> None:
    digit = llm.encode("7")[0]
    params = replace(SEEDED, n=20, stop_token_ids=[digit], **form(regex=r"[67]{3}(x|y)?"))
    [output] = llm.generate("Sort", params, use_tqdm=False)
    for sample in output.outputs:
        assert re.fullmatch(r"6{3}[xy]?", sample.text), "a stop token is no text"
        assert sample.finish_reason == "stop"
        assert sample.stop_reason in (digit, None)
    assert digit in {sample.stop_reason for sample in output.outputs}


def test_a_complete_form_ends_over_min_tokens_and_ignore_eos(llm: LLM) -> None:
    for more in ({"min_tokens": 12}, {"ignore_eos": True}, {"min_tokens": 12, "ignore_eos": True}):
        [output] = llm.generate("Spell", replace(GREEDY, **more, **form(choice=["8, 80"])), use_tqdm=False)
        assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("8, 80", "stop", None)
        # Here nothing but a stop token is left after two digits.
        digits = {"allowed_token_ids": llm.encode("3")}
        [output] = llm.generate("Spell", replace(GREEDY, **more, **digits, **form(regex="3{2}(a*|b)")), use_tqdm=False)
        assert (output.text, output.finish_reason) == ("33", "stop"), more


@pytest.mark.parametrize("kind", ["regex", "allowed ids", "function", "bad words", "all together"])
def test_min_tokens_and_ignore_eos_hold_stop_tokens_back(llm: LLM, kind: str) -> None:
    options = {**KINDS[kind], **(form(regex="[a-z ]*") if "structured_outputs" in KINDS[kind] else {})}
    eager = {"logit_bias": {EOS: 30.0}, "n": 4}
    if kind == "allowed ids":
        options = {"allowed_token_ids": [*range(50), EOS]}
    for more, expected in (({}, [1]), ({"min_tokens": 5}, [6]), ({"min_tokens": 5, "ignore_eos": True}, [16])):
        [output] = llm.generate(
            "Sort 3", replace(SEEDED, **{**options, "min_tokens": 0, **eager, **more}), use_tqdm=False
        )
        assert {len(sample.token_ids) for sample in output.outputs} == {*expected}, more


def test_an_answer_that_is_cut_says_length(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=5, **form(json=SCHEMA))
    [output] = llm.generate("Sort 3", params, use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason, output.outputs[0].stop_reason) == (5, "length", None)
    [output] = llm.generate([1] * 250, replace(params, max_tokens=None), use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (6, "length"), "cut by max_model_len"
    [output] = llm.generate("Sort 3", replace(params, max_tokens=2, **form(regex="[0-9]{2}")), use_tqdm=False)
    assert (len(output.token_ids), output.finish_reason) == (2, "stop"), "complete with the last token that may come"


def numbers(prompt_logprobs: Any) -> dict[tuple[int, int], float]:
    """The log-probabilities of a prompt by place and token; sums of floats depend on the batch that they are in."""
    places = enumerate(prompt_logprobs)
    return {(place, its_id): entry.logprob for place, found in places for its_id, entry in (found or {}).items()}


def test_the_logprobs_of_a_form_are_the_models_own_and_processed_ones_those_under_its_mask(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=-1, prompt_logprobs=1, **form(regex="[ab]{4}"))
    plain = replace(GREEDY, max_tokens=1, logprobs=-1, prompt_logprobs=1)
    output, expected = llm.generate(["Sort 3, 1, 2"] * 2, [params, plain], use_tqdm=False)
    assert numbers(output.prompt_logprobs) == pytest.approx(numbers(expected.prompt_logprobs), abs=1e-4), "has no form"
    found, its_own = ((some.outputs[0].logprobs or [])[0] for some in (output, expected))
    assert {its_id: entry.logprob for its_id, entry in found.items()} == pytest.approx(
        {its_id: entry.logprob for its_id, entry in its_own.items()}, abs=1e-4
    )
    unlike = {"device": "cpu", "kvcache_block_size": 16, "max_model_len": 256, "logprobs_mode": "processed_logprobs"}
    with LLM(tiny_model_path(), **unlike) as processed:
        [under_mask] = processed.generate("Sort 3, 1, 2", params, use_tqdm=False)
    assert under_mask.token_ids == output.token_ids
    assert numbers(under_mask.prompt_logprobs) == pytest.approx(numbers(output.prompt_logprobs), abs=1e-4)
    for place in under_mask.outputs[0].logprobs or []:
        possible = [entry for entry in place.values() if entry.logprob > -1e9]
        assert 1 <= len(possible) < 9
        assert {*"".join(str(entry.decoded_token) for entry in possible)} <= {"a", "b"}


# --- what goes wrong ---


@pytest.mark.parametrize("method", ["launch", "sample", "wait"])
@pytest.mark.parametrize("failing_step", [0, 1, 12])
def test_a_step_that_fails_is_done_again_and_changes_no_token(
    llm: LLM, alone: list[Any], monkeypatch: pytest.MonkeyPatch, method: str, failing_step: int
) -> None:
    runner = llm.engine.runner
    original, count = getattr(runner, method), 0

    def fail_once(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == failing_step + 1:
            raise ZeroDivisionError
        return original(*given)

    monkeypatch.setattr(runner, method, fail_once)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        llm.add_request(prompt, params)
    outputs: list[RequestOutput] = []
    num_failed = 0
    while not llm.is_finished():
        try:
            outputs += llm.step()
        except ZeroDivisionError:
            num_failed += 1
    assert num_failed == 1
    assert said(sorted(outputs, key=lambda output: output.request_id)) == alone


def test_requests_that_are_aborted_keep_what_they_have_and_harm_no_other(llm: LLM, alone: list[Any]) -> None:
    ids = [llm.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs: list[RequestOutput] = []
    for _ in range(4):
        outputs += llm.step()
    llm.abort(ids[::2])
    while not llm.is_finished():
        outputs += llm.step()
    found = {output.request_id: one for output, one in zip(outputs, said(outputs), strict=True)}
    for index, request_id in enumerate(ids):
        mine, expected = found[request_id], alone[index]
        if mine[2] == "abort":
            assert index % 2 == 0
            assert 0 < len(mine[0]) < len(expected[0])
            assert mine[0] == expected[0][: len(mine[0])]
        else:
            assert mine == expected
    assert "abort" in {one[2] for one in found.values()}


def test_without_the_library_an_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError("no module named llguidance")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with load() as llm:
        for call in (llm.generate, llm.stream, llm.add_request):
            with pytest.raises(RequestError, match=r"pip install 'nanoinfer\[structured\]'"):
                call("a", SamplingParams(**form(regex="a")))  # type: ignore[operator]
        assert llm.is_finished()
        [output] = llm.generate("a", replace(GREEDY, max_tokens=3, **KINDS["allowed ids"]), use_tqdm=False)
        assert len(output.token_ids) == 3, "ids that are allowed need no library"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (form(json={"type": "integer", "minimum": 3, "maximum": 2}), "cannot be compiled: "),
        (form(json={"type": "array", "uniqueItems": True}), "cannot be compiled: .*uniqueItems"),
        (form(json={"$ref": "#"}), "holds itself without end"),
        (form(regex="(a"), "regex='\\(a' cannot be compiled"),
        (form(grammar="root ::= nothing"), "cannot be compiled"),
        ({"allowed_token_ids": [1024]}, "ids are 0 to 1023"),
        ({"bad_words": ["8"], "allowed_token_ids": [23]}, "leave no token"),
        ({**form(choice=["yes"]), "allowed_token_ids": [23]}, "begins with no token that"),
        ({**form(regex="[78]+"), "stop_token_ids": [22, 23]}, "begins with no token that"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_before_anything_is_queued(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=message):
            call(["a", "b"], [GREEDY, replace(GREEDY, **options)])
        assert llm.is_finished()


def test_a_mask_that_leaves_no_token_ends_that_request_and_the_others_go_on(llm: LLM, alone: list[Any]) -> None:
    digits = {"allowed_token_ids": llm.encode("0123456789")}
    params = replace(SEEDED, **digits, **form(regex="[0-9]{2}[a-z]"))
    bad = replace(SEEDED, allowed_token_ids=llm.encode("3") + llm.encode("4"), bad_words=["33", "34", "43", "44"])
    outputs = llm.generate([*PROMPTS, "Sort", "Sort"], [*PARAMS, params, bad], use_tqdm=False)
    assert said(outputs[:-2]) == alone
    [first], [second] = outputs[-2].outputs, outputs[-1].outputs
    assert (first.finish_reason, len(first.text), len(second.token_ids)) == ("error", 2, 1)
    assert "no token may come by structured_outputs regex='[0-9]{2}[a-z]' after 2 tokens" in str(first.error)
    assert (
        second.error
        == "no token may come after 1 tokens: allowed_token_ids and bad_words leave none; allow more of them"
    )


def test_a_function_that_raises_ends_its_request_alone(llm: LLM, alone: list[Any]) -> None:
    def fail_later(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) == 3:
            raise KeyError("the user's own")
        return logits

    params = replace(SEEDED, logits_processors=[halve_repeats, fail_later])
    outputs = llm.generate([*PROMPTS, "Sort"], [*PARAMS, params], use_tqdm=False)
    assert said(outputs[:-1]) == alone
    [sample] = outputs[-1].outputs
    assert (len(sample.token_ids), sample.finish_reason) == (3, "error")
    assert sample.error == 'logits processor fail_later failed with KeyError: "the user\'s own"'
