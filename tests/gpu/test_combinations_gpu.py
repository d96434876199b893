"""Random combinations of model, options and load on a GPU: nothing crashes, and every answer is right.

`pytest tests/gpu/test_combinations_gpu.py --combinations-seconds 600 --combinations-seed 1000` goes on for ten minutes.
Several processes may do so on one GPU, each from a seed of its own.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from tests.combinations import run_for

pytestmark = pytest.mark.gpu

SECONDS = 60.0


def test_random_combinations_answer_right(
    request: pytest.FixtureRequest, tmp_path: Path, show: Callable[[str], None]
) -> None:
    seconds = request.config.getoption("--combinations-seconds")
    seed = request.config.getoption("--combinations-seed")
    run_for(SECONDS if seconds is None else seconds, seed, "cuda", tmp_path, show)


@pytest.mark.parametrize("max_model_len", [32, 512, 4096, None])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 512])
def test_few_sequences_and_short_ones_load_and_answer(
    random_checkpoint: Callable[..., Path], max_num_seqs: int, max_model_len: int | None
) -> None:
    folder = random_checkpoint(num_attention_heads=8, head_dim=128, max_position_embeddings=8192)
    options = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "gpu_memory_utilization": 0.3}
    prompts, params = [[7] * 20, [1, 2, 3], [5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [4, 4, 4]
