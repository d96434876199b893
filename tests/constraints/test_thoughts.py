"""Budgets of thoughts, and forms after them, against the rule as plainly as it can be said."""

import itertools
import json
import random
import re
from typing import Any

import pytest

from nanoinfer import LLM, ConfigError, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.config import EngineConfig
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.constraints.thoughts import Thoughts, find_thoughts
from tests.constraints.helpers import EOS, VOCAB_SIZE, allowed, encode, tiny_tokenizer
from tests.proposers import KnownTexts, engine_of, proposing_llm

THINK, END = encode("<think>"), encode("</think>")
NEWLINES = encode("\n</think>\n\n")  # three tokens
A, B, C = (encode(letter)[0] for letter in "abc")
ALL = {*range(VOCAB_SIZE)}


def rule(prompt: list[int], text: list[int], budget: int, start: list[int], end: list[int], closing: list[int]) -> Any:
    """The token that must follow a text, or None: everything is counted anew from the prompt on."""

    def ends_with(ids: list[int], what: list[int]) -> bool:
        return ids[-len(what) :] == what

    last = max((i for i in range(len(prompt)) if ends_with(prompt[: i + 1], start)), default=None)
    thought = None if last is None else prompt[last + 1 :]
    if thought is not None and any(ends_with(thought[: i + 1], end) for i in range(len(thought))):
        thought = None
    since = [*prompt]  # what the next thought may begin after
    queue: list[int] = []
    for token_id in [*text, None]:
        if thought is not None and len(thought) >= budget and not queue:
            queue = [*closing]
        if token_id is None:
            return queue[0] if queue else None
        if queue:
            assert token_id == queue.pop(0)
            thought, since = (None, []) if not queue else (thought, since)
        elif thought is not None:
            thought.append(token_id)
            thought, since = (None, []) if ends_with(thought, end) else (thought, since)
        else:
            since.append(token_id)
            thought = [] if ends_with(since, start) else None
    raise AssertionError


def constraints_of(start: str = "<think>", end: str = "</think>", follow: bool = False, **options: Any) -> Constraints:
    config = EngineConfig("tiny", reasoning_config={"reasoning_start_str": start, "reasoning_end_str": end})
    return constraints_with(find_thoughts(config, tiny_tokenizer(), VOCAB_SIZE), follow, **options)


def constraints_with(thoughts: Thoughts | None, follow: bool = False, **options: Any) -> Constraints:
    return Constraints(
        tiny_tokenizer(),
        VOCAB_SIZE,
        frozenset({EOS}),
        thoughts=thoughts,
        forms_follow_thoughts=follow,
        **options,
    )


def start_of(constraints: Constraints, prompt: list[int] | str = (), **options: Any) -> Any:  # type: ignore[assignment]
    [plan] = constraints.compile([SamplingParams(**options)])
    return plan.start(encode(prompt) if isinstance(prompt, str) else prompt)  # type: ignore[union-attr, call-arg]


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("start", "end", "natural"),
    [
        ("<think>", "</think>", END),
        ("<think>", "\n</think>\n\n", END),  # what ends a thought by itself is the token among them
        ("<think>\n", "ab</think>", END),
        ("ba", "cc", encode("cc")),  # texts of plain tokens, of which the prompt may have the first alone
        ("ba", "c", encode("c")),
    ],
)
def test_random_texts_get_the_tokens_that_the_rule_says(budget: int, start: str, end: str, natural: list[int]) -> None:
    rng, constraints = random.Random(budget), constraints_of(start, end)
    starts, closing = encode(start), encode(end)
    assert len(encode("ba")) == len(encode("cc")) == 2, "or no texts have several tokens"
    ids = sorted({*starts, *natural, *closing, A, B, C})
    num_forced = 0
    for _ in range(25):
        prompt = rng.choices(ids, k=rng.randint(1, 6))
        sample, text = start_of(constraints, prompt, thinking_token_budget=budget), list[int]()
        for _ in range(30):
            expected = rule(prompt, text, budget, starts, natural, closing)
            found = allowed(constraints.masks([sample]))
            assert found == (ALL if expected is None else {expected}), (prompt, text)
            num_forced += expected is not None
            text.append(rng.choice(ids) if expected is None else expected)
            assert not sample.append(text[-1])
    assert num_forced > 3


