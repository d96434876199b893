"""What fits on a GPU with little memory is found: longest sequence, tokens of a step, rows. Else the error says why.

The model runs on a CPU, and the engine is told what a GPU would report. Weights take `LOADED` bytes there.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, ConfigError, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.models.implementations import bytes_in_4_bits, read_model_config, weight_bytes
from nanoinfer.runner import memory, setup
from nanoinfer.runner.memory import MemoryUse
from nanoinfer.runner.setup import Setup

MIB = 2**20
LOADED = 10 * MIB
TOKEN = 1024  # bytes of keys and values: two layers, two KV heads of 32 numbers in float32
GREEDY = SamplingParams(temperature=0, max_tokens=8)
SIZES = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32}


class SmallGpu:
    """Reports what a GPU would: so much memory, of which a step takes `step_bytes(tokens, rows)`."""

    def __init__(self, size: int, step_bytes: Callable[[int, int], int]) -> None:
        self.size, self.step_bytes = size, step_bytes
        self.steps: list[tuple[int, int]] = []  # tokens and rows of those that were measured

    def prefill(self, tables: Any, rows: torch.Tensor, num_tokens: int) -> Any:
        self.steps.append((num_tokens, len(rows)))
        longest = tables.token_ids.shape[1] - 1
        assert num_tokens <= longest * len(rows), "more prompts than rows"
        return largest_prefill(tables, rows[:2], 4)  # the CPU need not compute it all

    def peak_bytes(self, run: Callable[[], object], _device: object) -> int:
        run()
        if (taken := self.step_bytes(*self.steps[-1])) > self.size - LOADED:
            raise torch.OutOfMemoryError("the test says so")
        return taken

    def memory_use(self, share: float, _free_at_start: int, _device: object) -> MemoryUse:
        return MemoryUse(int(self.size * share), LOADED, step=0, graphs=0)


largest_prefill = setup.largest_prefill


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SmallGpu]:
    """`put_in(size, step_bytes)`: have engines believe that they are on such a GPU."""

    def put(size: int, step_bytes: Callable[[int, int], int] = lambda _tokens, _rows: 0) -> SmallGpu:
        gpu = SmallGpu(size, step_bytes)
        monkeypatch.setattr(Setup, "counts_memory", True)
        monkeypatch.setattr(setup, "largest_prefill", gpu.prefill)
        monkeypatch.setattr(memory, "free_bytes", lambda _device: size)
        monkeypatch.setattr(memory, "memory_use", gpu.memory_use)
        monkeypatch.setattr(memory, "measure_peak_bytes", gpu.peak_bytes)
        return gpu

    return put


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", **{"gpu_memory_utilization": 1, **options})


@pytest.fixture
def folder(random_checkpoint: Callable[..., Path]) -> Path:
    return random_checkpoint(**SIZES, max_position_embeddings=100_000)


def sizes_of(llm: LLM) -> tuple[int, int, int]:
    limits: Any = llm.engine.runner.limits  # type: ignore[attr-defined]
    scheduler: Any = llm.engine.scheduler  # type: ignore[attr-defined]
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.max_model_len) == (
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        limits.max_model_len,
    )
    return limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len


def test_with_enough_memory_nothing_is_lowered(folder: Path, put_in: Callable[..., SmallGpu]) -> None:
    gpu = put_in(LOADED + 100_096 * TOKEN + MIB, lambda _tokens, _rows: MIB)
    with load(folder) as llm:
        assert sizes_of(llm) == (16384, 512, 100_000)
    assert gpu.steps == [(16384, 512)]


def test_the_longest_sequence_is_lowered_with_a_warning(folder: Path, put_in: Callable[..., SmallGpu]) -> None:
    put_in(LOADED + 20_480 * TOKEN + MIB, lambda _tokens, _rows: MIB)
    with (
        pytest.warns(UserWarning, match="lowered from the model's 100000 tokens to 20480, all that the cache holds"),
        load(folder) as llm,
    ):
        assert sizes_of(llm) == (16384, 512, 20_480)


@pytest.mark.filterwarnings("ignore:max_model_len is lowered")
def test_no_table_is_larger_than_the_memory_that_is_left(folder: Path, put_in: Callable[..., SmallGpu]) -> None:
    put_in(LOADED + 20_480 * TOKEN)
    for options, longest in (({"max_model_len": 9000}, 9000), ({"num_kvcache_blocks": 500}, 100_000), ({}, 20_480)):
        with load(folder, **options) as llm:
            runner: Any = llm.engine.runner  # type: ignore[attr-defined]
            assert runner.setup.limits_without_cache(0, None).max_model_len == longest


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_steps_are_smaller_where_the_cache_holds_fewer_tokens_than_one(
    folder: Path, put_in: Callable[..., SmallGpu], caplog: pytest.LogCaptureFixture, share: float
) -> None:
    """A token of a step takes 2 KiB: of 16 MiB, 8,192 take all and 4,096 half, which leaves 8,192 to the cache."""
    prompts = [[(7 * place) % 500 for place in range(length)] for length in (5000, 3, 700)]
    with LLM(folder, device="cpu") as llm:
        expected = llm.generate(prompts, GREEDY, use_tqdm=False)
    gpu = put_in(int((LOADED + 16 * MIB) / share), lambda tokens, _rows: 2048 * tokens)
    caplog.set_level(logging.INFO, "nanoinfer")
    with pytest.warns(UserWarning, match="lowered"):
        llm = load(folder, gpu_memory_utilization=share)
    with llm:
        assert sizes_of(llm) == (4096, 512, 8192)
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [tokens for tokens, _ in gpu.steps] == [16384, 8192, 4096]
    assert "max_num_batched_tokens is lowered from 16384 to 4096" in caplog.text
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@pytest.mark.filterwarnings("ignore:max_model_len is lowered")
def test_the_largest_step_of_a_single_row_is_as_long_as_its_table(
    folder: Path, put_in: Callable[..., SmallGpu]
) -> None:
    gpu = put_in(LOADED + 5120 * TOKEN)
    with load(folder, max_num_seqs=1) as llm:
        assert sizes_of(llm) == (16384, 1, 5120)
    assert gpu.steps == [(5120, 1)]


def test_rows_are_fewer_where_small_steps_are_not_enough(
    folder: Path, put_in: Callable[..., SmallGpu], caplog: pytest.LogCaptureFixture
) -> None:
    put_in(LOADED + 16 * MIB, lambda tokens, rows: 1024 * tokens + 64 * 1024 * rows)
    caplog.set_level(logging.INFO, "nanoinfer")
    with pytest.warns(UserWarning, match="lowered"), load(folder) as llm:
        assert sizes_of(llm) == (1024, 128, 7 * 1024)
    assert "max_num_seqs is lowered from 512 to 128" in caplog.text


def test_what_the_user_chose_is_not_lowered(folder: Path, put_in: Callable[..., SmallGpu]) -> None:
    gpu = put_in(LOADED + 16 * MIB, lambda tokens, _rows: 1024 * tokens)
    with (
        pytest.warns(UserWarning, match="lowered from the model's 100000 tokens to 1024"),
        load(folder, max_num_batched_tokens=15_360, max_num_seqs=511) as llm,
    ):
        assert sizes_of(llm) == (15_360, 511, 1024)
    assert gpu.steps == [(15_360, 511)]


def test_a_sequence_as_long_as_the_user_wants_makes_steps_smaller(
    folder: Path, put_in: Callable[..., SmallGpu]
) -> None:
    put_in(LOADED + 16 * MIB, lambda tokens, _rows: 512 * tokens)
    with load(folder, max_model_len=14_000) as llm:
        assert sizes_of(llm) == (4096, 512, 14_000)


def test_an_error_of_too_long_sequences_says_what_takes_the_memory(
    folder: Path, put_in: Callable[..., SmallGpu]
) -> None:
    put_in(2 * (LOADED + 1024 * MIB), lambda tokens, _rows: 1024 * MIB - 1024 * TOKEN)
    message = (
        r"max_model_len=90000 is more than the KV cache holds: 4 blocks of 256 tokens, 1024 in all; lower max_model_len"
        r".* Of 1\.01 GiB that gpu_memory_utilization=0\.5 grants on cpu, the weights take 0\.\d\d GiB, .*the largest "
        r"step takes 1\.00 GiB\. What makes room: quantization='int4' or a checkpoint in 4 bits "
        r"\(weights of 0\.\d\d GiB\), kv_cache_dtype='int8' \(nearly twice the tokens in a cache\), device='cpu'"
    )
    with pytest.raises(ConfigError, match=message):
        load(folder, max_model_len=90_000, gpu_memory_utilization=0.5)


def test_weights_in_4_bits_are_as_large_as_the_error_says(random_checkpoint: Callable[..., Path]) -> None:
    folder, sizes = random_checkpoint(hidden_size=256, intermediate_size=512, head_dim=64), []
    for quantization in (None, "int4"):
        options = EngineConfig(str(folder), device="cpu", dtype="bfloat16", quantization=quantization)
        config = read_model_config(folder, options)
        model = Setup.of(options, config, TensorParallel()).model_without_weights()
        assert model is not None
        sizes += [weight_bytes(model), bytes_in_4_bits(model, config)]
    whole, estimated, in_4_bits, impossible = sizes
    assert whole > 2 * in_4_bits == 2 * estimated
    assert impossible is None


def test_weights_that_do_not_fit_are_an_error_before_a_step_runs(folder: Path, put_in: Callable[..., SmallGpu]) -> None:
    gpu = put_in(LOADED)
    with pytest.raises(ConfigError, match=r"0\.00 GiB are left for the KV cache, and .* What makes room: quantization"):
        load(folder)
    assert not gpu.steps


def test_memory_that_runs_out_while_weights_load_says_how_large_they_are(
    folder: Path, put_in: Callable[..., SmallGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("the test says so")

    put_in(LOADED)
    monkeypatch.setattr(setup, "load", fail)
    message = r"cpu has too little memory for the model of .*, the weights take 0\.\d\d GiB\. "
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_largest_step_that_runs_out_of_memory_is_tried_smaller(folder: Path, put_in: Callable[..., SmallGpu]) -> None:
    gpu = put_in(LOADED + 32 * MIB, lambda tokens, _rows: 10 * 1024 * tokens)
    with pytest.warns(UserWarning, match="lowered"), load(folder) as llm:
        assert sizes_of(llm) == (2048, 512, 12 * 1024)
    assert [tokens for tokens, _ in gpu.steps] == [16384, 8192, 4096, 2048]
    with pytest.raises(
        ConfigError, match=r"too little memory .* largest step \(the test says so\); lower max_num_batched_tokens=8000"
    ):
        load(folder, max_num_batched_tokens=8000, max_num_seqs=8)
