"""Small prefill steps of transformers' models as graphs, on a CPU, where a stand-in records and repeats operators."""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoinfer import LLM
from nanoinfer.models import prefill_graphs
from nanoinfer.models.execution import PrefillGraphs
from nanoinfer.models.prefill_graphs import STEPS_BEFORE_CAPTURE
from nanoinfer.models.transformers import captured_prefill
from tests.models.test_transformers_models import answers, assert_close, load, skip_unless_it_runs
from tests.models.tiny_transformers import write_tiny

SIZES = [8, 16, 24]
num_replays = Counter[str]()


class RecordedGraph(TorchDispatchMode):
    """Stands for a CUDA graph: it repeats the operators that ran while it was captured, from and to the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        num_replays["graphs"] += 1
        for func, args, kwargs, result in self._calls:
            for again, before in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
                if isinstance(before, Tensor) and again.data_ptr() != before.data_ptr():  # no view, nor in its place
                    before.copy_(again)


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], PrefillGraphs]:
    """A function that gives an engine graphs of its prefill steps of at most 24 tokens, and returns them."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(captured_prefill, "capturing", lambda graph, _pool: graph)
    monkeypatch.setattr(prefill_graphs, "padded_sizes", lambda _layers, only_pools: SIZES)
    num_replays.clear()

    def give(llm: LLM) -> PrefillGraphs:
        runner: Any = llm.engine.runner
        with torch.inference_mode():
            graphs = runner.model.prefill_graphs(24, captures_largest=False)
        runner.model_runner.state.buffers.prefill_graphs = graphs
        return graphs

    return give


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "GPTNeoXForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "DiffLlamaForCausalLM"],
)
def test_graphs_of_small_steps_answer_alike(
    architecture: str, graphed: Callable[[LLM], PrefillGraphs], tmp_path: Path
) -> None:
    """Prompts come in chunks of all sizes, which attend to the cache too, and what is padding reaches no token."""
    skip_unless_it_runs(architecture)
    write_tiny(architecture, tmp_path)
    options = {"max_num_batched_tokens": 20, "max_num_seqs": 2, "enable_prefix_caching": False}
    with load(tmp_path, **options) as llm:
        expected = answers(llm)
    with load(tmp_path, **options) as llm:
        small: Any = graphed(llm).small
        with torch.inference_mode():
            for buffer in small._buffers.values():
                buffer.fill_(torch.nan)
        num_replays.clear()
        for _ in range(STEPS_BEFORE_CAPTURE + 1):
            assert_close(answers(llm), expected)
        assert {*small._graphs} >= {16, 24}
        assert num_replays["graphs"] > 0


def test_a_step_that_a_graph_does_not_repeat_has_none_and_the_log_says_why(
    graphed: Callable[[LLM], PrefillGraphs], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    with load(tmp_path) as llm, caplog.at_level(logging.INFO, "nanoinfer"):
        model: Any = llm.engine.runner.model  # type: ignore[attr-defined]
        num_calls = Counter[str]()

        def add_what_the_host_counts(_module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            num_calls["all"] += 1
            return args[0] + num_calls["all"], *args[1:]

        hook = model.hf_model.model.layers[1].register_forward_pre_hook(add_what_the_host_counts)
        assert graphed(llm).small is None
        assert "prefills without CUDA graphs: its captured step gives other hidden states" in caplog.text
        hook.remove()
        assert graphed(llm).small is None, "it is compared once"


def test_a_model_that_reads_values_back_has_no_graphs(graphed: Callable[[LLM], PrefillGraphs], tmp_path: Path) -> None:
    skip_unless_it_runs("DbrxForCausalLM")
    write_tiny("DbrxForCausalLM", tmp_path)
    with load(tmp_path) as llm:
        assert graphed(llm).small is None
    assert not num_replays