def test_an_end_may_be_cut_into_tokens_otherwise() -> None:
    """A text of plain tokens ends with the bytes of the text, wherever tokens begin and end."""
    [joined, three] = encode("th"), encode("<x>")
    constraints = constraints_of("<x>", "</th>")
    sample = start_of(constraints, [*three, A], thinking_token_budget=9)
    for token_id in [*encode("</"), *joined, *encode(">a"), *[A] * 20]:
        assert allowed(constraints.masks([sample])) == ALL
        sample.append(token_id)
    assert sample.thinking.num_tokens is None


def test_a_step_waits_for_its_newest_token_only_where_that_decides() -> None:
    constraints = constraints_of()
    sample = start_of(constraints, "a", thinking_token_budget=3)
    follows = []
    for token_id in [A, *THINK, A, A, A, *END, A, *END, *THINK, A, *END]:
        follows.append(sample.follows_tokens)
        sample.append(token_id)
    assert follows == [False, False, False, False, True, True, *[False] * 5]
    assert [start_of(constraints, "a", thinking_token_budget=n).follows_tokens for n in (0, 1)] == [True, False]
    assert [start_of(constraints, "<think>", thinking_token_budget=n).follows_tokens for n in (1, 2)] == [True, False]


def test_what_a_request_forbids_does_not_keep_a_thought_open() -> None:
    constraints = constraints_of()
    options: dict[str, Any] = {"allowed_token_ids": [A, B], "bad_words": ["</think>"]}
    functions: dict[str, Any] = {"logits_processors": [lambda ids, logits: logits * 0]}
    sample = start_of(constraints, "<think>", thinking_token_budget=1, **options, **functions)
    for expected in ({A, B}, {*END}, {A, B}):
        masks = constraints.masks([sample])
        assert allowed(masks) == expected
        assert bool(masks.functions) == (expected == {A, B})
        sample.append(min(expected))
    with pytest.raises(RequestError, match=f"min_tokens=2 forbids stop tokens at first, and one of them, {END[0]}, cl"):
        start_of(constraints, thinking_token_budget=1, min_tokens=2, stop_token_ids=END)


def test_proposals_are_masked_as_tokens_one_by_one_would_be() -> None:
    pytest.importorskip("llguidance")
    constraints, rng = constraints_of(end="\n</think>\n\n", follow=True), random.Random(0)
    kinds: list[dict[str, Any]] = [{"thinking_token_budget": n} for n in (0, 1, 3)]
    kinds += [{**kind, "structured_outputs": StructuredOutputsParams(regex="[ab]+c")} for kind in [{}, *kinds]]
    ids, num_forced = [*THINK, *END, A, A, B, C, EOS], 0
    for options, prompt, _ in itertools.product(kinds, ("a", "<think>", "<think>a"), range(12)):
        sample, proposals = start_of(constraints, prompt, **options), rng.choices(ids, k=6)
        masks = constraints.masks([sample], [proposals], 7)
        single = start_of(constraints, prompt, **options)
        for line, proposal in enumerate([*proposals, None]):
            expected, forced = allowed(constraints.masks([single])), [*single.forced()]
            assert allowed(masks, line) == expected
            assert not forced or expected == {forced[0]}
            num_forced += len(forced) > 0
            if proposal not in expected or single.append(proposal):
                break
        assert sample.token_ids == []
        assert sample.num_allowed(proposals) <= len(proposals)
    assert num_forced > 20


# -------- Forms after thoughts ----------------------------------------------------------------------------------------


DIGITS = {i for i in range(EOS) if re.fullmatch("[0-9]+", tiny_tokenizer().decode([i]))}
A_NUMBER: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex="[0-9]+")}


