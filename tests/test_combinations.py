"""Random combinations of model, options and load on a CPU: nothing crashes, and every answer is right."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from tests.combinations import draw, run_for

SECONDS = 5.0


def test_random_combinations_answer_right(
    request: pytest.FixtureRequest, tmp_path: Path, show: Callable[[str], None]
) -> None:
    seconds = request.config.getoption("--combinations-seconds")
    seed = request.config.getoption("--combinations-seed")
    run_for(SECONDS if seconds is None else seconds, seed, "cpu", tmp_path, show)


def test_a_seed_draws_the_same_combination_again_and_the_same_options_on_every_device() -> None:
    for seed in range(50):
        combination, on_gpu = draw(seed, "cpu"), draw(seed, "cuda")
        assert combination == draw(seed, "cpu")
        assert combination.architecture == on_gpu.architecture
        for name in ("quantization", "kv_cache_dtype", "kvcache_block_size", "max_num_seqs", "overlap"):
            assert combination.options[name] == on_gpu.options[name]


@pytest.mark.parametrize("max_model_len", [32, 512, None])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 512])
def test_few_sequences_and_short_ones_are_answered(
    random_checkpoint: Callable[..., Path], max_num_seqs: int, max_model_len: int | None
) -> None:
    prompts, params = [[7] * 20, [1, 2, 3], [5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=max_num_seqs, max_model_len=max_model_len) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4]
