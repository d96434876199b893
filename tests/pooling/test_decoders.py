"""Embeddings, classes and rewards of decoders against transformers, for random small models in float32 on a CPU."""

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from nanoinfer import LLM, ConfigError, ModelError, PoolingParams, RequestError, SamplingParams
from nanoinfer.checkpoint.pooling_config import ACTIVATIONS, HeadConfig
from nanoinfer.checkpoint.sentence_transformers import read_pooling
from nanoinfer.models import REGISTRY, get_model_class
from nanoinfer.models.native_config import read_native_folder
from nanoinfer.pooling_calls.pooled_output import activate
from nanoinfer.runner.pooler import DenseLayer
from tests.models.test_architectures import (
    ARCHITECTURES,
    HYBRIDS,
    checkpoint,
    draw_options,
    draw_prompts,
    save_random_model,
)

__all__ = ["checkpoint"]  # a fixture
Checkpoint = Callable[..., Path]
# The first outgrow a step of 48 tokens and blocks of 16; the last two are alike at first.
PROMPTS = draw_prompts(0, (90, 63, 29, 1, 16, 40, 17, 49))
PROMPTS += [[*PROMPTS[0][:40], 7], [*PROMPTS[0][:40], 9, 9]]
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 100, "kvcache_block_size": 16}
CHUNKED: dict[str, Any] = {**SMALL, "max_num_batched_tokens": 48, "max_num_seqs": 3}
PACKAGE = "sentence_transformers.models"
OWN = "config_sentence_transformers.json"
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
CLASSIFIERS = ("Qwen2", "Qwen3", "Llama", "Mistral", "Gemma3Text")


def assert_close(ours: Any, theirs: Any, error: float = 1e-5) -> None:
    """Whether all values differ by at most `error` of the largest one."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= error * np.abs(theirs).max()


@torch.inference_mode()
def reference_states(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The hidden states (num_tokens, hidden_size) that transformers computes of each prompt alone."""
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").float().eval()
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


