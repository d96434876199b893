"""Encoders against transformers, for random small models in float32 on a CPU."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, ConfigError, ModelError, PoolingParams, RequestError
from nanoinfer.checkpoint.weights import ModelWeights
from nanoinfer.models.execution import PrefillGraphs, small_prefill_graphs
from tests.models.test_architectures import save_random_model
from tests.pooling.test_decoders import SMALL, assert_close, embeddings, normalized, write_modules

FAMILIES = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
PAD = 3
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 104,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "Bert": {"type_vocab_size": 2},
    "Roberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    "XLMRoberta": {"type_vocab_size": 1},
    "ModernBert": {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2, "bos_token_id": 1},
}
generator = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(PAD + 1, SIZES["vocab_size"], (length,), generator=generator).tolist()
    for length in (90, 63, 29, 1, 16, 40, 17, 49)
]
ENCODERS = {**SMALL, "max_num_batched_tokens": 96, "max_num_seqs": 3}  # texts share steps, or have one of their own


def save_encoder(folder: Path, architecture: str, **options: Any) -> None:
    family = architecture.partition("For")[0].removesuffix("Model")
    save_random_model(folder, architecture, {**SIZES, **VARIANTS[family], **options}, 0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`encoder("Bert")`: the folder of a random BertModel, built once."""
    folders: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            save_encoder(folders[family], f"{family}Model")
        return folders[family]

    return build


