"""Two replicas on two GPUs: the tokens of one, and a parent that leaves the GPUs alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, SamplingParams

pytestmark = pytest.mark.multi_gpu


def test_two_gpus_give_the_tokens_of_one(random_checkpoint: Callable[..., Path]) -> None:
    prompts = [[index, 2, 3, 4, 5] for index in range(1, 41)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = []
    for size in (1, 2):
        with LLM(random_checkpoint(), dtype="float32", data_parallel_size=size) as llm:
            before = torch.cuda.memory_allocated()
            tokens.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            metrics = llm.get_metrics()
    assert tokens[0] == tokens[1]
    assert [replica.num_generated_tokens for replica in metrics.replicas] == [600, 600]
    assert torch.cuda.memory_allocated() == before