def normalized(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def write_modules(folder: Path, *modules: str, **configs: dict[str, Any]) -> None:
    """Write the files of sentence-transformers: a module of each of these classes, with its config."""
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(("Transformer", *modules))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for module in listed[1:]:
        (folder / module["path"]).mkdir(exist_ok=True)
        content = configs.get(module["type"].rpartition(".")[2], {})
        (folder / module["path"] / "config.json").write_text(json.dumps(content))


def embeddings(llm: LLM, *args: Any, **options: Any) -> list[np.ndarray[Any, Any]]:
    return [output.outputs.embedding for output in llm.embed(*args, use_tqdm=False, **options)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_token_of_every_decoder_is_an_embedding(checkpoint: Checkpoint, architecture: str) -> None:
    """In chunks, with few rows, and a second time from cached prefixes."""
    folder = checkpoint(architecture, 0)
    expected = [normalized(states[-1]) for states in reference_states(folder, PROMPTS)]
    # Against float64, transformers' own float32 is off by 1e-5 there.
    error = 5e-5 if architecture in HYBRIDS else 1e-5
    with LLM(folder, runner="pooling", **CHUNKED) as llm:
        for _ in range(2):
            for ours, theirs in zip(embeddings(llm, PROMPTS), expected, strict=True):
                assert_close(ours, theirs, error)


def test_a_text_in_a_batch_has_the_embedding_that_it_has_alone(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Qwen3ForCausalLM", 0)
    with LLM(folder, enable_prefix_caching=False, **SMALL) as llm:
        alone = [embeddings(llm, [prompt])[0] for prompt in PROMPTS]
        for ours, theirs in zip(embeddings(llm, PROMPTS), alone, strict=True):
            assert_close(ours, theirs)


def test_a_model_that_generates_embeds_beside_it(checkpoint: Checkpoint) -> None:
    """Both kinds of requests share steps; neither changes the other."""
    folder = checkpoint("Qwen3ForCausalLM", 0)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(folder, **CHUNKED) as llm:
        alone = [output.token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        expected = embeddings(llm, PROMPTS)
        llm.reset_prefix_cache()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, params, use_tqdm=False)))
        thread.start()
        mixed = [embeddings(llm, PROMPTS) for _ in range(3)]
        thread.join()
        assert [output.token_ids for output in found] == alone
        for ours in mixed:
            assert_close(np.stack(ours), np.stack(expected))
        assert llm.get_metrics().num_used_blocks == 0


def test_tokens_before_the_last_come_from_the_prefix_cache(checkpoint: Checkpoint) -> None:
    with LLM(checkpoint("Qwen3ForCausalLM", 0), runner="pooling", **SMALL) as llm:
        llm.embed(PROMPTS[:1], use_tqdm=False)
        [again, alike] = llm.embed([PROMPTS[0], PROMPTS[-1]], use_tqdm=False)
    assert (again.num_cached_tokens, alike.num_cached_tokens) == (89, 40)


@pytest.mark.parametrize("flags", [MEAN, {"pooling_mode": "mean"}])
def test_means_count_every_token_of_prompts_in_chunks(checkpoint: Checkpoint, flags: dict[str, Any]) -> None:
    folder = checkpoint("Qwen2ForCausalLM", 1)
    write_modules(folder, "Pooling", Pooling=flags)
    expected = [states.mean(0) for states in reference_states(folder, PROMPTS)]
    with LLM(folder, **CHUNKED) as llm:
        for _ in range(2):
            outputs = llm.embed(PROMPTS, use_tqdm=False)
            for ours, theirs in zip(outputs, expected, strict=True):
                assert_close(ours.outputs.embedding, theirs)
                assert ours.num_cached_tokens == 0, "cached tokens have no hidden states"


def test_the_first_token_is_pooled_where_the_folder_says_so(checkpoint: Checkpoint) -> None:
    folder = checkpoint("LlamaForCausalLM", 1)
    write_modules(folder, "Pooling", "Normalize", Pooling={"pooling_mode_cls_token": True})
    expected = [normalized(states[0]) for states in reference_states(folder, PROMPTS)]
    with LLM(folder, **CHUNKED) as llm:
        for ours, theirs in zip(embeddings(llm, PROMPTS), expected, strict=True):
            assert_close(ours, theirs)


def test_a_dense_layer_follows_pooling_and_cuts_come_before_the_norm(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Qwen3ForCausalLM", 0)
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    sizes = {"in_features": size, "out_features": 12, "activation_function": "torch.nn.modules.activation.Tanh"}
    write_modules(folder, "Pooling", "Dense", "Normalize", Pooling={"pooling_mode_lasttoken": True}, Dense=sizes)
    weight, bias = torch.randn(12, size) / size**0.5, torch.randn(12)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    states = reference_states(folder, PROMPTS)
    expected = [torch.tanh(torch.nn.functional.linear(found[-1], weight, bias)) for found in states]
    with LLM(folder, **SMALL) as llm:
        whole, cut = embeddings(llm, PROMPTS), embeddings(llm, PROMPTS, PoolingParams(dimensions=5))
        raw = embeddings(llm, PROMPTS, PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="dimensions=13 is not what this model was made for; use at most 12"):
            llm.embed(PROMPTS, PoolingParams(dimensions=13))
    for ours, theirs in zip(whole, expected, strict=True):
        assert_close(ours, normalized(theirs))
    for ours, theirs in zip(cut, expected, strict=True):
        assert_close(ours, normalized(theirs[:5]))
    for ours, theirs in zip(raw, expected, strict=True):
        assert_close(ours, theirs)


def test_a_folder_that_cuts_embeddings_cuts_them_once_they_are_normalised(checkpoint: Checkpoint) -> None:
    """As sentence-transformers' `truncate_dim`; what a call asks for is normalised after the cut, as in vLLM."""
    folder = checkpoint("Qwen3ForCausalLM", 1)
    write_modules(folder, "Pooling", "Normalize", Pooling={"pooling_mode": "lasttoken"})
    (folder / OWN).write_text(json.dumps({"truncate_dim": 5}))
    last = [states[-1] for states in reference_states(folder, PROMPTS[:3])]
    with LLM(folder, **SMALL) as llm:
        cut = embeddings(llm, PROMPTS[:3])
        asked = embeddings(llm, PROMPTS[:3], PoolingParams(dimensions=5))
        renormalized = embeddings(llm, PROMPTS[:3], PoolingParams(use_activation=True))
        raw = embeddings(llm, PROMPTS[:3], PoolingParams(use_activation=False))
        more = embeddings(llm, PROMPTS[:3], PoolingParams(dimensions=9))
    assert_close(np.stack(cut), torch.stack([normalized(vector)[:5] for vector in last]))
    for found in (asked, renormalized):
        assert_close(np.stack(found), torch.stack([normalized(vector[:5]) for vector in last]))
    assert_close(np.stack(raw), torch.stack([vector[:5] for vector in last]))
    assert_close(np.stack(more), torch.stack([normalized(vector[:9]) for vector in last]))
    (folder / OWN).write_text(json.dumps({"truncate_dim": 0}))
    with pytest.raises(ModelError, match="truncate_dim=0; it must be a whole number"):
        read_pooling(folder, None, 8, is_encoder=False)


def test_a_checkpoint_without_a_head_and_without_its_prefix_loads(tmp_path: Path) -> None:
    """As AutoModel saves it, and as Qwen3-Embedding is published: the latter says that it generates, and cannot."""
    options = draw_options("Qwen3ForCausalLM", 0) | {"tie_word_embeddings": True}
    save_random_model(tmp_path, "Qwen3ForCausalLM", options, 0)
    bare = tmp_path / "bare"
    transformers.AutoModel.from_pretrained(tmp_path).save_pretrained(bare)
    assert json.loads((bare / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with LLM(tmp_path, runner="pooling", **SMALL) as llm:
        expected = embeddings(llm, PROMPTS)
    with LLM(bare, **SMALL) as llm:
        assert_close(np.stack(embeddings(llm, PROMPTS)), np.stack(expected))
        with pytest.raises(RequestError, match="has no language-model head here; use embed"):
            llm.generate(PROMPTS)
        with pytest.raises(RequestError, match="has no language-model head here; use embed"):
            llm.score(PROMPTS, PROMPTS)
        with pytest.raises(RequestError, match="classify needs a classification head"):
            llm.classify(PROMPTS)
    with pytest.raises(ConfigError, match="runner='generate' needs a language-model head"):
        LLM(bare, runner="generate", **SMALL)


def save_classifier(folder: Path, name: str, **options: Any) -> None:
    base = name.partition("For")[0].removesuffix("Text") + "ForCausalLM"
    drawn = draw_options(base, 0) | {"pad_token_id": 0, **options}
    save_random_model(folder, name, drawn, 0)


@torch.inference_mode()
def reference_logits(folder: Path, architecture: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").float().eval()
    return [model(torch.tensor([ids])).logits[0] for ids in prompts]


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize(
    ("problem_type", "num_labels"),
    [(None, 3), (None, 1), ("multi_label_classification", 3), ("regression", 2), ("single_label_classification", 2)],
)
def test_classes_have_the_probabilities_of_transformers(
    tmp_path: Path, family: str, problem_type: str | None, num_labels: int
) -> None:
    architecture = f"{family}ForSequenceClassification"
    save_classifier(tmp_path, architecture, num_labels=num_labels, problem_type=problem_type)
    logits = reference_logits(tmp_path, architecture, PROMPTS)
    activate: Any = torch.sigmoid
    if problem_type == "regression":
        activate = torch.nn.Identity()
    elif problem_type != "multi_label_classification" and num_labels > 1:
        activate = torch.nn.Softmax(-1)
    with LLM(tmp_path, **CHUNKED) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        raw = llm.classify(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
    # A logit near zero is a difference of larger values, so all prompts' logits are compared as one array.
    assert_close(np.stack([output.outputs.probs for output in outputs]), activate(torch.stack(logits)))
    assert_close(np.stack([output.outputs.probs for output in raw]), torch.stack(logits))
    assert [output.outputs.label for output in outputs] == [f"LABEL_{int(theirs.argmax())}" for theirs in logits]


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("pad_token_id", [5, None])
def test_a_classifier_reads_the_last_token_that_is_no_padding(
    tmp_path: Path, family: str, pad_token_id: int | None
) -> None:
    architecture = f"{family}ForSequenceClassification"
    save_classifier(tmp_path, architecture, num_labels=3, pad_token_id=pad_token_id)
    prompts = [[7, 8, 9, 5, 5], [5, 7, 5, 8], [5, 5, 5], [5], [*PROMPTS[0][:60], *[5] * 20], [7, 8, 9]]
    logits = reference_logits(tmp_path, architecture, prompts)
    with LLM(tmp_path, **CHUNKED) as llm:
        outputs = llm.classify(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    assert_close(np.stack([output.outputs.probs for output in outputs]), torch.stack(logits))


def test_the_padding_of_a_classifier_is_transformers_own_where_the_config_has_none(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Gemma3TextForSequenceClassification", num_labels=2)
    config = json.loads((tmp_path / "config.json").read_text())
    for given, expected in ({}, 0), ({"pad_token_id": None}, None), ({"pad_token_id": 7}, 7):
        (tmp_path / "config.json").write_text(
            json.dumps({name: value for name, value in config.items() if name != "pad_token_id"} | given)
        )
        found = read_native_folder(tmp_path)
        assert found.pooling is not None
        assert found.pooling.pad_token_id == expected
        assert transformers.AutoConfig.from_pretrained(tmp_path).pad_token_id == expected


def test_every_architecture_has_the_padding_of_transformers_where_a_config_has_none() -> None:
    for name in REGISTRY:
        family = name.removesuffix("ForCausalLM")
        kinds = [getattr(transformers, f"{family}{ending}", None) for ending in ("TextConfig", "Config")]
        if family != name and (kind := next(filter(None, kinds), None)):
            assert get_model_class(name).config_defaults.get("pad_token_id") == kind().pad_token_id, name


@pytest.mark.parametrize(
    ("own", "config", "num_labels", "expected"),
    [
        ({"activation_fn": "torch.nn.modules.linear.Identity"}, {}, 1, torch.nn.Identity()),
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, {}, 3, torch.nn.Tanh()),
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, {"activation_fn": "torch.nn.Sigmoid"}, 3, torch.tanh),
        ({}, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, 3, torch.sigmoid),
        ({"model_type": "CrossEncoder", "activation_fn": None}, {}, 3, torch.nn.Identity()),
        ({"model_type": "CrossEncoder"}, {}, 1, torch.sigmoid),
        ({}, {}, 3, torch.nn.Softmax(-1)),
    ],
)
def test_a_cross_encoder_applies_what_the_newest_file_of_sentence_transformers_names(
    tmp_path: Path, own: dict[str, Any], config: dict[str, Any], num_labels: int, expected: Any
) -> None:
    """Version 6 has it in config_sentence_transformers.json, 4 and 5 in config.json under "sentence_transformers"."""
    architecture = "Qwen3ForSequenceClassification"
    save_classifier(tmp_path, architecture, num_labels=num_labels)
    logits = torch.stack(reference_logits(tmp_path, architecture, PROMPTS[:3]))
    (tmp_path / OWN).write_text(json.dumps(own))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "sentence_transformers": config}))
    with LLM(tmp_path, **SMALL) as llm:
        outputs = llm.classify(PROMPTS[:3], use_tqdm=False)
    assert_close(np.stack([output.outputs.probs for output in outputs]), expected(logits))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_that_is_accepted_can_be_computed(name: str) -> None:
    logits = torch.tensor([[-2.0, 0.5], [1.0, 3.0]])
    layer = torch.nn.Softmax(-1) if name == "Softmax" else getattr(torch.nn, name)()
    assert_close(activate(logits.numpy(), name), layer(logits))
    assert_close(DenseLayer(torch.eye(2), None, name)(logits), layer(logits))


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.PReLU", "my_package.Sigmoid", "Sigmoid"])
def test_other_activations_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / OWN).write_text(json.dumps({"activation_fn": name}))
    with pytest.raises(ModelError, match=rf"sentence_transformers.json has the activation '{name}'; supported are"):
        read_pooling(tmp_path, HeadConfig("sequence", ("LABEL_0",)), 8, is_encoder=False)


def test_a_cross_encoder_may_be_made_of_modules_whose_last_gives_scores(checkpoint: Checkpoint) -> None:
    folder = checkpoint("Qwen3ForCausalLM", 1)
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    dense = {"in_features": size, "out_features": 1, "activation_function": "torch.nn.Identity", "bias": False}
    write_modules(
        folder,
        "Pooling",
        "Dense",
        Pooling={"pooling_mode": "lasttoken"},
        Dense={**dense, "module_output_name": "scores"},
    )
    weight = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    logits = torch.stack([states[-1] @ weight[0] for states in reference_states(folder, PROMPTS[:3])])
    with LLM(folder, **SMALL) as llm:
        outputs = llm.classify(PROMPTS[:3], use_tqdm=False)
        rewards = llm.reward(PROMPTS[:3], use_tqdm=False)
    assert_close(np.stack([output.outputs.probs[0] for output in outputs]), logits.sigmoid())
    assert_close(np.float32([output.reward for output in rewards]), logits)


def test_labels_are_those_of_the_config(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Qwen3ForSequenceClassification", id2label={0: "bad", 1: "good"})
    [logits] = reference_logits(tmp_path, "Qwen3ForSequenceClassification", PROMPTS[:1])
    with LLM(tmp_path, **SMALL) as llm:
        [output] = llm.classify(PROMPTS[:1], use_tqdm=False)
        assert output.outputs.label == ("bad", "good")[int(logits.argmax())]
        with pytest.raises(RequestError, match="reward needs a head of one value, and this one has 2 classes"):
            llm.reward(PROMPTS)
        with pytest.raises(RequestError, match="embed needs an embedding model"):
            llm.embed(PROMPTS)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_rewards_are_the_values_of_the_head(tmp_path: Path, family: str) -> None:
    architecture = f"{family}ForSequenceClassification"
    save_classifier(tmp_path, architecture, num_labels=1)
    logits = reference_logits(tmp_path, architecture, PROMPTS)
    with LLM(tmp_path, **CHUNKED) as llm:
        outputs = llm.reward(PROMPTS, use_tqdm=False)
        squeezed = llm.reward(PROMPTS, PoolingParams(use_activation=True), use_tqdm=False)
    assert all(isinstance(output.reward, float) for output in outputs)
    assert_close(np.float32([output.reward for output in outputs]), torch.cat(logits))
    assert_close(np.float32([output.reward for output in squeezed]), torch.cat(logits).sigmoid())


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Mistral"])
def test_token_level_heads_give_a_value_for_each_token(tmp_path: Path, family: str) -> None:
    architecture = f"{family}ForTokenClassification"
    save_classifier(tmp_path, architecture, num_labels=1)
    logits = reference_logits(tmp_path, architecture, PROMPTS)
    with LLM(tmp_path, **CHUNKED) as llm:
        for _ in range(2):
            for output, theirs in zip(llm.reward(PROMPTS, use_tqdm=False), logits, strict=True):
                assert_close(output.reward, theirs[:, 0])


RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "is_original_qwen3_reranker": True}


@pytest.fixture
def reranker(checkpoint: Checkpoint) -> tuple[Path, torch.Tensor]:
    """A model that generates, and what it finds more likely after each prompt: the token 9, or 5."""
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    folder = checkpoint("Qwen3ForCausalLM", 1, **even)
    logits = torch.stack([found[-1] for found in reference_logits(folder, "Qwen3ForCausalLM", PROMPTS)])
    return folder, logits[:, 9] - logits[:, 5]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reranker_scores_by_its_two_tokens(reranker: tuple[Path, torch.Tensor], num_ranks: int) -> None:
    folder, margins = reranker
    overrides = {**RERANKER, "classifier_from_token": [5, 9]}
    with LLM(folder, hf_overrides=overrides, tensor_parallel_size=num_ranks, **CHUNKED) as llm:
        probs = [output.outputs.probs[0] for output in llm.classify(PROMPTS, use_tqdm=False)]
        rewards = [output.reward for output in llm.reward(PROMPTS, use_tqdm=False)]
    assert_close(np.float32(probs), margins.sigmoid())
    assert_close(np.float32(rewards), margins)


def test_a_reranker_may_be_one_by_the_files_of_sentence_transformers(reranker: tuple[Path, torch.Tensor]) -> None:
    folder, margins = reranker
    write_modules(folder, "LogitScore", LogitScore={"true_token_id": 9, "false_token_id": 5})
    with LLM(folder, **SMALL) as llm:
        assert_close(np.float32([output.reward for output in llm.reward(PROMPTS, use_tqdm=False)]), margins)


def test_the_tokens_of_a_reranker_may_be_given_as_texts(reranker: tuple[Path, torch.Tensor]) -> None:
    folder, _ = reranker
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 5, "yes": 9}}}))
    head = HeadConfig("vocabulary", ("LABEL_0",), vocabulary=("no", "yes"))
    assert read_pooling(folder, head, 64, is_encoder=False).token_ids == (5, 9)
    with pytest.raises(ModelError, match="classifier_from_token names 'ja', which is no token"):
        read_pooling(folder, HeadConfig("vocabulary", ("LABEL_0",), vocabulary=("ja",)), 64, is_encoder=False)


