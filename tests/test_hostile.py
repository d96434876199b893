"""Checkpoint folders and prompts that mean harm, or were damaged: an error that names them, and nothing else."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import (
    LLM,
    ModelError,
    NanoinferError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    errors,
    tiny_model_path,
)

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(tiny_model_path(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", num_kvcache_blocks=16) as llm:
        yield llm


def change_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def refusal(folder: Path, **options: Any) -> str:
    """The message with which a folder is refused."""
    with pytest.raises(NanoinferError) as error:
        LLM(folder, device="cpu", num_kvcache_blocks=16, **options).close()
    assert isinstance(error.value, ValueError)
    return str(error.value)


def test_every_error_of_the_tree_is_a_value_error_or_a_runtime_error() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type) and item.__module__ == errors.__name__]
    tree = [item for item in classes if item is not NanoinferError]
    assert len(tree) == 7
    assert all(issubclass(item, NanoinferError) and issubclass(item, (ValueError, RuntimeError)) for item in tree)


# --- config.json ---

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "max_position_embeddings")


@pytest.mark.parametrize("name", [*SIZES, "num_hidden_layers", "rms_norm_eps"])
def test_a_size_beyond_any_model_is_refused_by_name(folder: Path, name: str) -> None:
    for value in (2**24 + 2, 10**12, 10**400):
        if name == "rms_norm_eps":
            value **= 5
        change_json(folder / "config.json", **{name: value})
        assert f"config.json has {name}={value}, beyond any model" in refusal(folder)


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 2**24, "hidden_size": 2**24}, {"num_attention_heads": 2**24}], ids=str
)
def test_a_model_that_no_memory_can_hold_is_refused_with_the_file(folder: Path, sizes: dict[str, int]) -> None:
    change_json(folder / "config.json", head_dim=2**24, **sizes)
    assert f"cpu has too little memory for the model of {folder}/config.json" in refusal(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("rope_scaling", "message"),
    [
        ({"rope_type": "linear", "factor": 1e308}, "factor=1e+308, beyond any model"),
        ({"rope_type": "linear", "factor": 1e20}, "stretches the context to 4096"),
        ({"rope_type": "linear", "factor": 1e-9}, "stretches the context to 0 tokens"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": "x"}, "beta_fast='x'; it must be a positive number"),
        ({"rope_type": "yarn", "factor": 4, "attention_factor": "x"}, "attention_factor='x'; it must be a positive"),
        ({"rope_type": "yarn", "factor": 4, "mscale": []}, r"mscale=\[\]; it must be a positive number"),
        ({"rope_type": "llama3", "factor": 4, "low_freq_factor": []}, r"low_freq_factor=\[\]; it must be a positive"),
        ({"rope_type": "yarn", "factor": 4, "rope_theta": 1}, "beyond what can be computed"),
    ],
    ids=str,
)
def test_rope_parameters_that_make_no_sense_are_named(folder: Path, rope_scaling: dict, message: str) -> None:
    change_json(folder / "config.json", rope_scaling=rope_scaling)
    with pytest.raises(ModelError, match=message.replace("+", r"\+")):
        LLM(folder, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": 1', b"", b"\0" * 99, b"\xff\xfe"])
def test_a_json_file_that_is_none_is_refused_by_name(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_json_file_that_is_a_folder_or_a_device_is_refused_and_not_read(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert f"{folder / name} is no file" in refusal(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{folder / name} is no file" in refusal(folder)


# --- weights ---


def change_header(path: Path, change: Callable[[dict], Any]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F64"},
        {"dtype": "XX"},
        {"dtype": None},
        {"shape": [-192]},
        {"shape": [10**30]},
        {"shape": [2**40, 2**40]},
        {"shape": "192"},
        {"data_offsets": [0, 384]},
        {"data_offsets": [10**15, 10**15 + 384]},
        {"data_offsets": [384, 0]},
        {"data_offsets": [-384, 0]},
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused_with_the_file(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "model.safetensors"
    change_header(path, lambda header: header[NORM].update(change))
    assert f"{path} is not a valid safetensors file" in refusal(folder)


def test_weights_that_are_no_floating_point_numbers_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {NORM: weights[NORM].to(torch.int16)}, folder / "model.safetensors")
    assert f"{NORM} in {folder}: it has torch.int16, and only floating-point" in refusal(folder)


def test_an_index_may_only_name_files_of_its_folder(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / "model.safetensors").rename(outside / "model.safetensors")  # in the folder, it would be read alone
    (folder / "link").symlink_to(outside)
    index = folder / "model.safetensors.index.json"
    for name in ("../outside/model.safetensors", "link/model.safetensors", str(outside / "model.safetensors"), ".", 3):
        index.write_text(json.dumps({"weight_map": {NORM: name}}))
        assert f"{index} names {name!r:.99}, which is no file of its folder" in refusal(folder)
    for name in ("..", "", "\0", "\ud800", "link", "no.safetensors"):
        index.write_text(json.dumps({"weight_map": {NORM: name}}))
        assert f"{folder} lacks" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {NORM: "x" * 5000}}))
    assert len(refusal(folder)) < 500


def test_a_file_of_the_folder_may_be_a_link_as_in_the_hubs_cache_but_no_device(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    LLM(folder, device="cpu", num_kvcache_blocks=16).close()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "lacks model.safetensors" in refusal(folder)


# --- tokenizer ---


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tokenizer_with_more_tokens_than_the_model_loads_and_prompts_with_them_are_refused(
    folder: Path, replicas: int
) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"] += [last | {"id": 1024 + i, "content": f"<new{i}>"} for i in range(40)]
    path.write_text(json.dumps(content))
    said = (
        "prompt 1 has '<new1>', a token that the tokenizer has (id 1025) and the model has not: its ids are 0 to 1023"
    )
    with LLM(folder, device="cpu", num_kvcache_blocks=16, data_parallel_size=replicas) as llm:
        good, bad = llm.generate(["a", "a<new1>"], ONE, use_tqdm=False, on_error="return")
        assert (good.outputs[0].error, bad.outputs[0].error) == (None, f"{said}; leave that text out")
        with pytest.raises(RequestError, match="has '<new1>', a token"):
            llm.embed(["b", "<new1>"], use_tqdm=False)
        assert llm.encode("<new1>a")[0] == 1025
        assert llm.decode(llm.encode("<new1>a"), skip_special_tokens=False) == "<new1>a"
        forms = [StructuredOutputsParams(choice=["12", "7"]), StructuredOutputsParams(regex="[0-9]{2}")]
        params = [SamplingParams(temperature=0, max_tokens=8, structured_outputs=form) for form in forms]
        params += [SamplingParams(max_tokens=2, bad_words=["<new1>", "a<new39>"], min_tokens=1, logprobs=-1)]
        params += [SamplingParams(max_tokens=2, stop_token_ids=[1025], min_tokens=1)]
        texts = [output.text for output in llm.generate(["a"] * 4, params, use_tqdm=False)]
        assert texts[0] in ("12", "7")
        assert texts[1].isdigit()
        for options in ({"allowed_token_ids": [1025]}, {"logit_bias": {1025: 1.0}}):
            with pytest.raises(RequestError, match="token id 1025, outside the vocabulary; ids are 0 to 1023"):
                llm.generate("a", SamplingParams(**options), use_tqdm=False)


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    marker = folder.parent / "ran"
    for name in ("evil.py", "tokenization_evil.py", "modeling_evil.py", "setup.py", "conftest.py", "__init__.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    auto_map["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
    change_json(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Evil")
    change_json(folder / "config.json", auto_map=auto_map, custom_pipelines={"text-generation": {"impl": "evil.Evil"}})
    try:
        with LLM(folder, device="cpu", num_kvcache_blocks=16) as llm:
            llm.generate("a", ONE, use_tqdm=False)
    except ModelError as error:
        assert str(folder) in str(error)  # noqa: PT017
    assert not marker.exists()


# --- prompts ---


@pytest.mark.parametrize("prompt", ["\ud800", "a\udfffb"])
def test_half_a_character_is_refused(llm: LLM, prompt: str) -> None:
    with pytest.raises(RequestError, match="prompt 0 has a lone surrogate"):
        llm.generate(prompt, ONE, use_tqdm=False)


@pytest.mark.parametrize("prompt", ["\0", "a\0b", "\x01\x7f", "\ufffe\U0010ffff", "\u202e" * 9, "e\u0301" * 50])
def test_any_other_text_is_a_prompt(llm: LLM, prompt: str) -> None:
    [output] = llm.generate(prompt, ONE, use_tqdm=False)
    assert output.prompt == prompt
    assert llm.decode(output.prompt_token_ids) == prompt


def test_a_text_of_100_megabytes_is_refused_at_once(llm: LLM) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"prompt 1 has 100000000 characters, and max_model_len tokens hold \d+ at"):
        llm.generate(["a", " " * 100_000_000], ONE, use_tqdm=False)
    assert time.monotonic() - started < 2


def test_a_tokenizer_that_panics_is_an_error_of_the_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As the tokenizers library's: no Exception."""

    def panic(*_: object, **__: object) -> None:
        raise PanicError("retry-limit-in-match over")

    assert llm.engine.tokenizer is not None
    monkeypatch.setattr(llm.engine.tokenizer, "hf", panic)
    monkeypatch.setattr(llm.engine.tokenizer, "_agrees", {})  # so that it is asked
    with pytest.raises(RequestError, match=r"the tokenizer cannot encode a prompt .retry-limit"):
        llm.engine.tokenizer.encode(["a"], add_special_tokens=False)


def test_special_tokens_in_a_users_text_count_as_such(llm: LLM) -> None:
    assert llm.encode("<|im_end|>") == [llm.tokenizer.convert_tokens_to_ids("<|im_end|>")]


@pytest.mark.parametrize("count", [600, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_short_prompts_take_no_more_time_each_than_a_few(llm: LLM, count: int) -> None:
    started = time.monotonic()
    outputs = llm.generate(["a"] * count, ONE, use_tqdm=False)
    assert len(outputs) == count
    assert {output.text for output in outputs} == {outputs[0].text}
    assert time.monotonic() - started < 10 + count / 500