def after(constraints: Constraints, sample: Any, token_ids: list[int]) -> set[int]:
    for token_id in token_ids:
        assert token_id in allowed(constraints.masks([sample]))
        sample.append(token_id)
    return allowed(constraints.masks([sample]))


def test_a_form_begins_after_the_thought() -> None:
    pytest.importorskip("llguidance")
    constraints = constraints_of(follow=True)
    digits = allowed(constraints_of().masks([start_of(constraints_of(), **A_NUMBER)]))
    assert digits & DIGITS
    opened = start_of(constraints, "<think>\n", **A_NUMBER)
    assert after(constraints, opened, []) == ALL - {EOS}, "the text may not end in its thought"
    assert after(constraints, opened, [A, *THINK, B]) == ALL - {EOS}
    assert after(constraints, opened, END) == digits
    assert after(constraints, opened, encode("7")) == digits | {EOS}
    closed = start_of(constraints, "<think>\n\n</think>\n\n", **A_NUMBER)
    assert after(constraints, closed, []) == digits
    for prompt in ("a", "<think>a</think>b"):  # which may be an earlier answer
        assert after(constraints, start_of(constraints, prompt, **A_NUMBER), []) == digits | {*THINK}
        assert after(constraints, start_of(constraints, prompt, **A_NUMBER), encode("7")) == digits | {EOS}
        assert after(constraints, start_of(constraints, prompt, **A_NUMBER), [*THINK, A, *END]) == digits
    limited = start_of(constraints, "a", thinking_token_budget=2, **A_NUMBER)
    assert after(constraints, limited, [*THINK, A, B]) == {*END}
    assert after(constraints, limited, END) == digits


def test_a_thought_may_begin_with_several_tokens_where_the_form_does_not() -> None:
    pytest.importorskip("llguidance")
    constraints = constraints_of("<x>", "</x>", follow=True)
    first, *others = encode("<x>")
    assert others
    sample = start_of(constraints, "a", **A_NUMBER)
    assert first in after(constraints, sample, [])
    assert after(constraints, sample, [first]) == {others[0]}
    assert after(constraints, sample, others) == ALL - {EOS}
    both: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex="<y>|[0-9]")}
    assert after(constraints, start_of(constraints, "a", **both), [first]) <= ALL - {*others}


def test_without_a_config_forms_begin_at_once_but_for_requests_with_a_budget() -> None:
    pytest.importorskip("llguidance")
    constraints = constraints_of()
    assert after(constraints, start_of(constraints, "<think>", **A_NUMBER), []) < ALL - {*THINK}
    assert after(constraints, start_of(constraints, "<think>", thinking_token_budget=5, **A_NUMBER), []) == ALL - {EOS}


def test_stop_tokens_of_a_form_count_min_tokens_from_the_beginning() -> None:
    pytest.importorskip("llguidance")
    constraints = constraints_of(follow=True)
    sample = start_of(constraints, "<think>", min_tokens=4, **A_NUMBER)
    assert EOS not in after(constraints, sample, [A, *END, *encode("1")])
    assert EOS in after(constraints, sample, encode("2"))


def test_a_form_of_gpt_oss_begins_after_the_text_that_begins_its_answer() -> None:
    pytest.importorskip("llguidance")
    thoughts = find_thoughts(EngineConfig("tiny", response_template="gpt-oss"), tiny_tokenizer(), VOCAB_SIZE)
    constraints, begun = constraints_with(thoughts, follow=True), "<|end|><|start|>assistant"
    analysis, final = encode("<|channel|>analysis<|message|>"), encode("<|channel|>final<|message|>")
    commentary = encode("<|channel|>commentary<|message|>")
    digits = allowed(constraints_of().masks([start_of(constraints_of(), **A_NUMBER)]))
    for text in ([], [*analysis, A], [*analysis, A, *encode("<|end|><|start|>assistant"), *commentary, B]):
        sample = start_of(constraints, begun, **A_NUMBER)
        assert after(constraints, sample, text) == ALL - {EOS}
        if text:
            assert after(constraints, sample, encode("<|end|><|start|>assistant")) == ALL - {EOS}
        assert after(constraints, sample, final) == digits
        assert after(constraints, sample, encode("1")) == digits | {EOS}
    assert after(constraints, start_of(constraints, begun + "<|channel|>final<|message|>", **A_NUMBER), []) == digits
    named = encode("<|channel|>final <|constrain|>json<|message|>")
    assert after(constraints, start_of(constraints, begun, **A_NUMBER), named) == digits
    assert after(constraints, start_of(constraints, "no chat", **A_NUMBER), []) == digits
    limited = start_of(constraints, begun, thinking_token_budget=1, **A_NUMBER)
    assert thoughts is not None
    assert after(constraints, limited, [*analysis, A]) == {thoughts.closing_ids[0]}
    assert after(constraints, limited, [*thoughts.closing_ids]) == digits


