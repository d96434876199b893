"""On a CPU layers are computed in fewer calls; every number is that of the common way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.models import execution
from tests.models.test_architectures import checkpoint, draw_prompts  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("architecture", "overrides", "options", "served"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}, True),
        ("Qwen3ForCausalLM", {}, {"dtype": "bfloat16"}, True),
        ("Qwen2ForCausalLM", {}, {"dtype": "float16"}, True),
        ("MistralForCausalLM", {"sliding_window": 7}, {"kv_cache_dtype": "int8"}, True),
        ("LlamaForCausalLM", {}, {"quantization": "fp8"}, True),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, {}, True),  # the other layers have experts
        ("Gemma2ForCausalLM", {}, {}, False),  # with norms after attention and MLP
    ],
)
def test_fewer_calls_give_the_numbers_of_the_common_way(
    checkpoint: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    served: bool,
) -> None:
    folder, prompts = checkpoint(architecture, 0, **overrides), draw_prompts(0, (29, 1, 40, 20))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    few_calls_layer, served_layers = execution.few_calls_layer, []

    def note(*args: Any) -> Any:
        served_layers.append(args[0])
        return few_calls_layer(*args)

    def answers() -> list[tuple[list[int], str]]:
        with LLM(folder, device="cpu", max_model_len=64, kvcache_block_size=16, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [(output.token_ids, repr(output.outputs[0].logprobs)) for output in outputs]

    monkeypatch.setattr(execution, "few_calls_layer", note)
    found = answers()
    assert bool(served_layers) == served
    monkeypatch.setattr(execution, "_few_calls_where_possible", lambda layer, stream, step: layer(stream, step))
    assert answers() == found
