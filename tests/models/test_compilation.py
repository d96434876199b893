"""Layers of transformers compiled by torch.compile: the same answers, few compilations, updates that are seen."""

import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from nanoinfer import LLM, ConfigError, SamplingParams
from tests.models.test_transformers_models import answers, assert_close, load, skip_unless_it_runs
from tests.models.tiny_transformers import write_tiny

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles for a CPU with a C++ compiler")


def num_compiled() -> int:
    """Return how many graphs this process has compiled."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM", "OlmoeForCausalLM"])
def test_compiled_layers_answer_alike_and_are_compiled_once(architecture: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    write_tiny(architecture, tmp_path)
    with load(tmp_path) as llm:
        expected = answers(llm)
    before = num_compiled()
    with load(tmp_path, compile=True, max_num_batched_tokens=40, max_num_seqs=3) as llm:
        assert num_compiled() == before + 2, "one graph for a token, and one for more, of all layers"
        assert_close(answers(llm), expected)
        [output] = llm.generate(
            {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1), hidden_states=[1], use_tqdm=False
        )
        assert torch.as_tensor(output.hidden_states[1]).shape == (3, 64)
        llm.sleep(level=1)
        llm.wake_up()
        assert_close(answers(llm), expected)
        weights = llm.engine.runner.model.hf_model.state_dict()  # type: ignore[attr-defined]
        zeros = {name: torch.zeros_like(weight) for name, weight in weights.items() if "lm_head" in name}
        zeros |= {name: weight * 2 for name, weight in weights.items() if "layers.1." in name and weight.dim() > 1}
        llm.update_weights({name: weight for name, weight in zeros.items() if "layers.1." in name})
        changed = answers(llm)
        assert [one.logprobs for one in changed] != [one.logprobs for one in expected]
        assert num_compiled() == before + 2


def test_a_native_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="of LlamaForCausalLM are nanoinfer's own; leave it out"):
        LLM(tmp_path, compile=True)
