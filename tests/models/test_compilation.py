"""Layers of transformers compiled by torch.compile: the same answers, few compilations, updates that are seen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from nanoinfer import LLM, ConfigError, SamplingParams
from tests.models.test_transformers_models import PROMPTS, answers, assert_close, load, skip_unless_it_runs
from tests.models.tiny_transformers import load as load_hf
from tests.models.tiny_transformers import write_tiny

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="PyTorch compiles for a CPU with a C++ compiler"
)


def num_compiled() -> int:
    """Return how many graphs this process has compiled."""
    return counters["stats"]["unique_graphs"]


def second_layer_doubled(folder: Path) -> dict[str, Tensor]:
    return {name: 2 * weight for name, weight in load_hf(folder).state_dict().items() if "layers.1." in name}


@needs_compiler
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM", "OlmoeForCausalLM"])
def test_compiled_layers_answer_alike_and_are_compiled_once(architecture: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    write_tiny(architecture, tmp_path)
    update = second_layer_doubled(tmp_path)
    with load(tmp_path) as llm:
        expected = answers(llm)
        llm.update_weights(update)
        updated = answers(llm)
    assert updated != expected
    before = num_compiled()
    with load(tmp_path, compile=True, max_num_batched_tokens=40, max_num_seqs=3) as llm:
        assert num_compiled() == before + 2, "of all layers, one graph for a token, and one for any other number"
        assert_close(answers(llm), expected)
        llm.sleep(level=1)
        llm.wake_up()
        assert_close(answers(llm), expected)
        prompt, params = {"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=1)
        [output] = llm.generate(prompt, params, hidden_states=[1], use_tqdm=False)
        with torch.no_grad():
            states = load_hf(tmp_path)(input_ids=torch.tensor([PROMPTS[1]]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(torch.as_tensor(output.hidden_states[1]), states[1][0], rtol=0, atol=1e-4)
        llm.update_weights(update)
        assert_close(answers(llm), updated)
        assert num_compiled() == before + 2


@needs_compiler
def test_compiled_layers_embed_alike_in_bfloat16(tmp_path: Path) -> None:
    skip_unless_it_runs("EuroBertModel")
    write_tiny("EuroBertModel", tmp_path)
    found = []
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "compile": True}):
        with load(tmp_path, **options) as llm:
            outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
            found.append(torch.stack([torch.tensor(output.outputs.embedding) for output in outputs]))
    assert torch.cosine_similarity(*found).min() > 0.999


@needs_compiler
@pytest.mark.slow
def test_replicas_compile_too(tmp_path: Path) -> None:
    write_tiny("GPTNeoXForCausalLM", tmp_path)
    with load(tmp_path) as llm:
        expected = answers(llm)
    with load(tmp_path, compile=True, data_parallel_size=2) as llm:
        assert_close(answers(llm), expected)


@needs_compiler
@pytest.mark.slow
def test_layers_that_no_graph_holds_are_compiled_in_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skip_unless_it_runs("DbrxForCausalLM")
    write_tiny("DbrxForCausalLM", tmp_path)
    with load(tmp_path) as llm:
        expected = answers(llm)
    with caplog.at_level("INFO", "nanoinfer"), load(tmp_path, compile=True) as llm:
        assert "the layers of DbrxForCausalLM are compiled in parts" in caplog.text
        assert_close(answers(llm), expected)


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("there is no compiler")


def computes_something_else(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return lambda layer, *args, **options: function(layer, args[0] + 1, *args[1:], **options)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (lambda function, **_: fails, "RuntimeError: there is no compiler"),
        (computes_something_else, "compiled, they give other hidden states"),
    ],
)
def test_layers_that_cannot_be_compiled_are_an_error_with_the_remedy(
    compiler: Callable[..., Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    monkeypatch.setattr(torch, "compile", compiler)
    message = f"compile=True cannot compile the layers of LlamaForCausalLM: {reason}; leave it out"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, compile=True)


def test_a_native_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="are nanoinfer's own; leave it out, or use model_impl='transformers'"):
        LLM(tmp_path, compile=True)
