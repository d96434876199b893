"""Adapters where several tokens of a row are computed at once: proposals change no token."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from tests.lora.adapters import request, write_adapter
from tests.models.test_architectures import draw_prompts

ALL = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"


def test_proposals_change_no_token_of_rows_with_adapters(
    random_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoinfer.speculation.controller.MIN_GAIN", 0.0)  # whatever a step costs
    base = random_checkpoint()
    adapter = request(write_adapter(base, tmp_path / "adapter", 1, ALL), 1)
    (first, second, third), params = draw_prompts(0, (7, 9, 5)), SamplingParams(temperature=0, max_tokens=40)
    prompts, adapters = [first * 4, second * 4, third * 4], [adapter, None, adapter]
    answers = []
    for config in (None, {"method": "suffix", "num_speculative_tokens": 4}):
        with LLM(
            base, device="cpu", kvcache_block_size=16, max_model_len=112, enable_lora=True, speculative_config=config
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            answers.append([output.outputs[0].token_ids for output in outputs])
            metrics = llm.get_metrics()
    assert metrics.num_accepted_tokens > 0
    assert answers[0] == answers[1]
    assert (
        answers[0][0] != LLM(base, device="cpu", max_model_len=112).generate(first * 4, params)[0].outputs[0].token_ids
    )