def test_a_form_of_gpt_oss_may_have_a_place_for_the_thought_itself() -> None:
    pytest.importorskip("llguidance")
    thoughts = find_thoughts(EngineConfig("tiny", response_template="gpt-oss"), tiny_tokenizer(), VOCAB_SIZE)
    constraints, call = constraints_with(thoughts, follow=True), "<|channel|>commentary to=f<|message|>"
    form: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex=re.escape(call) + "[0-9]+")}
    begun = start_of(constraints, "<|start|>assistant", **form)
    assert after(constraints, begun, encode(call)) == {*DIGITS}
    with pytest.raises(RequestError, match="thinking_token_budget=5 cannot end a thought that is a part of structured"):
        start_of(constraints, "<|start|>assistant", thinking_token_budget=5, **form)


def test_a_form_may_say_that_it_includes_the_thought() -> None:
    pytest.importorskip("llguidance")
    constraints = constraints_of(follow=True)
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]+"}, "includes_thought": True}
    form: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(structural_tag=tag)}
    assert after(constraints, start_of(constraints, "<think>", **form), []) == {*DIGITS}


@pytest.mark.parametrize("follow", [False, True])
def test_a_form_may_say_that_it_follows_the_thought(follow: bool) -> None:
    pytest.importorskip("llguidance")
    constraints = constraints_of(follow=follow)
    for pattern in ("[0-9]", '[0-9]|"includes_thought": true'):  # a text of the form says nothing of the form
        tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}, "includes_thought": False}
        for given in (tag, json.dumps(tag), json.dumps(tag, separators=(",", ":"))):
            form: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(structural_tag=given)}
            sample = start_of(constraints, "<think>", **form)
            assert after(constraints, sample, [A]) == ALL - {EOS}
            assert after(constraints, sample, END) >= DIGITS & {*encode("7")}
            assert A not in allowed(constraints.masks([sample]))


def test_what_a_user_writes_of_thoughts_opens_none() -> None:
    constraints = constraints_of()
    asked = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    for prompt, found in (
        (asked, ALL),
        (asked * 20, ALL),
        (asked + "<think>", {*END}),
        ("a" * 400 + "<think>", {*END}),
    ):
        sample = start_of(constraints, prompt, thinking_token_budget=0)
        assert allowed(constraints.masks([sample])) == found


# -------- Engines -----------------------------------------------------------------------------------------------------


CONFIG = {"reasoning_start_str": "<think>", "reasoning_end_str": "\n</think>\n\n"}
LIKELY = dict.fromkeys((*THINK, *END, A, B, C), 60.0)  # so thoughts begin and end
PROMPTS = ["<think>" + "abc" * n if n % 2 else "cab" * (n + 1) for n in range(8)]
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "max_model_len": 128}


def params_with(budgets: list[Any], **options: Any) -> list[SamplingParams]:
    some = {"temperature": 12.0, "logit_bias": LIKELY, "ignore_eos": True, "max_tokens": 48, **options}
    return [SamplingParams(thinking_token_budget=n, seed=i, **some) for i, n in enumerate(budgets)]


BUDGETS = [0, 1, 2, 3, 5, 20, 100, None]


