"""Texts to token ids and back, and the ids that end a completion, with a tokenizer of seven words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as WordTokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as InTurn
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from nanoinfer import StructuredOutputsParams, tiny_model_path
from nanoinfer.constraints.grammars import GrammarLibrary
from nanoinfer.errors import ModelError, RequestError
from nanoinfer.text.tokenizer import Tokenizer, load_tokenizer, read_stop_token_ids

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3, "one": 4, "two": 5, "three": 6}
BOS, EOS = 1, 2


def save_tokenizer(folder: Path, adds_bos: bool = True, eos: str | None = "</s>") -> None:
    from transformers import PreTrainedTokenizerFast

    words = WordTokenizer(WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    if adds_bos:
        words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"bos_token": "<s>"} | ({"eos_token": eos} if eos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.save_pretrained(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def test_text_that_begins_with_bos_does_not_get_a_second(tokenizer: Tokenizer) -> None:
    assert tokenizer.hf("<s>one two")["input_ids"] == [BOS, BOS, 4, 5], "the tokenizer itself adds it blindly"
    texts = ["one two", "<s>one two", "<s>", "<s><s>one", "one <s> <s> two"]
    assert tokenizer.encode(texts) == [[BOS, 4, 5], [BOS, 4, 5], [BOS], [BOS, BOS, 4], [BOS, 4, BOS, BOS, 5]]
    assert tokenizer.encode([]) == []


def test_a_tokenizer_that_adds_no_bos_keeps_what_is_written(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, adds_bos=False)
    assert Tokenizer(tmp_path).encode(["one", "<s>one"]) == [[4], [BOS, 4]]


def test_text_that_a_template_has_written_gets_no_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(["<s>one two", "one"], add_special_tokens=False) == [[BOS, 4, 5], [4]]


# What a call of transformers' sets, and what the call after it may undo.
INTERFERENCES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "truncated": (lambda backend: backend.enable_truncation(2), lambda _: None),
    "padded, for a moment": (lambda backend: backend.enable_padding(length=9), lambda backend: backend.no_padding()),
    "special tokens split": (lambda backend: setattr(backend, "encode_special_tokens", True), lambda _: None),
}


@pytest.mark.parametrize(("interfere", "undo"), INTERFERENCES.values(), ids=INTERFERENCES)
def test_calls_of_the_same_tokenizer_by_a_users_thread_change_none_of_our_texts(
    tokenizer: Tokenizer, interfere: Callable[[Any], object], undo: Callable[[Any], object]
) -> None:
    class Interfering:
        """The tokenizer's part in Rust. Whenever ours has set it up, another thread's call of it begins."""

        def __getattr__(self, name: str) -> Any:
            return getattr(shared, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(shared, name, value)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            interfere(shared)
            found = shared.encode_batch_fast(texts, **options)
            undo(shared)
            return found

        @classmethod
        def from_str(cls, text: str) -> Any:
            return WordTokenizer.from_str(text)

    texts, expected = ["one two three<end>", "two"], [[BOS, 4, 5, 6, 3], [BOS, 5]]
    assert tokenizer.encode(texts) == expected
    shared = tokenizer._backend
    tokenizer._backend = Interfering()
    assert tokenizer.encode(texts) == expected
    interfere(shared)
    assert tokenizer.encode(texts) == expected, "it is not shared any more"


def test_decoding_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, 4, 3, 6, EOS]) == "one three"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([BOS, 4, 3], skip_special_tokens=False) == "<s> one <end>"


def test_ids_are_those_of_transformers_whatever_was_asked_before(tmp_path: Path) -> None:
    """The tokenizer's file, and earlier calls, may cut texts and fill them up."""
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": truncation, "padding": padding}))
    tokenizer, texts = Tokenizer(tmp_path), ["one two three", "", "<end> three", "öne two", "two"]
    for add_special_tokens in (True, False, True):
        tokenizer.encode_whole(texts, max_tokens=1)
        tokenizer.hf(texts, padding="max_length", max_length=9, truncation=True)
        expected = tokenizer.hf(texts, add_special_tokens=add_special_tokens)["input_ids"]
        tokenizer.hf(texts, padding="max_length", max_length=9, truncation=True, split_special_tokens=True)
        assert tokenizer._token_ids(texts, add_special_tokens) == expected
    assert tokenizer._agrees == {True: True, False: True}
    assert tokenizer.encode_whole(texts) == (tokenizer.hf(texts)["input_ids"], [None] * 5)


def test_a_class_that_encodes_in_its_own_way_is_asked_itself(tokenizer: Tokenizer) -> None:
    class Shouting(type(tokenizer.hf)):  # type: ignore[misc]
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            return super().__call__([one.replace("!", " one") for one in text], *args, **options)

    tokenizer.hf.__class__ = Shouting
    assert tokenizer._token_ids(["two"], add_special_tokens=False) == [[5]]
    assert tokenizer._token_ids(["two!"], add_special_tokens=False) == [[5, 4]]
    assert tokenizer._agrees == {False: False}