@pytest.mark.parametrize("architecture", ["Qwen3ForSequenceClassification", "Qwen3ForCausalLM"])
def test_two_ranks_give_the_values_of_one(tmp_path: Path, architecture: str) -> None:
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    save_classifier(tmp_path, architecture, **even)
    found = []
    for num_ranks in (1, 2):
        with LLM(tmp_path, runner="pooling", tensor_parallel_size=num_ranks, **CHUNKED) as llm:
            if architecture == "Qwen3ForCausalLM":
                found.append(np.stack(embeddings(llm, PROMPTS)))
            else:
                found.append(np.stack([output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)]))
    assert_close(*found)


def test_texts_may_be_as_long_as_the_model_and_no_longer(checkpoint: Checkpoint) -> None:
    with LLM(checkpoint("Qwen3ForCausalLM", 0), runner="pooling", max_model_len=40, **SMALL) as llm:
        assert len(embeddings(llm, [[1] * 40])) == 1
        with pytest.raises(RequestError, match="prompt 0 has 41 tokens, more than max_model_len=40; shorten it to 40"):
            llm.embed([[1] * 41])
        [whole, cut] = embeddings(llm, [[1] * 40, [1] * 41], tokenization_kwargs={"truncate_prompt_tokens": -1})
        assert_close(whole, cut)


