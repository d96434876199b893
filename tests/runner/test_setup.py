"""The step that is measured when an engine loads on a GPU, run on a CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanoinfer import LLM
from nanoinfer.device import computing
from nanoinfer.runner.device_runner import DeviceRunner


@pytest.mark.parametrize("max_model_len", [32, 512, None])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 512])
def test_the_largest_step_has_no_more_prompts_than_rows(
    random_checkpoint: Callable[..., Path], max_num_seqs: int, max_model_len: int | None
) -> None:
    options = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "max_num_batched_tokens": 2500}
    with LLM(random_checkpoint(), device="cpu", **options) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, DeviceRunner)
        assert runner.setup.max_step_tokens(runner.limits) == min(2500, max_num_seqs * (max_model_len or 2048))
        with computing(runner.device, 1):
            runner.setup.run_largest_prefills(runner.model_runner, runner.limits)
