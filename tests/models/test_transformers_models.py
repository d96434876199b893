"""Models of transformers behind the engine: its own tokens and log-probabilities, and refusals with a reason."""

from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams
from tests.models.tiny_transformers import Answer, reference, write_tiny

NUM_TOKENS = 8
PROMPTS = [[(7 * length * index + 11) % 230 + 5 for index in range(length)] for length in (5, 40, 23, 61)]
# Whole prompts at once; chunks shorter than the windows of 20, in mixed batches; so few blocks that rows are preempted.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preempted": {"num_kvcache_blocks": 8, "max_model_len": 96},
}
DAILY = (
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "Starcoder2ForCausalLM", "Gemma3nForCausalLM"),
    *("GptOssForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM"),
    *("RobertaForCausalLM", "Qwen2VLForConditionalGeneration", "LlamaForCausalLM"),
)
OVERRIDES: dict[str, dict[str, Any]] = {
    # Chunks that blocks of 16 divide; the queries grow at 512, beyond the longest position.
    "Llama4ForCausalLM": {"attention_chunk_size": 32, "floor_scale": 512},
    "XLMRobertaXLForCausalLM": {"pad_token_id": 1},  # it is never drawn: transformers takes it for padding
}
# Classes with the attention interface that are refused, and a part of the reason.
REFUSED = {
    "AXK2ForCausalLM": "indices",
    "DeepseekV32ForCausalLM": "indices",
    "DogeForCausalLM": "a mask that its model changed",
    "Dots3NoteForCausalLM": "indices",
    "Gemma4AssistantForCausalLM": "does not compute a text's tokens alone",
    "Gemma4UnifiedAssistantForCausalLM": "does not compute a text's tokens alone",
    "Gemma4UnifiedForConditionalGeneration": "does not compute a text's tokens alone",
    "GlmMoeDsaForCausalLM": "indices",
    "GraniteMoeHybridForCausalLM": "reach each other outside attention",
    "HYV4ForCausalLM": "indices",
    "JetMoeForCausalLM": "does not compute a text's tokens alone",
    "Lfm2ForCausalLM": "reach each other outside attention",
    "Lfm2MoeForCausalLM": "reach each other outside attention",
    "Lfm3ForCausalLM": "reach each other outside attention",
    "Llama4ForConditionalGeneration": "",
    "MiniMaxForCausalLM": "reach each other outside attention",
    "RecurrentGemmaForCausalLM": "reach each other outside attention",
    "ZayaForCausalLM": "reach each other outside attention",
}


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", model_impl="transformers", **{"kvcache_block_size": 16, **options})


def answers(llm: LLM) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append(Answer(tokens, [one[token].logprob for token, one in zip(tokens, logprobs, strict=True)]))
    return found


def assert_close(found: list[Answer], expected: list[Answer]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


def assert_answers_as_transformers(architecture: str, folder: Path) -> None:
    write_tiny(architecture, folder, **OVERRIDES.get(architecture, {}))
    expected = reference(folder, PROMPTS, NUM_TOKENS)
    for way, options in WAYS.items():
        with load(folder, **options) as llm:
            assert_close(answers(llm), expected)
            assert_close(answers(llm), expected)  # with hits in the prefix cache
            num_preempted = llm.stats().num_preemptions if way == "preempted" else None
            assert num_preempted is None or num_preempted > 0


@pytest.mark.parametrize("architecture", DAILY)
def test_a_model_of_transformers_answers_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    assert_answers_as_transformers(architecture, tmp_path)
