"""With speculative_config, tokens and log-probabilities are those without it, whatever is proposed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.engine.scheduler import RESERVED_TOKENS
from nanoinfer.speculation.controller import Controller, Size
from tests.engine.test_rows_of_several_tokens import GREEDY, MODELS, PARAMS, SIZES, draw_prompts, folders
from tests.proposers import assert_same_answers, engine_of

__all__ = ["folders"]  # a fixture

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}  # finds something nearly everywhere
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_tree_depth": 2}


@pytest.fixture(autouse=True)
def proposes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps cost: a test must not depend on times."""

    def most(_controller: Controller, _num_rows: int, sizes: list[Size], has_waited: bool = False) -> Size | None:
        return sizes[-1] if sizes else None

    monkeypatch.setattr(Controller, "choose", most)
    monkeypatch.setattr(Controller, "plain_seconds", lambda *_: 1e-3)


def repeating_prompts() -> list[list[int]]:
    return [prompt[:11] * 3 for prompt in draw_prompts()]


def compare(
    folder: Path | str,
    config: dict[str, Any],
    prompts: Any,
    params: Any,
    tolerance: float = 1e-5,
    reserved: int = RESERVED_TOKENS,
    has_wrong: bool = True,
    **options: Any,
) -> Any:
    """Answer prompts without and with proposals, hold one against the other, and return the metrics with them.

    reserved: the scheduler's reserved_tokens, with proposals. has_wrong: whether some of these have to be wrong.
    """
    options = {"device": "cpu", "dtype": "float32", **SIZES, **options}
    with LLM(folder, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(folder, speculative_config=config, **options) as llm:
        engine_of(llm).scheduler.reserved_tokens = reserved
        assert_same_answers(llm.generate(prompts, params, use_tqdm=False), expected, tolerance)
        metrics = llm.get_metrics()
    assert 0 < metrics.num_accepted_tokens <= metrics.num_draft_tokens - has_wrong
    assert metrics.num_accepted_tokens == sum(metrics.num_accepted_tokens_per_pos)
    assert metrics.num_used_blocks == 0
    return metrics


@pytest.mark.parametrize(("architecture", "config"), [*zip(MODELS, [NGRAM, SUFFIX, NGRAM, SUFFIX, NGRAM], strict=True)])
def test_answers_of_all_options_are_those_without_proposals(
    architecture: str, config: dict[str, Any], folders: Callable[[str], Path]
) -> None:
    """Greedy and seeded, n, penalties, biases, filters, min_tokens, stop ids, limits; windows, sinks and states."""
    tolerance = 2e-5 if architecture.startswith(("Qwen3_5", "Qwen3Next")) else 1e-5  # states are sums, in another order
    compare(folders(architecture), config, repeating_prompts(), PARAMS, tolerance)


def test_so_they_are_where_blocks_and_rows_are_short(folders: Callable[[str], Path]) -> None:
    """Prompts come in chunks, and sequences wait for rows and blocks, or lose them."""
    options = {"num_kvcache_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    metrics = compare(folders("Qwen3_5ForCausalLM"), NGRAM, repeating_prompts(), PARAMS, 5e-5, reserved=0, **options)
    assert metrics.num_preemptions > 0


def test_steps_that_do_not_overlap_answer_alike(folders: Callable[[str], Path]) -> None:
    compare(folders("Qwen3ForCausalLM"), SUFFIX, repeating_prompts(), PARAMS, overlap=False)


def test_two_ranks_answer_as_one_does(folders: Callable[[str], Path]) -> None:
    compare(folders("Qwen3ForCausalLM"), NGRAM, repeating_prompts()[:4], PARAMS[:4], tensor_parallel_size=2)


def test_each_replica_has_a_proposer_and_their_counts_are_summed(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of replicas measure their steps, so only the answers are sure."""
    folder, prompts = folders("Qwen3ForCausalLM"), repeating_prompts()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", **SIZES}
    with LLM(folder, **options) as llm:
        expected = llm.generate(prompts, PARAMS, use_tqdm=False)
    with LLM(folder, data_parallel_size=2, speculative_config=NGRAM, **options) as llm:
        assert_same_answers(llm.generate(prompts, PARAMS, use_tqdm=False), expected)
        metrics = llm.get_metrics()
    assert metrics.num_draft_tokens == sum(one.num_draft_tokens for one in metrics.replicas)
    assert metrics.num_accepted_tokens == sum(metrics.num_accepted_tokens_per_pos)


def test_stop_strings_forms_and_thoughts_answer_alike() -> None:
    digits = StructuredOutputsParams(regex=r"(12, ){3,9}[0-9]{1,5}")
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=40, stop=["3", "ab"], seed=4),
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=digits),
        SamplingParams(temperature=1.0, max_tokens=60, structured_outputs=digits, seed=1, n=2),
        SamplingParams(temperature=1.0, max_tokens=30, bad_words=["1"], min_tokens=5),
        SamplingParams(temperature=1.0, max_tokens=30, thinking_token_budget=4),
    ]
    prompts = [
        "12, 12, 12, 12, 12,",
        "abcabcabcabc",
        "12, 12, 12, ",
        "12, 12, 12, 12, ",
        "9 8 7 9 8 7 9 8 7",
        "abc<think>abcabcabc",
    ]
    compare("tiny", NGRAM, prompts, params)


def test_tokens_that_a_form_forces_are_proposed_and_right() -> None:
    """Only forms propose: no text repeats twenty of its tokens. Sets and stop tokens may forbid what a form forces."""
    schema = {
        "type": "object",
        "properties": {"category": {"enum": ["animal", "vegetable"]}, "weight": {"type": "integer"}},
        "required": ["category", "weight"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    one = SamplingParams(temperature=1.0, max_tokens=50, structured_outputs=form, seed=3, n=2, logprobs=2)
    params = [one, replace(one, temperature=0, n=1), replace(one, min_tokens=4), replace(one, bad_words=["veg"])]
    prompts = ["9 8 7", "abc", "What is it?", "What is it?"]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 20}
    tolerance = 5e-5  # the model finds what is forced unlikely: large numbers have larger errors
    metrics = compare("tiny", config, prompts, params, tolerance, has_wrong=False)
    assert metrics.num_accepted_tokens > 0.9 * metrics.num_draft_tokens > 20, "bad_words forbid what is forced"


def test_requests_that_are_aborted_or_paused_leave_nothing_behind(folders: Callable[[str], Path]) -> None:
    folder, prompts, params = folders("Qwen3_5ForCausalLM"), repeating_prompts()[:4], replace(GREEDY, max_tokens=40)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", **SIZES}
    with LLM(folder, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(folder, speculative_config=SUFFIX, **options) as llm:
        ids = [llm.add_request(prompt, params) for prompt in prompts]
        outputs = [output for _ in range(5) for output in llm.step()]
        llm.abort(ids[1])
        llm.pause(ids[2])
        outputs += [output for _ in range(5) for output in llm.step()]
        llm.resume(ids[2])
        while not llm.is_finished():
            outputs += llm.step()
        whole = {output.request_id: output for output in outputs if output.outputs[0].finish_reason != "abort"}
        assert_same_answers([whole[ids[index]] for index in (0, 2, 3)], [expected[index] for index in (0, 2, 3)], 5e-5)
        assert llm.get_metrics().num_used_blocks == 0


def test_a_prompt_finds_what_proposals_computed(folders: Callable[[str], Path]) -> None:
    folder, prompts, params = folders("Qwen3ForCausalLM"), repeating_prompts()[:3], replace(GREEDY, max_tokens=37)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", **SIZES}
    with LLM(folder, enable_prefix_caching=False, **options) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        turns = [output.prompt_token_ids + output.token_ids + [1, 2, 3] for output in first]
        second = llm.generate(turns, replace(params, max_tokens=20), use_tqdm=False)
    with LLM(folder, speculative_config=NGRAM, **options) as llm:
        assert_same_answers(llm.generate(prompts, params, use_tqdm=False), first)
        before = llm.get_metrics().cached_tokens
        assert_same_answers(llm.generate(turns, replace(params, max_tokens=20), use_tqdm=False), second)
        assert llm.get_metrics().cached_tokens > before


def test_a_trace_and_step_events_have_what_was_proposed_and_accepted() -> None:
    events: list[Any] = []
    with LLM("tiny", device="cpu", speculative_config=NGRAM, max_model_len=100) as llm:
        llm.on_step(events.append)
        llm.generate("12, 12, 12, 12,", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
        metrics = llm.get_metrics()
        assert engine_of(llm).proposer is not None
    assert sum(event.num_draft_tokens for event in events) == metrics.num_draft_tokens > 0
    assert sum(event.num_accepted_tokens for event in events) == metrics.num_accepted_tokens