def test_a_step_that_fails_is_run_again_with_nothing_of_it_in_the_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint("Qwen3ForCausalLM", 0), runner="pooling", **CHUNKED) as llm:
        expected = embeddings(llm, PROMPTS)
        llm.reset_prefix_cache()
        runner = llm.engine.check_open()
        wait, failures = runner.wait, [True, False]

        def fail_once(handle: Any) -> list[int]:
            if failures.pop(0) if failures else False:
                raise RuntimeError("a step failed")
            return wait(handle)

        monkeypatch.setattr(runner, "wait", fail_once)
        with pytest.raises(RuntimeError, match="a step failed"):
            llm.embed(PROMPTS, use_tqdm=False)
        assert llm.get_metrics().num_used_blocks == 0
        assert llm.is_finished()
        assert_close(np.stack(embeddings(llm, PROMPTS)), np.stack(expected))


@pytest.mark.parametrize("entry", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_decoders_that_look_both_ways_are_refused(checkpoint: Checkpoint, entry: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="which is not supported"):
        LLM(checkpoint("Qwen3ForCausalLM", 0), hf_overrides=entry, **SMALL)


@pytest.mark.parametrize(
    ("modules", "configs", "message"),
    [
        (["Pooling"], {"Pooling": {"pooling_mode_max_tokens": True}}, r"pools by \['max'\]; supported is one of"),
        (["Pooling"], {"Pooling": {"pooling_mode": ["cls", "mean"]}}, r"pools by \['cls', 'mean'\]"),
        (["Pooling", "Normalize", "Dense"], {}, "a Dense after Normalize"),
        (
            ["Pooling", "Dense"],
            {"Dense": {"in_features": 3, "out_features": 2}},
            "supported is a dense layer of 8 inputs",
        ),
        (["WordWeights"], {}, "has the module 'WordWeights'"),
        (["Normalize", "Pooling"], {}, "a Normalize of sentence_embedding in this place"),
        (["Pooling", "Normalize"], {"Normalize": {"module_input_name": "token_embeddings"}}, "of token_embeddings in"),
        (["Pooling", "Pooling"], {}, "has the module 'Pooling' in this place"),
        (["Dropout"], {}, "has no Pooling"),
    ],
)
def test_modules_that_are_not_supported_are_refused(
    tmp_path: Path, modules: list[str], configs: dict[str, Any], message: str
) -> None:
    write_modules(tmp_path, *modules, **configs)
    with pytest.raises(ModelError, match=message):
        read_pooling(tmp_path, None, 8, is_encoder=False)


@pytest.mark.parametrize(
    ("transformer", "message"),
    [
        ({"transformer_task": "fill-mask"}, "has 'fill-mask' with output None, which is not supported"),
        ({"modality_config": {"text": {"method_output_name": "pooler_output"}}}, "with output 'pooler_output'"),
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "processing_kwargs with add_special_tokens"),
        ({"processing_kwargs": {"text": {"padding": "longest"}, "common": {"return_tensors": "pt"}}}, None),
        ({"transformer_task": "feature-extraction", "max_seq_length": 7}, None),
    ],
)
def test_other_ways_to_read_a_text_are_refused(
    tmp_path: Path, transformer: dict[str, Any], message: str | None
) -> None:
    write_modules(tmp_path, "Pooling", "Dropout")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(transformer))
    with pytest.raises(ModelError, match=message) if message else nullcontext():
        assert read_pooling(tmp_path, None, 8, is_encoder=False).max_tokens == transformer.get("max_seq_length")


def test_modules_of_other_packages_are_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "my_code.Transformer"}]')
    with pytest.raises(ModelError, match=r"has the module 'my_code.Transformer' of a package of its own"):
        read_pooling(tmp_path, None, 8, is_encoder=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dimensions": 0}, "dimensions=0 must be"), ({"use_activation": 1.5}, "use_activation=1.5 is no bool")],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PoolingParams(**options)


def test_numpys_integers_are_whole_numbers() -> None:
    params = PoolingParams(dimensions=np.int64(7))  # type: ignore[arg-type]
    assert params == PoolingParams(dimensions=7)
    assert type(params.dimensions) is int