def check(outputs: list[RequestOutput], params: list[SamplingParams]) -> int:
    """Hold all tokens against the rule; return how many were forced."""
    num_forced = 0
    for output, one in zip(outputs, params, strict=True):
        for sample in output.outputs if one.thinking_token_budget is not None else ():
            for place, token_id in enumerate(sample.token_ids):
                text, budget = sample.token_ids[:place], one.thinking_token_budget
                expected = rule(output.prompt_token_ids, text, budget, THINK, END, NEWLINES)
                assert expected in (None, token_id)
                num_forced += expected is not None
    return num_forced


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with LLM("tiny", reasoning_config=CONFIG, **SIZES) as llm:
        return llm.generate(PROMPTS, params_with(BUDGETS, logprobs=1), use_tqdm=False)


def test_an_engine_closes_thoughts_as_the_rule_says(expected: list[RequestOutput]) -> None:
    assert check(expected, params_with(BUDGETS)) > 40
    for output in expected:
        assert output.finish_reason == "length"
        for token_id, entry in zip(output.token_ids, output.outputs[0].logprobs or [], strict=True):
            assert entry[token_id].logprob > -1e3, "log-probabilities are the model's, not those of what is forced"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},  # chunks
        {"num_kvcache_blocks": 12},  # preemption
        {"overlap": False, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_chunks_and_preemption_change_no_budget(expected: list[RequestOutput], options: dict[str, Any]) -> None:
    with LLM("tiny", reasoning_config=CONFIG, **{**SIZES, **options}) as llm:
        if "num_kvcache_blocks" in options:
            engine_of(llm).scheduler.reserved_tokens = 0  # so that blocks do run short
        for _ in range(2):  # the second time all prompts are prefix hits
            outputs = llm.generate(PROMPTS, params_with(BUDGETS), use_tqdm=False)
            assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        if "num_kvcache_blocks" in options:
            assert llm.get_metrics().num_preemptions > 0


def test_steps_overlap_except_where_a_thought_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    with LLM("tiny", reasoning_config=CONFIG, **SIZES) as llm:
        engine = engine_of(llm)
        collect = engine._collect_until

        def note(max_in_flight: int) -> None:
            if engine._in_flight and max_in_flight == 0:
                waits.append(len(engine._in_flight))
            collect(max_in_flight)

        monkeypatch.setattr(engine, "_collect_until", note)
        num_waits = []
        for budget in (None, 20, 100):
            waits.clear()
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40, thinking_token_budget=budget)
            llm.generate("<think>", params, use_tqdm=False)
            num_waits.append(len(waits))
    plain, closed, never = num_waits
    assert never == plain
    assert closed == plain + 1 + len(NEWLINES)


def test_each_sample_of_a_prompt_has_its_own_budget() -> None:
    params = params_with(BUDGETS, n=3)
    with LLM("tiny", reasoning_config=CONFIG, **SIZES) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert check(outputs, params) > 120
        assert len({tuple(sample.token_ids) for sample in outputs[3].outputs}) == 3


def test_rows_of_several_tokens_have_the_tokens_of_single_ones(expected: list[RequestOutput]) -> None:
    with proposing_llm("tiny", reasoning_config=CONFIG, **SIZES) as llm:
        engine_of(llm).proposer = proposer = KnownTexts(expected, VOCAB_SIZE)
        outputs = llm.generate(PROMPTS, params_with(BUDGETS), use_tqdm=False)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        assert proposer.num_proposed > 100


@pytest.mark.parametrize("option", ["tensor_parallel_size", "data_parallel_size"])
def test_two_ranks_and_two_replicas_close_thoughts_too(expected: list[RequestOutput], option: str) -> None:
    with LLM("tiny", reasoning_config=CONFIG, **SIZES, **{option: 2}) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, params_with(BUDGETS), use_tqdm=False)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]


# -------- What is refused ---------------------------------------------------------------------------------------------


