"""Every engine is asked for all samples, and each sample must have the tokens that its request asked for."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoinfer.bench.engines import Engine, load_engine
from nanoinfer.bench.floor import Rates
from nanoinfer.bench.throughput import time_run
from nanoinfer.bench.workloads import Load, Workload, choose_model


def test_a_sample_with_too_few_tokens_is_an_error(tmp_path: Path) -> None:
    model, rates = choose_model(None, None, "cpu", tmp_path), Rates(1, 1, 2, "given")
    engine = Engine(generate=lambda _: [5, 5, 5, 5, 5, 4])
    args = argparse.Namespace(data_parallel_size=1, kv_cache_dtype="auto")
    with pytest.raises(RuntimeError, match="29 tokens came out where 30 were asked for"):
        time_run(engine, model, "samples", Load(2, (3, 3), (5, 5), num_samples=3), rates, 0, args)


def test_vllm_draws_n_samples_of_a_prompt_and_all_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class FakeLLM:
        def __init__(self, **options: Any) -> None:
            self.reset_prefix_cache = lambda: None

        def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> list[Any]:
            return [
                SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=[0] * its.max_tokens, finish_reason="length")] * its.n
                )
                for _, its in zip(prompts, params, strict=True)
            ]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(StructuredOutputsParams=dict))
    args = argparse.Namespace(engine="vllm", top_k=0, top_p=1.0)
    engine = load_engine(choose_model(None, None, "cpu", tmp_path), {}, args)
    workload = Workload(seed=0, prompts=[[1], [2, 3]], max_tokens=[5, 4], num_samples=2)
    assert engine.generate(workload) == workload.output_lens == [5, 5, 4, 4]