@torch.inference_mode()
def reference(folder: Path, architecture: str, prompts: list[list[int]], **options: Any) -> list[Any]:
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").float().eval()
    return [model(torch.tensor([ids]), **options) for ids in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_is_that_of_transformers(encoder: Callable[[str], Path], family: str) -> None:
    """A text has the same embedding in a step with others, and in one of its own."""
    outputs = reference(encoder(family), f"{family}Model", PROMPTS)
    expected = [normalized(output.last_hidden_state[0].mean(0)) for output in outputs]
    with LLM(encoder(family), **ENCODERS) as llm:
        for ours in (embeddings(llm, PROMPTS), [embeddings(llm, [ids])[0] for ids in PROMPTS]):
            for one, theirs in zip(ours, expected, strict=True):
                assert_close(one, theirs)
        metrics = llm.get_metrics()
        assert (metrics.num_used_blocks, metrics.cached_tokens) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_pieces_give_the_embeddings_of_whole_steps(encoder: Callable[[str], Path], family: str) -> None:
    """Without the graphs of the pieces, which a CPU has none of; what is padding is NaN, and reaches no token."""
    with LLM(encoder(family), **ENCODERS) as llm:
        expected = embeddings(llm, PROMPTS)
        runner: Any = llm.engine.runner
        small = small_prefill_graphs(runner.model.model, 96, only_pools=True)
        assert small is not None
        small._has_failed = True
        runner.model_runner.state.buffers.prefill_graphs = PrefillGraphs(small)
        for buffer in small.buffers.tensors:
            buffer.fill_(torch.nan)
        for ours, theirs in zip(embeddings(llm, PROMPTS), expected, strict=True):
            assert_close(ours, torch.from_numpy(theirs))
        assert small._num_steps[64] >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_token_is_pooled_where_the_folder_says_so(tmp_path: Path, family: str) -> None:
    save_encoder(tmp_path, f"{family}Model")
    write_modules(tmp_path, "Pooling", Pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    outputs = reference(tmp_path, f"{family}Model", PROMPTS)
    with LLM(tmp_path, **ENCODERS) as llm:
        for ours, output in zip(embeddings(llm, PROMPTS), outputs, strict=True):
            assert_close(ours, output.last_hidden_state[0, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(encoder: Callable[[str], Path], family: str) -> None:
    outputs = reference(encoder(family), f"{family}Model", PROMPTS, output_hidden_states=True)
    with LLM(encoder(family), **ENCODERS) as llm:
        found = llm.embed(PROMPTS, use_tqdm=False, hidden_states=[0, 2, -1])
    for output, theirs in zip(found, outputs, strict=True):
        assert output.hidden_states is not None
        for layer, ours in output.hidden_states.items():
            assert_close(ours, theirs.hidden_states[layer][0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int) -> None:
    architecture = f"{family}ForSequenceClassification"
    save_encoder(tmp_path, architecture, num_labels=num_labels)
    logits = torch.cat([output.logits for output in reference(tmp_path, architecture, PROMPTS)])
    probs = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
    with LLM(tmp_path, **ENCODERS) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        raw = llm.classify(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
    assert_close(np.stack([output.outputs.probs for output in outputs]), probs)
    # What is summed up to a logit is about as large as 1, also where the sum is not.
    assert_close(1 + np.stack([output.outputs.probs for output in raw]), 1 + logits)


def test_modernbert_may_classify_the_mean(tmp_path: Path) -> None:
    options = {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "attention_bias": True}
    save_encoder(tmp_path, "ModernBertForSequenceClassification", mlp_bias=True, num_labels=1, **options)
    outputs = reference(tmp_path, "ModernBertForSequenceClassification", PROMPTS)
    with LLM(tmp_path, **ENCODERS) as llm:
        rewards = np.float32([output.reward for output in llm.reward(PROMPTS, use_tqdm=False)])
    assert_close(rewards, torch.cat([output.logits[:, 0] for output in outputs]))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_classified(tmp_path: Path, family: str) -> None:
    architecture = f"{family}ForTokenClassification"
    save_encoder(tmp_path, architecture, num_labels=3)
    outputs = reference(tmp_path, architecture, PROMPTS)
    with LLM(tmp_path, **ENCODERS) as llm:
        for ours, theirs in zip(llm.classify(PROMPTS, use_tqdm=False), outputs, strict=True):
            assert_close(ours.outputs.probs, theirs.logits[0].softmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_embeddings_of_one(encoder: Callable[[str], Path], family: str) -> None:
    found = []
    for num_ranks in (1, 2):
        with LLM(encoder(family), tensor_parallel_size=num_ranks, **ENCODERS) as llm:
            found.append(np.stack(embeddings(llm, PROMPTS)))
    assert_close(*found)


def write_tokenizer(folder: Path, **entries: Any) -> None:
    """Write a tokenizer of words, which marks the two texts of a pair as BERT's does."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "red", "green", "blue", "what", "is", "sky", "the"]
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **entries}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


PAIRS = [("what is the sky", "the sky is blue"), ("what is red", "green"), ("red", "the sky the sky the sky is blue")]


@torch.inference_mode()
def test_cross_encoders_take_pairs_whose_texts_they_tell_apart(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["classifier.weight"] *= 100  # else scores are near 0, where rounding is a large part of them
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits[0] for pair in PAIRS])
    alone = model(**tokenizer("the sky", return_tensors="pt")).logits[0]
    with LLM(tmp_path, **ENCODERS) as llm:
        outputs = llm.reward([*PAIRS, "the sky"], use_tqdm=False)
        [probs] = llm.classify({"text": PAIRS[0][0], "text_pair": PAIRS[0][1]}, use_tqdm=False)
        [cut] = llm.reward([PAIRS[0]], use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 7})
    assert_close(np.float32([output.reward for output in outputs]), torch.cat((logits, alone)))
    assert_close(probs.outputs.probs, logits[:1].sigmoid())
    assert cut.prompt_token_ids == tokenizer(*PAIRS[0], truncation=True, max_length=7)["input_ids"]


def test_a_cross_encoders_prompt_begins_the_first_text_and_its_tokenizer_says_how_long_pairs_are(
    tmp_path: Path,
) -> None:
    save_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path, model_max_length=7)
    own = {"prompts": {"q": "blue ", "none": ""}, "default_prompt_name": "q"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(own))
    config = json.loads((tmp_path / "config.json").read_text())
    named = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **named}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with LLM(tmp_path, **ENCODERS) as llm:
        for first, options in ("blue red", {}), ("red", {"prompt_name": "none"}):
            [output] = llm.classify([("red", "green")], use_tqdm=False, **options)
            [reward] = llm.reward([("red", "green")], use_tqdm=False, **options)
            [later] = asyncio.run(llm.aclassify([("red", "green")], **options))
            ids = tokenizer(first, "green")["input_ids"]
            assert output.prompt_token_ids == reward.prompt_token_ids == later.prompt_token_ids == ids
        with pytest.raises(RequestError, match="prompt 0 has 12 tokens, more than max_seq_length=7"):
            llm.classify([("red", "the " * 7)], use_tqdm=False)
        with pytest.raises(RequestError, match="prompt_name='p' is not one of the prompts"):
            llm.classify([("red", "green")], prompt_name="p")


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_prompts_that_are_not_to_be_pooled_are_refused(
    encoder: Callable[[str], Path], tmp_path: Path, mode: str
) -> None:
    shutil.copytree(encoder("Bert"), tmp_path, dirs_exist_ok=True)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "Pooling", Pooling={"pooling_mode": mode, "include_prompt": False})
    own = {"prompts": {"query": "what "}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(own))
    with LLM(tmp_path, **ENCODERS) as llm:
        assert len(llm.embed("sky", use_tqdm=False)) == 1
        with pytest.raises(RequestError, match=r"prompt_name='query': .* leaves prompts out of what it pools"):
            llm.embed("sky", prompt_name="query")


def test_texts_that_a_folder_writes_out_by_its_chat_template_are_given_as_token_ids(
    encoder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(encoder("Bert"), tmp_path, dirs_exist_ok=True)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "Pooling")
    method = {"method": "forward", "method_output_name": "last_hidden_state"}
    transformer = {"modality_config": {"text": method, "message": {**method, "format": "flat"}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(transformer))
    with LLM(tmp_path, **ENCODERS) as llm:
        assert len(llm.embed([4, 5], use_tqdm=False)) == 1
        with pytest.raises(RequestError, match=r"has texts written out by the chat template \(modality_config\)"):
            llm.embed("sky")


def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    save_encoder(tmp_path / "bert", "BertModel")
    write_tokenizer(tmp_path / "bert")
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    word = Transformer(str(tmp_path / "bert"), max_seq_length=8)
    parts = [word, Pooling(48, "mean"), Dense(48, 12), Normalize()]
    prompts = {"query": "what is ", "document": ""}
    theirs = sentence_transformers.SentenceTransformer(modules=parts, prompts=prompts, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    texts = ["the sky", "red green blue", "blue"]
    with LLM(tmp_path / "saved", **ENCODERS) as llm:
        assert_close(np.stack(embeddings(llm, texts)), theirs.encode(texts))
        assert_close(np.stack(embeddings(llm, texts, prompt_name="query")), theirs.encode(texts, prompt_name="query"))
        with pytest.raises(RequestError, match="prompt_name='question' is not one of the prompts"):
            llm.embed(texts, prompt_name="question")
        with pytest.raises(RequestError, match="prompt 0 has 12 tokens, more than max_seq_length=8"):
            llm.embed(["red " * 10])
        [cut] = embeddings(llm, ["red " * 10], tokenization_kwargs={"truncate_prompt_tokens": -1})
        assert_close(cut, theirs.encode("red " * 10))


def test_a_text_is_whole_in_one_step(encoder: Callable[[str], Path]) -> None:
    with LLM(encoder("Bert"), **{**ENCODERS, "max_num_batched_tokens": 49}) as llm:
        with pytest.raises(RequestError, match=r"prompt 0 has 90 tokens, more than max_num_batched_tokens=49; shorten"):
            llm.embed(PROMPTS)
        assert len(llm.embed(PROMPTS[2:], use_tqdm=False)) == 6


def test_roberta_has_fewer_positions_than_its_table(encoder: Callable[[str], Path]) -> None:
    with LLM(encoder("Roberta"), **SMALL) as llm:
        assert llm.max_model_len == SIZES["max_position_embeddings"] - PAD - 1
        assert len(llm.embed([[7] * 100], use_tqdm=False)) == 1
        with pytest.raises(RequestError, match="prompt 0 has 101 tokens, more than max_model_len=100"):
            llm.embed([[7] * 101])


def test_old_names_of_layer_norms_and_words_for_filling_in_are_read(tmp_path: Path) -> None:
    save_encoder(tmp_path, "BertModel")
    with LLM(tmp_path, **ENCODERS) as llm:
        expected = np.stack(embeddings(llm, PROMPTS))
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }
    old["cls.predictions.bias"] = torch.zeros(4)
    old["bert.embeddings.position_ids"] = torch.arange(104)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(tmp_path, **ENCODERS) as llm:
        assert_close(np.stack(embeddings(llm, PROMPTS)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_replaced_by_the_names_of_the_checkpoint(encoder: Callable[[str], Path], family: str) -> None:
    """A wrong name is refused with close ones, all of which the model knows."""
    weights = load_file(encoder(family) / "model.safetensors")
    with LLM(encoder(family), **ENCODERS) as llm:
        expected = np.stack(embeddings(llm, PROMPTS))
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(weights)
        assert_close(np.stack(embeddings(llm, PROMPTS)), expected)
        name = next(name for name in weights if ".1." in name)
        with pytest.raises(ModelError, match=rf"'{name}s' cannot be updated: .* close ones are {name},"):
            llm.update_weights({f"{name}s": weights[name]})
        model = llm.engine.runner.model
        names = ModelWeights(model).names()
        assert {name for name in weights if not name.startswith("pooler.")} <= {*names}
        parameters = {name for name, _ in model.named_parameters()}
        assert {model.locate(name)[0] for name in names} == parameters


def test_random_weights_need_no_checkpoint(encoder: Callable[[str], Path]) -> None:
    with LLM(encoder("ModernBert"), load_format="dummy", **ENCODERS) as llm:
        assert np.isfinite(np.stack(embeddings(llm, PROMPTS))).all()


@pytest.mark.parametrize(
    ("family", "entry", "message"),
    [
        ("Bert", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'; supported are gelu"),
        ("Bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("Bert", {"is_decoder": True}, "is_decoder=True, which is not supported"),
        ("ModernBert", {"layer_types": ["full"] * 4}, "it must name sliding_attention or full_attention"),
    ],
)
def test_encoders_that_are_not_supported_are_refused(
    encoder: Callable[[str], Path], family: str, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(encoder(family), hf_overrides=entry, **SMALL)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_encoders_are_not_rounded_to_fewer_bits(encoder: Callable[[str], Path], quantization: str) -> None:
    with pytest.raises((ConfigError, ModelError), match="encoders have their weights in 16 or 32 bits"):
        LLM(encoder("Bert"), quantization=quantization, **SMALL)
