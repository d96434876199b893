"""What options and calls do with a model whose layers are transformers'."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoinfer import ConfigError, ModelError, SamplingParams, StructuredOutputsParams
from nanoinfer.checkpoint.hub import TINY
from nanoinfer.models import implementations
from nanoinfer.models.transformers import transformers_config
from tests.models.test_transformers_models import (
    IS_5,
    NUM_TOKENS,
    PROMPTS,
    answers,
    assert_close,
    load,
    skip_unless_it_runs,
)
from tests.models.tiny_transformers import load as load_hf
from tests.models.tiny_transformers import reference, write_tiny

NEOX = "GPTNeoXForCausalLM"


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neox")
    write_tiny(NEOX, folder)
    return folder


@pytest.mark.parametrize("installed", ["4.51.3", "4.56.2"])
def test_a_version_that_is_too_old_is_named_with_the_one_that_serves(
    installed: str, neox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations.metadata, "version", lambda package: installed)
    version = re.escape(installed)
    with pytest.raises(ModelError, match=rf"'{NEOX}' is not supported.*from version 4\.57 on, and {version} is"):
        load(neox, model_impl="auto")
    write_tiny("LlamaForCausalLM", neox / "llama")
    with pytest.raises(ModelError, match=r"^Layers of transformers run from version 4\.57 on"):
        load(neox / "llama")
    with pytest.raises(ModelError, match=r"^limit_mm_per_prompt asks for images.* from version 4\.57 on"):
        load(neox / "llama", model_impl="auto", limit_mm_per_prompt={"image": 1})
    load(neox / "llama", model_impl="auto").close()


def test_fields_that_an_older_version_would_not_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_config.transformers, "__version__", "4.57.3")
    fields = {"architectures": [NEOX], "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    with pytest.raises(ModelError, match=r"has rope_parameters, as transformers 5 writes it, which 4\.57\.3 does not"):
        transformers_config.make_config(transformers.GPTNeoXForCausalLM, fields)


# -------- Options -----------------------------------------------------------------------------------------------------


def test_a_cache_in_8_bits_changes_log_probabilities_a_little(neox: Path) -> None:
    expected = reference(neox, PROMPTS, NUM_TOKENS)
    with load(neox, kv_cache_dtype="int8") as llm:
        found = answers(llm)
    assert [one.token_ids[:2] for one in found] == [one.token_ids[:2] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert 0 < abs(one.logprobs[0] - other.logprobs[0]) < 0.02


def test_two_replicas_give_the_answers_of_one(neox: Path) -> None:
    expected = reference(neox, PROMPTS, NUM_TOKENS)
    with load(neox, data_parallel_size=2) as llm:
        assert_close(answers(llm), expected)


def test_the_dtype_is_that_of_the_config_unless_another_is_asked_for(neox: Path, tmp_path: Path) -> None:
    with load(neox, dtype="auto") as llm:
        assert "float32" in repr(llm)
    with load(neox, dtype="bfloat16") as llm:
        assert "bfloat16" in repr(llm)


@pytest.mark.skipif(not IS_5, reason="transformers 4 does not read rope_parameters, which is refused")
def test_overrides_replace_fields_that_the_class_knows(neox: Path) -> None:
    with load(neox, hf_overrides={"max_position_embeddings": 128}) as llm:
        assert "max_model_len=128" in repr(llm)
    config = json.loads((neox / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.25}
    with load(neox) as plain, load(neox, hf_overrides={"rope_parameters": rope}) as stretched:
        assert [one.logprobs for one in answers(plain)] != [one.logprobs for one in answers(stretched)]
    assert json.loads((neox / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"hiden_size": 64}, "hiden_size=64, which changes nothing.*did you mean 'hidden_size'"),
        ({"rope_scaling": {"rope_tipe": "linear"}}, "rope_scaling.rope_tipe='linear'|refuses this config.json"),
        ({"hidden_size": 63}, "refuses this config.json"),
    ],
)
def test_other_overrides_are_refused(overrides: dict[str, Any], reason: str, neox: Path) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.compile(reason)):
        load(neox, hf_overrides=overrides)


def test_an_architecture_of_another_name_is_what_an_override_says(neox: Path, tmp_path: Path) -> None:
    config = json.loads((neox / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OurNeoX"]}))
    with load(tmp_path, load_format="dummy", model_impl="auto", hf_overrides={"architectures": [NEOX]}):
        pass
    with pytest.raises(ModelError, match=r"'OurNeoX' is not supported.*has no such class either"):
        load(tmp_path, load_format="dummy", model_impl="auto")


def test_routed_experts_are_those_of_our_layers_alone(tmp_path: Path) -> None:
    write_tiny("Qwen3MoeForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="enable_return_routed_experts=True needs layers of nanoinfer's own"):
        load(tmp_path, enable_return_routed_experts=True)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_random_weights_are_those_that_training_begins_with(architecture: str, tmp_path: Path) -> None:
    """Norms of ones, and no memory that nobody wrote: the same seed gives the same tokens, another others."""
    write_tiny(architecture, tmp_path)
    (tmp_path / "model.safetensors").unlink()

    def tokens(seed: int) -> list[list[int]]:
        with load(tmp_path, load_format="dummy", seed=seed) as llm:
            return [one.token_ids for one in answers(llm)]

    state = torch.get_rng_state()
    assert tokens(0) == tokens(0) != tokens(1)
    assert torch.equal(torch.get_rng_state(), state)


# -------- Calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_weights_sleep(level: int, neox: Path) -> None:
    expected = reference(neox, PROMPTS, NUM_TOKENS)
    with load(neox) as llm:
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(load_hf(neox).state_dict())
        assert_close(answers(llm), expected)


def test_prompts_have_the_log_probabilities_of_transformers(neox: Path) -> None:
    with torch.no_grad():
        expected = load_hf(neox)(input_ids=torch.tensor([PROMPTS[1]])).logits[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with load(neox, max_num_batched_tokens=16) as llm:
        [output] = llm.generate({"prompt_token_ids": PROMPTS[1]}, params, use_tqdm=False)
    found = output.prompt_logprobs
    assert found is not None
    for place in range(1, len(PROMPTS[1])):
        token = PROMPTS[1][place]
        assert found[place][token].logprob == pytest.approx(expected[place - 1, token].item(), abs=1e-4)


def test_a_model_that_generates_embeds_by_its_last_token(neox: Path) -> None:
    model = load_hf(neox).base_model
    with load(neox, runner="pooling") as llm:
        [output] = llm.embed({"prompt_token_ids": PROMPTS[1]}, use_tqdm=False)
        with torch.no_grad():
            last = model(input_ids=torch.tensor([PROMPTS[1]]))[0][0, -1]
        expected = torch.nn.functional.normalize(last, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)


def test_structured_outputs_and_another_tokenizer_work(tmp_path: Path) -> None:
    vocab_size = json.loads((TINY / "config.json").read_text())["vocab_size"]
    write_tiny(NEOX, tmp_path, vocab_size=vocab_size)
    params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    with load(tmp_path, tokenizer=str(TINY)) as llm:
        outputs = llm.generate(["1 + 1 =", "2"], params, use_tqdm=False)
        assert all(output.outputs[0].text in ("yes", "no") for output in outputs)


CLASSIFIERS = (
    *("AlbertForSequenceClassification", "DistilBertForSequenceClassification", "ElectraForTokenClassification"),
    *("GPT2ForSequenceClassification", "XmodForSequenceClassification", "ErnieForSequenceClassification"),
)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_classifier_has_the_probabilities_of_transformers(architecture: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    write_tiny(architecture, tmp_path, num_labels=3)
    model = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    with load(tmp_path) as llm:
        outputs = llm.classify([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.as_tensor(output.outputs.probs), expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not IS_5, reason="transformers 4 lacks most of these, and makes a large T5Gemma")
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("OpenAIPrivacyFilterForTokenClassification", "attends to later tokens with sinks"),
        ("MobileBertForSequenceClassification", "reach each other outside attention"),
        ("T5GemmaForSequenceClassification", "is not supported: it is a classifier"),
        ("EuroBertForSequenceClassification", "classifier_pooling='late'; it must be"),
    ],
)
def test_a_classifier_of_another_kind_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    write_tiny(architecture, tmp_path, num_labels=3)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)