# --- loading ---


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", None])
def test_whatever_class_the_checkpoint_names_the_ids_are_those_of_auto_tokenizer(
    name: str | None, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_path(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    text = "<|im_start|>user\nwörld  12+34=?<|im_end|>\n"
    ours, theirs = Tokenizer(tmp_path).hf, AutoTokenizer.from_pretrained(tiny_model_path())
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(range(400)) == theirs.decode(range(400))
    assert ours.eos_token_id == theirs.eos_token_id


def save_byte_level(folder: Path, adds_bos: bool = False, **settings: Any) -> WordTokenizer:
    """Save a tokenizer as Llama 3 and Qwen3.5 have it: numbers in threes, words with their marks."""
    backend = WordTokenizer(BPE(ignore_merges=True))
    words = Split(Regex(r"\p{N}{1,3}| ?[\p{L}\p{M}]+|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated")
    backend.pre_tokenizer = InTurn([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(special_tokens=["<bos>", "<eos>"], vocab_size=330, initial_alphabet=ByteLevel.alphabet())
    backend.train_from_iterator(["123 456 नमस्ते हिन्दी don't we'll  the"] * 9, trainer)
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return backend


@pytest.mark.parametrize("model_type", [None, "llama", "granite", "qwen3_5"])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "XLMRobertaTokenizer", "Mine"]
)
def test_a_class_of_another_kind_changes_nothing_of_what_tokenizer_json_says(
    name: str, model_type: str | None, tmp_path: Path
) -> None:
    backend = save_byte_level(tmp_path, tokenizer_class=name)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer(tmp_path)
    texts = ["the 123456", "नमस्ते हिन्दी", "<bos>don't we'll<eos>  the", " it\n\n"]
    expected = [backend.encode(text).ids for text in texts]
    assert tokenizer.encode(texts[:2] + texts[3:]) == expected[:2] + expected[3:], "no BOS, as the file adds none"
    assert tokenizer.encode(texts, add_special_tokens=False) == expected
    assert tokenizer.hf.eos_token == "<eos>"
    for text, ids in zip(texts, expected, strict=True):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert "".join(detokenizer.decode([token_id]) for token_id in ids) == text


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_bos_is_added_as_tokenizer_json_says_whatever_else_does(adds_bos: bool, name: str, tmp_path: Path) -> None:
    save_byte_level(tmp_path, adds_bos, tokenizer_class=name, add_bos_token=not adds_bos)
    [ids] = Tokenizer(tmp_path).encode(["the"])
    assert (ids[0] == 0) is adds_bos


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer"])
def test_what_a_later_transformers_has_saved_loads(name: str, tmp_path: Path) -> None:
    save_byte_level(tmp_path, tokenizer_class=name, extra_special_tokens=["<eos>"], is_local=True, backend="tokenizers")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([1, *tokenizer.encode(["the"])[0]]) == "the"


def test_a_tokenizer_that_is_too_large_even_without_added_tokens_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = save_byte_level(tmp_path)
    backend.add_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    num_tokens = backend.get_vocab_size()
    for vocab_size, warns in ((num_tokens, False), (num_tokens - 1, False), (num_tokens - 2, True), (None, False)):
        caplog.clear()
        load_tokenizer(tmp_path, vocab_size)
        assert (f"has {num_tokens} tokens, and config.json vocab_size={vocab_size}; it may be" in caplog.text) == warns


@pytest.mark.parametrize("num_missing", [0, 1, 20])
def test_a_grammar_allows_only_tokens_that_the_model_has(num_missing: int, tmp_path: Path) -> None:
    """The last ones of the vocabulary are merged: "नमस्ते", say."""
    pytest.importorskip("llguidance")
    backend = save_byte_level(tmp_path)
    tokenizer, vocab_size = Tokenizer(tmp_path), backend.get_vocab_size() - num_missing
    library = GrammarLibrary(tokenizer, vocab_size, frozenset({1}), ())
    mask = library.compile(StructuredOutputsParams(regex="नमस्ते हिन्दी|the")).first_mask
    allowed = {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}
    data = {i: tokenizer._all_tokens.bytes_of(i) for i in range(2, vocab_size)}
    texts = "नमस्ते हिन्दी".encode(), b"the"
    assert allowed == {i for i, begin in data.items() if any(text.startswith(begin) for text in texts)}


def test_a_damaged_tokenizer_is_refused_by_folder(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError) as error:
        load_tokenizer(tmp_path)
    assert str(error.value).startswith(f"the tokenizer in {tmp_path} cannot be loaded (")
    assert str(error.value).endswith("check its files")


# --- stop ids ---


@pytest.mark.parametrize(
    ("generation_eos", "stop"), [(3, {EOS, 3}), ([3, 6], {EOS, 3, 6}), (EOS, {EOS}), (None, {EOS}), ([], {EOS})]
)
def test_the_stop_ids_are_the_tokenizers_and_those_of_generation_config(
    generation_eos: int | list[int] | None, stop: set[int], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert read_stop_token_ids(tmp_path, tokenizer) == stop


def test_the_stop_ids_of_config_json_count_only_without_generation_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5]}))
    assert read_stop_token_ids(tmp_path, tokenizer) == {EOS, 5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert read_stop_token_ids(tmp_path, tokenizer) == {EOS, 6}


def test_without_a_tokenizer_the_files_alone_decide(tmp_path: Path) -> None:
    assert read_stop_token_ids(tmp_path, None) == frozenset()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_stop_token_ids(tmp_path, None) == {7, 8}


def test_a_tokenizer_without_eos_adds_no_stop_id(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, eos=None)
    assert read_stop_token_ids(tmp_path, Tokenizer(tmp_path)) == frozenset()


def test_what_the_tokenizer_cannot_decode_is_an_error_alone_and_missing_in_a_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PanicError(BaseException):
        """As those of Rust code."""

    def panic(token_ids: list[int], *_: object, **__: object) -> str:
        if 5 in token_ids:
            raise PanicError("called unwrap on None")
        return "x" * len(token_ids)

    monkeypatch.setattr(tokenizer, "hf", SimpleNamespace(decode=panic))
    with pytest.raises(RequestError, match=r"cannot decode \[4, 5\] \(called unwrap on None\)"):
        tokenizer.decode([4, 5])
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.decode([4]), detokenizer.decode([5]), detokenizer.decode([4], final=True)] == ["x", "", "x"]
    assert caplog.text.count("a token has no text: the tokenizer cannot decode [5] (called unwrap on None)") == 1