def test_a_budget_is_a_whole_number_and_minus_one_is_none() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(thinking_token_budget=0).thinking_token_budget == 0
    for value, rule_broken in ((-2, "must be at least -1"), (-1.0, "is not an int"), (True, "is not an int")):
        with pytest.raises(RequestError, match=f"thinking_token_budget={value} {rule_broken}"):
            SamplingParams(thinking_token_budget=value)  # type: ignore[arg-type]


def test_a_budget_needs_to_know_what_a_thought_is() -> None:
    constraints = Constraints(tiny_tokenizer(), VOCAB_SIZE, frozenset())
    with pytest.raises(
        RequestError, match="thinking_token_budget=5 needs the texts around a thought, and this model's"
    ):
        constraints.compile([SamplingParams(thinking_token_budget=5)])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("x", "reasoning_config='x' is no dict; use {'reasoning_start_str': '<think>', "),
        ({"reasoning_parser": "qwen3"}, "reasoning_config has no option 'reasoning_parser'; did you mean 'respo"),
        ({**CONFIG, "reasoning_end_str": ""}, "reasoning_config has reasoning_end_str='', no text; use {"),
        ({**CONFIG, "reasoning_end": "x"}, "reasoning_config has no option 'reasoning_end'; did you mean 'reasoning_"),
    ],
)
def test_a_wrong_reasoning_config_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig("m", reasoning_config=config)
    assert message in str(raised.value)


def test_texts_of_thoughts_are_those_of_the_family_and_can_be_replaced() -> None:
    def found(**options: Any) -> Any:
        return find_thoughts(EngineConfig("tiny", **options), tiny_tokenizer(), VOCAB_SIZE)

    own = found()  # its chat template is written as Qwen3's
    assert (own.start, own.end, own.closing_ids, own.start_ids) == (b"<think>", b"</think>", (*NEWLINES,), (*THINK,))
    assert own.turns == (b"<|im_start|>assistant",)
    longer = found(reasoning_config={"reasoning_end_str": "I know it.</think>"})
    assert (longer.end, longer.start) == (b"</think>", b"<think>")
    assert bytes(tiny_tokenizer().decode([*longer.closing_ids]), "ascii") == b"I know it.</think>"
    other = found(reasoning_config={"reasoning_start_str": "<tool_call>", "reasoning_end_str": "ab</tool_call>\n"})
    assert (other.start, other.end) == (b"<tool_call>", b"</tool_call>"), "the last token that is one by itself"
    harmony = found(response_template="gpt-oss")
    assert (harmony.end, harmony.answer) == (b"<|end|>", (b"<|channel|>final", b"<|message|>"))
    with pytest.raises(ConfigError, match="reasoning_start_str='<think>' does not write '<think>' with this model's"):
        find_thoughts(EngineConfig("tiny", reasoning_config=CONFIG), tiny_tokenizer(), THINK[0])
    with pytest.raises(
        ConfigError, match=r"reasoning_end_str='Enough\.' does not write '</think>' with this model's t"
    ):
        found(reasoning_config={"reasoning_end_str": "Enough."})
    assert find_thoughts(EngineConfig("tiny"), tiny_tokenizer(), THINK[0]) is None
    with pytest.raises(ConfigError, match="is about text, and this model has no tokenizer"):
        find_thoughts(EngineConfig("tiny", reasoning_config=CONFIG), None, VOCAB_SIZE)


def test_a_reasoning_config_may_have_vllms_first_names() -> None:
    config = {"think_start_str": "<think>", "think_end_str": "\n</think>\n\n"}
    assert EngineConfig("m", reasoning_config=config).reasoning_config == CONFIG
    assert "reasoning_config" in EngineConfig("m", reasoning_config=config).settings_of_answers()


def test_a_call_with_budgets_alone_is_prepared_in_portions() -> None:
    constraints, budget = constraints_of(), SamplingParams(thinking_token_budget=5)
    assert constraints.is_asked([budget])
    assert not constraints.takes_time([budget, SamplingParams()])
    assert constraints.takes_time([budget, SamplingParams(bad_words=["a"])])
