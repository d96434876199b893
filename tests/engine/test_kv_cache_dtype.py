"""An engine whose KV cache is in 8 bits, on a CPU in float32: no way of computing a sequence changes its tokens.

Every token attends to keys and values as the cache holds them, also to those of its own step. So chunks, cached
prefixes, preemption and the number of ranks change sums by their last bits alone.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.errors import ConfigError
from tests.engine.helpers import num_found
from tests.tiny_checkpoint.tasks import TASKS, held_out_examples

Checkpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65)  # around the edges of blocks of 16 tokens, and of 64
FORMATS = pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(random_checkpoint: Checkpoint) -> Callable[[str], list[list[int]]]:
    """What the default options generate after `random_prompts(LENGTHS)`."""
    found: dict[str, list[list[int]]] = {}

    def tokens(kv_cache_dtype: str) -> list[list[int]]:
        if kv_cache_dtype not in found:
            with LLM(random_checkpoint(), device="cpu", kv_cache_dtype=kv_cache_dtype) as llm:
                found[kv_cache_dtype] = generate(llm, random_prompts(LENGTHS))
        return found[kv_cache_dtype]

    return tokens


@FORMATS
@pytest.mark.parametrize(
    "options",
    [
        {"kvcache_block_size": 16, "max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 17, "enable_prefix_caching": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7, "overlap": False},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "kvcache_block_size": 48, "max_num_batched_tokens": 50, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_options_do_not_change_greedy_tokens(
    random_checkpoint: Checkpoint,
    expected: Callable[[str], list[list[int]]],
    kv_cache_dtype: str,
    options: dict[str, Any],
) -> None:
    with LLM(random_checkpoint(), device="cpu", kv_cache_dtype=kv_cache_dtype, **options) as llm:
        assert generate(llm, random_prompts(LENGTHS)) == expected(kv_cache_dtype)


@FORMATS
def test_a_warm_prefix_cache_does_not_change_greedy_tokens(
    random_checkpoint: Checkpoint, expected: Callable[[str], list[list[int]]], kv_cache_dtype: str
) -> None:
    prompts = random_prompts(LENGTHS)
    with LLM(random_checkpoint(), device="cpu", kvcache_block_size=16, kv_cache_dtype=kv_cache_dtype) as llm:
        assert generate(llm, prompts) == expected(kv_cache_dtype)
        warm = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in warm] == [num_found(length, 16) for length in LENGTHS]
    assert [output.token_ids for output in warm] == expected(kv_cache_dtype)


@FORMATS
def test_preemption_does_not_change_greedy_tokens(random_checkpoint: Checkpoint, kv_cache_dtype: str) -> None:
    prompts, params = random_prompts((30,) * 8), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "kv_cache_dtype": kv_cache_dtype}
    with LLM(random_checkpoint(), **options, num_kvcache_blocks=20, max_model_len=300) as llm:
        llm.engine.scheduler.reserved_tokens = 0  # so that blocks do run short
        tight = generate(llm, prompts, params)
        assert llm.get_metrics().num_preemptions > 0
    with LLM(random_checkpoint(), **options) as llm:
        assert generate(llm, prompts, params) == tight


def test_a_cache_in_8_bits_is_another_one_than_that_of_the_model(
    random_checkpoint: Checkpoint, expected: Callable[[str], list[list[int]]]
) -> None:
    """Else the tests above would show nothing: log-probabilities differ between formats, by little."""
    found = {}
    for kv_cache_dtype in ("auto", "int8", "fp8", "fp8_e4m3"):
        with LLM(random_checkpoint(), device="cpu", kv_cache_dtype=kv_cache_dtype) as llm:
            [score] = llm.score([random_prompts((40,))[0]], [[1, 2, 3]], use_tqdm=False)
            found[kv_cache_dtype] = score.total
    assert found["fp8_e4m3"] == found["fp8"]
    errors = {name: abs(found[name] - found["auto"]) for name in ("int8", "fp8")}
    assert 1e-5 < errors["int8"] < 0.5
    assert 1e-5 < errors["fp8"] < 1.0


@FORMATS
def test_a_request_of_nan_ends_in_an_error_and_its_blocks_serve_others_again(
    random_checkpoint: Checkpoint, checkpoint_with_nan: Path, kv_cache_dtype: str
) -> None:
    """Token 7 has an embedding of NaN: prompts with it are lost, before, beside and after the others."""
    good, bad = [[11] * 20, [12] * 40, [13] * 3], [[7] * 20, [12] * 35 + [7]]
    options: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 24}
    options |= {"max_model_len": 256, "kv_cache_dtype": kv_cache_dtype}
    with LLM(random_checkpoint(), **options) as llm:
        tokens = generate(llm, good)
    with LLM(checkpoint_with_nan, **options) as llm:
        for _ in range(3):
            outputs = llm.generate([bad[0], *good, bad[1]], GREEDY, use_tqdm=False)
            assert [output.finish_reason for output in outputs] == ["error", *["length"] * 3, "error"]
            assert [output.token_ids for output in outputs] == [[], *tokens, []]


@FORMATS
def test_memory_and_the_log_line_count_bytes_and_scales(
    random_checkpoint: Checkpoint,
    kv_cache_dtype: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers of two KV heads, 64 dimensions each: 64 + 4 bytes instead of 4 x 64 in float32."""
    monkeypatch.setattr("nanoinfer.runner.memory.CPU_CACHE_BYTES", 2**29)
    caplog.set_level("INFO", logger="nanoinfer")
    blocks = {}
    for name in ("auto", kv_cache_dtype):
        with LLM(random_checkpoint(), device="cpu", kv_cache_dtype=name) as llm:
            blocks[name] = llm.get_metrics().num_blocks
            cache = llm.engine.runner.model_runner.state.kv_cache
            assert cache.num_bytes <= 2**29 < cache.num_bytes * (1 + 1 / cache.num_blocks)
    assert blocks[kv_cache_dtype] == pytest.approx(blocks["auto"] * 256 / 68, rel=1e-3)
    name = {"int8": "int8", "fp8": "float8_e4m3fn"}[kv_cache_dtype]
    assert (
        f"KV cache of {blocks[kv_cache_dtype]} blocks of 256 tokens in {name}, up to 0.50 GiB, CPU threads: "
        in caplog.text
    )
    assert f"KV cache of {blocks['auto']} blocks of 256 tokens in float32, up to 0.50 GiB, CPU threads: " in caplog.text


