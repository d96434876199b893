"""Gemma 2's soft caps reach all that is made of scores and logits; and a config.json as its checkpoints have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.logits.spec import cap_logits
from tests.models.test_architectures import checkpoint, draw_prompts

__all__ = ["checkpoint"]  # a fixture
# As gemma-2-9b-it has it.
OF_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
CAPPED = {"attn_logit_softcapping": 0.2, "final_logit_softcapping": 1.0}  # scores and logits are small here
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 100, "kvcache_block_size": 16}
PROMPTS = draw_prompts(0, (40, 1, 17))


@torch.inference_mode()
def reference_logits(folder: Path, ids: list[int]) -> Tensor:
    """The logits of transformers after each token of a text, (num_tokens, vocab_size)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_all_log_probabilities_are_of_capped_logits(
    checkpoint: Callable[..., Path],
    mode: str,
    num_ranks: int,
) -> None:
    """Of prompts, in chunks; of sampled tokens, with a filter and without; processed ones at the temperature."""
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    folder = checkpoint("Gemma2ForCausalLM", 0, **even, **CAPPED)
    temperature = 0.5
    options = {"temperature": temperature, "max_tokens": 6, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 2}
    params = [SamplingParams(**options, top_k=top_k, seed=0) for top_k in (0, 7, 7)]
    engine = {**SMALL, "max_num_batched_tokens": 16, "tensor_parallel_size": num_ranks}
    with LLM(folder, logprobs_mode=mode, **engine) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output, its in zip(PROMPTS, outputs, params, strict=True):
        [completion] = output.outputs
        ids = prompt + completion.token_ids
        logits = reference_logits(folder, ids)
        assert logits.abs().amax() <= 1
        raw = logits if mode.endswith("logits") else logits.log_softmax(-1)
        for place, entry in enumerate((output.prompt_logprobs or [])[1:]):
            assert {i: one.logprob for i, one in entry.items()} == pytest.approx(
                {i: raw[place, i].item() for i in entry}, abs=2e-5
            )
        expected = raw
        if mode.startswith("processed"):
            expected = logits / temperature
            if its.top_k:
                least = logits.topk(its.top_k).values[:, -1:]
                expected = expected.masked_fill(logits < least - 1e-6, -torch.inf)
            expected = expected if mode.endswith("logits") else expected.log_softmax(-1)
        for place, entry in enumerate(completion.logprobs or [], start=len(prompt) - 1):
            found = {i: expected[place, i].item() for i in entry}
            assert {i: one.logprob for i, one in entry.items()} == pytest.approx(found, abs=2e-5)


def test_scores_of_texts_and_of_rerankers_are_of_capped_logits(checkpoint: Callable[..., Path]) -> None:
    """`score`, and a reranker's difference of two logits."""
    folder = checkpoint("Gemma2ForCausalLM", 0, **CAPPED)
    logits = [reference_logits(folder, [*prompt, 3, 5, 9]) for prompt in PROMPTS]
    with LLM(folder, **SMALL) as llm:
        scores = llm.score(PROMPTS, [[3, 5, 9]] * len(PROMPTS), use_tqdm=False)
    for found, one in zip(scores, logits, strict=True):
        expected = one.log_softmax(-1)[-4:-1].gather(1, torch.tensor([[3], [5], [9]]))[:, 0]
        assert found.logprobs == pytest.approx(expected.tolist(), abs=2e-5)
    overrides = {"architectures": ["Gemma2ForSequenceClassification"], "classifier_from_token": [5, 9]}
    with LLM(folder, hf_overrides=overrides, **SMALL) as llm:
        rewards = [output.reward for output in llm.reward(PROMPTS, use_tqdm=False)]
    assert rewards == pytest.approx([(one[-4, 9] - one[-4, 5]).item() for one in logits], abs=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_come_close_to_the_cap_and_keep_their_order(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-1e4, -30.0, 0.0, 1.0, 30.0, 1e4]], dtype=dtype)
    expected = 30 * torch.tanh(logits.float() / 30)
    capped = cap_logits(logits, 30.0)
    assert capped is logits, "in their place"
    assert torch.equal(capped, expected.to(dtype))
    assert capped[0].tolist()[::5] == [-30.0, 30.0]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_cache_in_8_bits_changes_log_probabilities_by_rounding_alone(
    checkpoint: Callable[..., Path],
    kv_cache_dtype: str,
) -> None:
    folder = checkpoint("Gemma2ForCausalLM", 1, attn_logit_softcapping=0.2, hidden_size=64)
    found = []
    for options in ({}, {"kv_cache_dtype": kv_cache_dtype}):
        with LLM(folder, **SMALL, **options) as llm:
            scores = llm.score([[7]] * 3, PROMPTS, use_tqdm=False)
            found.append(torch.tensor([value for score in scores for value in score.logprobs]))
    assert (found[0] - found[1]).abs().mean() < 0.02


def test_a_config_of_gemma_2_9b_is_read_as_transformers_does() -> None:
    config = read_native_config(OF_9B)
    assert config.windows == (4096, None) * 21
    assert (config.attention_soft_cap, config.logits_soft_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert config.tie_word_embeddings
    written = {**transformers.Gemma2Config(**OF_9B).to_dict(), "architectures": ["Gemma2ForCausalLM"]}
    assert read_native_config(written) == config


def test_null_stands_for_no_cap() -> None:
    nothing = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    config = read_native_config({**OF_9B, **nothing})
    assert (config.attention_soft_cap, config.logits_soft_cap) == (None, None)
