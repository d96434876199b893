"""Engines whose decode rows have several tokens answer as those of single tokens do, whatever is proposed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.stopping import NO_TOKEN
from tests.models.test_architectures import VOCAB_SIZE, draw_options, save_random_model
from tests.proposers import KnownTexts, assert_same_answers, engine_of, proposing_llm

BLOCK_SIZE = 16
SIZES = {"kvcache_block_size": BLOCK_SIZE, "max_model_len": 112, "num_kvcache_blocks": 200}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 9},
    "GptOssForCausalLM": {"sliding_window": 20},
    "Qwen3_5ForCausalLM": {},
    "Qwen3NextForCausalLM": {},
}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=1.0, max_tokens=41),
    replace(GREEDY, temperature=0.8, n=3, seed=5, logprobs=None),
    replace(GREEDY, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
    replace(GREEDY, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    replace(GREEDY, temperature=1.0, logit_bias={3: 4.0, 9: -100.0}),
    replace(GREEDY, temperature=1.5, stop_token_ids=[*range(0, VOCAB_SIZE, 7)], min_tokens=6),
    replace(GREEDY, temperature=1.5, stop_token_ids=[*range(0, VOCAB_SIZE, 9)], logprobs=None),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=2, temperature=1.0),
]


def draw_prompts(vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    return [[(7 * index + 3 * place * place) % vocab_size for place in range(5 + 8 * index)] for index in range(len(PARAMS))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            options = draw_options(architecture, 1) | {"num_attention_heads": 4, "num_key_value_heads": 2}
            options |= {"hidden_size": 64, "intermediate_size": 48, **MODELS[architecture]}
            save_random_model(made[architecture], architecture, options, seed=1)
        return made[architecture]

    return folder


def compare(
    folder: Path,
    prompts: list[Any],
    params: list[SamplingParams],
    tolerance: float = 1e-5,
    prepare: Callable[[LLM], object] = lambda llm: None,
    **options: Any,
) -> tuple[Any, Any]:
    """Answer prompts without and with proposals, and hold one against the other; return the metrics of both."""
    options = {"device": "cpu", "dtype": "float32", **SIZES, **options}
    with LLM(folder, **options) as llm:
        prepare(llm)
        expected = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.get_metrics()
    with proposing_llm(folder, **options) as llm:
        prepare(llm)
        engine = engine_of(llm)
        engine.proposer = proposer = KnownTexts(expected, VOCAB_SIZE)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.get_metrics()
    assert_same_answers(outputs, expected, tolerance)
    assert proposer.num_proposed > 0
    assert metrics.num_generated_tokens == plain.num_generated_tokens
    assert metrics.num_used_blocks == 0
    return plain, metrics


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_and_log_probabilities_are_those_of_single_steps(
    architecture: str, folders: Callable[[str], Path]
) -> None:
    """Over block borders and windows, with options of all kinds."""
    plain, metrics = compare(folders(architecture), draw_prompts(), PARAMS)
    assert metrics.decode_tokens == plain.decode_tokens
    assert metrics.num_decode_steps < plain.num_decode_steps


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_stay_the_same_where_blocks_and_rows_are_short(
    architecture: str, folders: Callable[[str], Path]
) -> None:
    """Sequences are preempted, wait for rows, and are computed in chunks."""
    options = {"num_kvcache_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24}

    def prepare(llm: LLM) -> None:
        engine_of(llm).scheduler.reserved_tokens = 0

    # What is computed again in other chunks is rounded otherwise.
    _, metrics = compare(folders(architecture), draw_prompts(), PARAMS, 5e-5, prepare=prepare, **options)
    assert metrics.num_preemptions or "Gemma" in architecture or "Gpt" in architecture


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_an_8_bit_cache_answers_alike(architecture: str, kv_cache_dtype: str, folders: Callable[[str], Path]) -> None:
    compare(folders(architecture), draw_prompts(), PARAMS, tolerance=1e-3, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("architecture", MODELS)
def test_what_steps_of_several_tokens_computed_is_found_by_later_prompts(
    architecture: str, folders: Callable[[str], Path]
) -> None:
    """Conversations go on: the second turn finds the first one's answer, and is answered as without a cache."""
    options = {"device": "cpu", "dtype": "float32", **SIZES}
    prompts, params = draw_prompts()[:5], replace(GREEDY, max_tokens=37)
    with LLM(folders(architecture), enable_prefix_caching=False, **options) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        turns = [prompt + output.token_ids + [1, 2, 3] for prompt, output in zip(prompts, first, strict=True)]
        second = llm.generate(turns, replace(params, max_tokens=9), use_tqdm=False)
    with proposing_llm(folders(architecture), **options) as llm:
        engine = engine_of(llm)
        if engine.block_manager.states is not None:
            engine.block_manager.states.min_kept_tokens = 1
        engine.proposer = KnownTexts([*first, *second], VOCAB_SIZE)
        assert_same_answers(llm.generate(prompts, params, use_tqdm=False), first)
        before = llm.get_metrics().cached_tokens
        assert_same_answers(llm.generate(turns, replace(params, max_tokens=9), use_tqdm=False), second)
        found = llm.get_metrics().cached_tokens - before
    assert found >= sum(len(turn) - 3 - 1 - BLOCK_SIZE for turn in turns)
