"""The default workload is nano-vllm's, and loads and models have the sizes that are asked for."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from nanoinfer.bench.floor import count_weights
from nanoinfer.bench.workloads import LOADS, SIZES, Load, choose_loads, choose_model, draw_workload, write_config
from nanoinfer.models.native_config import read_native_folder


def test_seed_0_is_the_workload_of_nano_vllms_benchmark() -> None:
    workload = draw_workload(0, LOADS["cuda"]["default"][0], vocab_size=151936)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    assert workload.prompts == prompts
    assert workload.max_tokens == [random.randint(100, 1024) for _ in range(256)]
    assert (workload.num_input_tokens, workload.num_output_tokens) == (142_827, 133_966)


def test_a_shared_prefix_comes_before_prompts_that_are_otherwise_the_same() -> None:
    load = Load(3, input_len=(1, 9), output_len=(1, 9))
    plain = draw_workload(3, load, vocab_size=50)
    shared = draw_workload(3, replace(load, shared_prefix=5), vocab_size=50)
    assert [prompt[5:] for prompt in shared.prompts] == plain.prompts
    assert len({tuple(prompt[:5]) for prompt in shared.prompts}) == 1
    assert shared.max_tokens == plain.max_tokens
    assert max(map(max, shared.prompts)) < 50
    assert replace(load, shared_prefix=5).longest == 5 + 9 + 9


def test_samples_change_no_prompt_and_each_has_the_tokens_of_its_request() -> None:
    load = Load(2, input_len=(1, 9), output_len=(1, 9))
    plain, sampled = (draw_workload(3, replace(load, num_samples=count), vocab_size=50) for count in (1, 3))
    assert (sampled.prompts, sampled.max_tokens) == (plain.prompts, plain.max_tokens)
    first, second = plain.max_tokens
    assert plain.output_lens == [first, second]
    assert sampled.output_lens == [first] * 3 + [second] * 3
    assert sampled.num_output_tokens == 3 * plain.num_output_tokens
    assert sampled.num_input_tokens == plain.num_input_tokens


def test_sizes_given_take_the_place_of_a_loads_own() -> None:
    assert [load.num_seqs for load in choose_loads("small", "cuda")] == [1, 4, 16]
    assert [load.num_seqs for load in choose_loads("small", "cuda", num_seqs=2)] == [2]
    [load] = choose_loads("default", "cuda", input_len=200, output_len=50, shared_prefix=9, max_num_seqs=None)
    assert load == Load(256, input_len=(100, 200), output_len=(50, 50), shared_prefix=9)
    assert [load.num_samples for load in choose_loads("samples", "cuda", num_samples=2)] == [2]
    full_size = choose_loads("default", "cpu", num_seqs=256, input_len=1024, output_len=1024, max_num_seqs=512)
    assert full_size == LOADS["cuda"]["default"]


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        ("0.6B", 0.596),
        ("1.7B", 1.72),
        ("4B", 4.02),
        ("8B", 8.19),
        ("14B", 14.77),
        ("32B", 32.76),
        ("30B-A3B", 30.53),
        ("llama-8B", 8.03),
        ("qwen2-7B", 7.62),
    ],
)
def test_every_size_has_the_parameters_of_its_name(size: str, billions: float, tmp_path: Path) -> None:
    model = choose_model(None, size, "cpu", tmp_path)
    weights = count_weights(model.config)
    num_parameters = weights.dense + weights.expert * weights.num_experts
    num_parameters += weights.lm_head * (1 if model.config.tie_word_embeddings else 2)
    assert num_parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert str(model) == f"{f'Qwen3-{size}' if size[0].isdigit() else size} (random weights)"
    defaults = [choose_model(None, None, device, tmp_path).name for device in ("cuda", "cpu")]
    assert defaults == ["Qwen3-0.6B", "tiny-qwen3"]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_a_model_that_loads(size: str, tmp_path: Path) -> None:
    write_config(size, tmp_path)
    assert [read_native_folder(tmp_path).architecture] == SIZES[size]["architectures"]
