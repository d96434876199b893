"""The checkpoints of tiny_transformers.py: they build, and their answers are worth comparing."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.models.tiny_transformers import Answer, causal_classes, reference, reference_generate, write_tiny

PROMPTS = [[5, 6, 7], list(range(40, 100, 2)), [(7 * i) % 253 + 3 for i in range(45)]]

A_DOZEN_KINDS = [
    "DeepseekV3ForCausalLM",  # latent attention, and a mixture with grouped routing
    "FalconForCausalLM",  # no attention interface
    "GPT2LMHeadModel",  # learned positions
    "GPTNeoXForCausalLM",  # a partial rotary embedding
    "Gemma2ForCausalLM",  # soft caps
    "Gemma3nForCausalLM",  # layers that read another layer's cache
    "Gemma4ForCausalLM",  # heads of two sizes
    "GptOssForCausalLM",  # sinks
    "GraniteMoeHybridForCausalLM",  # a state-space layer
    "Llama4ForCausalLM",  # attention in chunks
    "LlavaNextForConditionalGeneration",  # an image encoder beside the text part
    "Starcoder2ForCausalLM",  # windows in every layer
]

# Why transformers does not build or does not answer alone.
NO_ANSWER = {
    "Gemma3nForConditionalGeneration": "needs the package timm",
    "Gemma4AssistantForCausalLM": "drafts from the keys and values of another model",
    "Gemma4UnifiedAssistantForCausalLM": "drafts from the keys and values of another model",
}
# Why `generate` answers otherwise than the model without a cache.
POSITIONS_FROM_PADDING = "without position_ids, they are counted from padding; generate gives its own"
OTHER_WITH_A_CACHE = {
    "CamembertForCausalLM": POSITIONS_FROM_PADDING,
    "Data2VecTextForCausalLM": POSITIONS_FROM_PADDING,
    "DogeForCausalLM": "keeps other keys with a cache",
    "DoryForCausalLM": "fails with a cache",
    "MoshiForCausalLM": "differs with a cache",
    "RobertaForCausalLM": POSITIONS_FROM_PADDING,
    "RobertaPreLayerNormForCausalLM": POSITIONS_FROM_PADDING,
    "XLMRobertaForCausalLM": POSITIONS_FROM_PADDING,
    "XLMRobertaXLForCausalLM": POSITIONS_FROM_PADDING,
    "XmodForCausalLM": POSITIONS_FROM_PADDING,
}


def num_distinct(answers: list[Answer]) -> int:
    return len({token_id for answer in answers for token_id in answer.token_ids})


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=2e-4)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("architecture", A_DOZEN_KINDS)
def test_a_tiny_checkpoint_answers_diversely_and_alike_with_and_without_a_cache(architecture: str, tmp_path: Path):
    assert write_tiny(architecture, tmp_path) < 600_000
    answers = reference(tmp_path, PROMPTS, 8)
    assert num_distinct(answers) >= 6
    assert_same(reference_generate(tmp_path, PROMPTS, 8), answers)


def test_each_kind_of_layer_comes_at_least_once(tmp_path: Path):
    kinds = {
        "Cohere2ForCausalLM": ("layer_types", ["sliding_attention", "full_attention"]),
        "Gemma3nForCausalLM": ("layer_types", ["sliding_attention", "full_attention"] * 2),
        "Glm4MoeLiteForCausalLM": ("mlp_layer_types", ["dense", "sparse"]),
        "Lfm2ForCausalLM": ("layer_types", ["conv", "full_attention"]),
        "Llama4ForCausalLM": ("no_rope_layers", [1, 0]),
    }
    for architecture, (name, expected) in kinds.items():
        write_tiny(architecture, tmp_path / architecture)
        assert config_of(tmp_path / architecture)[name] == expected


def test_no_norm_bias_or_buffer_is_all_ones_or_all_zeros(tmp_path: Path):
    for architecture in ("DeepseekV3ForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM", "NemotronForCausalLM"):
        write_tiny(architecture, tmp_path / architecture)
        weights = load_file(tmp_path / architecture / "model.safetensors")
        assert not [name for name, weight in weights.items() if weight.float().std() < 0.01]
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in load_file(
        tmp_path / "DeepseekV3ForCausalLM" / "model.safetensors"
    )


def test_what_a_config_says_of_attention_changes_the_answer(tmp_path: Path):
    changes = {
        "Cohere2ForCausalLM": ("sliding_window", 40),
        "Gemma2ForCausalLM": ("attn_logit_softcapping", 50.0),
        "GraniteForCausalLM": ("attention_multiplier", 0.25),
        "Llama4ForCausalLM": ("attention_chunk_size", 400),
    }
    for architecture, (name, value) in changes.items():
        folder = tmp_path / architecture
        write_tiny(architecture, folder)
        [before] = reference(folder, PROMPTS[2:], 1)
        (folder / "config.json").write_text(json.dumps({**config_of(folder), name: value}))
        [after] = reference(folder, PROMPTS[2:], 1)
        assert after != before
        assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)


def test_overrides_are_fields_of_the_config_and_of_its_parts(tmp_path: Path):
    write_tiny("LlamaForCausalLM", tmp_path / "text", num_hidden_layers=3, tie_word_embeddings=True)
    assert config_of(tmp_path / "text")["num_hidden_layers"] == 3
    write_tiny("LlavaNextForConditionalGeneration", tmp_path / "parts", text_config={"num_hidden_layers": 1})
    text_config = config_of(tmp_path / "parts")["text_config"]
    assert (text_config["num_hidden_layers"], text_config["hidden_size"]) == (1, 64)


def test_the_same_arguments_write_the_same_weights(tmp_path: Path):
    for name in ("one", "two"):
        write_tiny("LlamaForCausalLM", tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(one[name].equal(two[name]) for name in one.keys() | two.keys())


@pytest.mark.slow
def test_every_class_that_takes_a_registered_attention_builds_and_answers(tmp_path: Path):
    failures = {}
    for architecture, takes_attention in causal_classes().items():
        if not takes_attention or architecture in NO_ANSWER:
            continue
        try:
            assert write_tiny(architecture, tmp_path / architecture) < 600_000
            answers = reference(tmp_path / architecture, PROMPTS, 8)
            assert num_distinct(answers) >= 3
            if architecture not in OTHER_WITH_A_CACHE:
                assert_same(reference_generate(tmp_path / architecture, PROMPTS, 8), answers)
        except Exception as error:  # all classes are tried before the test fails
            failures[architecture] = repr(error)[:200]
    assert failures == {}