def test_a_number_of_blocks_beyond_memory_is_refused_with_the_bytes_of_8_bits(random_checkpoint: Checkpoint) -> None:
    """Two billion blocks of 2 layers, keys and values, 2 heads and 256 tokens of 64 + 4 bytes."""
    message = "num_kvcache_blocks=2000000000 needs 259399.4 GiB, more than cpu has free"
    with pytest.raises(ConfigError, match=message):
        LLM(random_checkpoint(), device="cpu", kv_cache_dtype="int8", num_kvcache_blocks=2 * 10**9)


@FORMATS
def test_scales_that_a_checkpoint_brings_for_its_cache_change_nothing(
    random_checkpoint: Checkpoint, expected: Callable[[str], list[list[int]]], tmp_path: Path, kv_cache_dtype: str
) -> None:
    """Ours are those of each token's own key and value, which no scale of all tokens fits better."""
    shutil.copytree(random_checkpoint(), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.{}.self_attn"
    for name in ("k_scale", "v_scale", "q_scale", "kv_scale", "k_proj.k_scale", "v_proj.output_scale"):
        for index in range(2):
            weights[f"{layer.format(index)}.{name}"] = torch.tensor(0.01)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(tmp_path, device="cpu", kv_cache_dtype=kv_cache_dtype) as llm:
        assert generate(llm, random_prompts(LENGTHS)) == expected(kv_cache_dtype)


@pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_the_tiny_checkpoint_still_answers_every_kind_of_question(count: int) -> None:
    examples = [example for task in TASKS for example in held_out_examples(task, count, seed=7)]
    questions = [[{"role": "user", "content": example.question}] for example in examples]
    params = SamplingParams(temperature=0, max_tokens=160)
    right = {}
    for name in ("auto", "int8", "fp8"):
        with LLM(tiny_model_path(), device="cpu", kv_cache_dtype=name) as llm:
            texts = [output.text for output in llm.chat(questions, params, use_tqdm=False)]
        right[name] = sum(text == example.answer for text, example in zip(texts, examples, strict=True)) / len(examples)
    print(f"{len(examples)} questions, right: {right}")
    assert right["int8"] >= min(0.99, right["auto"] - 0.01)
    assert right["fp8"] >= min(0.99, right["auto"] - 0.01)
