"""How many threads steps have on a CPU, and in which dtype."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoinfer import device, step_threads
from nanoinfer.device import select_dtype
from nanoinfer.models.native_config import read_native_config
from nanoinfer.step_threads import fastest_num_threads, num_step_threads

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CPUINFO = Path("/proc/cpuinfo")


def model_of(*shapes: tuple[int, ...]) -> Any:
    """A model of these parameters, which take no memory."""
    params = [torch.zeros(1).expand(shape) for shape in shapes]
    return SimpleNamespace(parameters=lambda: params)


LARGE = model_of((40_000, 512), (4096, 512), (4096, 512), (4096, 512), *[(4096, 512)] * 10)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was measured, on a machine of 8 cores where 2 threads are the fastest."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(step_threads, "fastest_num_threads", lambda *args: calls.append(args) or 2)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    return calls


def test_the_product_that_most_weights_are_of_is_measured(measured: list[tuple[Any, ...]]) -> None:
    assert num_step_threads(LARGE, CPU) == 2
    assert measured == [(4096, 512, torch.float32, 8)]
    assert num_step_threads(LARGE, CUDA) is None


def test_small_models_have_one_thread(measured: list[tuple[Any, ...]]) -> None:
    assert num_step_threads(model_of((4096, 512)), CPU) == 1
    assert not measured


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_that_the_user_sets_for_the_process_stays(
    measured: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "8")
    assert num_step_threads(LARGE, CPU) is None
    assert not measured


@pytest.mark.parametrize(("threads", "expected"), [(8, 2), (4, 2), (3, None), (6, None), (1, None)])
def test_a_number_that_the_user_sets_in_pytorch_stays(
    measured: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, threads: int, expected: int | None
) -> None:
    """PyTorch itself takes all 8 cores or, where two share their arithmetic, 4."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert num_step_threads(LARGE, CPU) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({64: 1.0, 32: 0.8, 16: 0.5, 8: 0.6}, 16),
        ({64: 1.0, 32: 0.95, 16: 0.9, 8: 0.9}, 64),  # too little to be no noise
        ({2: 1.0, 1: 0.5}, 1),
        ({3: 1.0, 1: 2.0}, 3),
    ],
)
def test_fewer_threads_are_taken_where_they_are_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], expected: int
) -> None:
    now, threads = 0.0, 1

    def set_num_threads(count: int) -> None:
        nonlocal threads
        threads = count

    def linear(*_: Any) -> None:
        nonlocal now
        now += seconds[threads] * 1e-3

    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    monkeypatch.setattr(step_threads.F, "linear", linear)
    monkeypatch.setattr(step_threads.time, "perf_counter", lambda: now)
    assert fastest_num_threads.__wrapped__(8, 8, torch.float32, max(seconds)) == expected


@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("prefers", [False, True])
def test_auto_is_bfloat16_on_a_cpu_that_multiplies_it_for_models_that_prefer_it(
    multiplies: bool, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: multiplies)
    fast = torch.bfloat16 if multiplies and prefers else torch.float32
    assert select_dtype("auto", "float16", prefers, CPU) == fast
    assert select_dtype("float32", "bfloat16", prefers, CPU) == torch.float32
    assert select_dtype("bfloat16", "float32", prefers, CPU) == torch.bfloat16
    assert select_dtype("auto", "float16", prefers, CUDA) == torch.float16


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("dtype", "quantization", "of_checkpoint", "prefers"),
    [
        ("bfloat16", None, None, True),
        ("float16", None, None, False),
        ("float32", None, None, False),
        ("float16", "int4", None, True),
        ("float32", "int8", None, True),
        ("float16", "fp8", None, False),  # widened in any dtype
        ("float16", None, AWQ, True),
        ("float16", None, GPTQ, True),
        ("float16", None, {**GPTQ, "desc_act": True}, False),  # no kernel reads inputs in another order
    ],
)
def test_large_models_whose_weights_lose_nothing_or_have_kernels_prefer_bfloat16(
    dtype: str, quantization: str | None, of_checkpoint: dict[str, Any] | None, prefers: bool
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8}
    fields = {"architectures": ["LlamaForCausalLM"], "torch_dtype": dtype, "quantization_config": of_checkpoint}
    large = read_native_config({**fields, **sizes, "num_hidden_layers": 2}, quantization)
    assert large.prefers_bfloat16 == prefers
    assert not replace(large, num_hidden_layers=1).prefers_bfloat16


@pytest.mark.skipif(not CPUINFO.exists(), reason="Linux lists what a CPU has")
def test_this_cpu_multiplies_bfloat16_if_linux_says_so() -> None:
    features = {*CPUINFO.read_text().split()}
    assert device.cpu_multiplies_bfloat16() == bool(features & {"avx512_bf16", "amx_tile"})
