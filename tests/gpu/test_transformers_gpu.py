"""Models of transformers behind the engine, in bfloat16 on a GPU: graphs, kernels, and errors that are the format's."""

from pathlib import Path

import pytest
import torch
import transformers

from nanoinfer import LLM, SamplingParams
from tests.gpu.test_architectures_gpu import reference_logprobs
from tests.kernels.test_store_keys_values import CASES, Write
from tests.models.tiny_transformers import write_tiny

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False)
PROMPTS = [[(7 * length * index + 11) % 230 + 5 for index in range(length)] for length in range(3, 99, 3)]
# (class, whether its decode steps are CUDA graphs)
KINDS = [
    ("GPT2LMHeadModel", True),
    ("GPTNeoXForCausalLM", True),
    ("OPTForCausalLM", True),
    ("Starcoder2ForCausalLM", True),
    ("PhiForCausalLM", True),
    ("NemotronForCausalLM", True),
    ("CohereForCausalLM", True),
    ("DeepseekV3ForCausalLM", True),
    ("Glm4MoeLiteForCausalLM", True),
    ("OlmoeForCausalLM", True),
    ("DbrxForCausalLM", False),
    ("RobertaForCausalLM", True),
    ("LlamaForCausalLM", True),
]


@pytest.mark.parametrize(("architecture", "has_graphs"), KINDS)
def test_errors_in_bfloat16_are_no_larger_than_those_of_transformers(
    architecture: str, has_graphs: bool, tmp_path: Path
) -> None:
    write_tiny(architecture, tmp_path)
    sequences, found = [], []
    options = {"dtype": "bfloat16", "max_model_len": 128, "max_num_batched_tokens": 100, "num_kvcache_blocks": 100}
    with LLM(tmp_path, model_impl="transformers", **options) as llm:
        assert llm.engine.runner.model.captures_decode == has_graphs  # type: ignore[attr-defined]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        [completion] = output.outputs
        sequences.append(prompt + list(completion.token_ids))
        entries = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        found += [entry[token_id].logprob for entry, token_id in zip(entries, sequences[-1][1:], strict=True)]
    exact = reference_logprobs(tmp_path, sequences, "cpu", torch.float32)
    ours = (torch.tensor(found) - exact).abs().mean()
    theirs = (reference_logprobs(tmp_path, sequences, "cuda", torch.bfloat16) - exact).abs().mean()
    print(f"{architecture}: {ours:.4f}, transformers {theirs:.4f}")
    assert ours <= 1.3 * theirs + 0.002


@pytest.mark.parametrize("architecture", ["GPTNeoXForCausalLM", "DeepseekV3ForCausalLM", "OlmoeForCausalLM"])
def test_graphs_and_eager_give_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    write_tiny(architecture, tmp_path)
    found = []
    for enforce_eager in (False, True):
        options = {"dtype": "bfloat16", "max_model_len": 128, "num_kvcache_blocks": 100, "enforce_eager": enforce_eager}
        with LLM(tmp_path, model_impl="transformers", max_num_seqs=4, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    num_equal = sum(one == other for one, other in zip(*found, strict=True))
    assert num_equal >= len(PROMPTS) - 2  # near ties


@pytest.mark.parametrize("architecture", ["NomicBertModel", "DistilBertModel", "EuroBertModel"])
def test_an_encoder_embeds_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    write_tiny(architecture, tmp_path)
    model = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    with LLM(tmp_path, dtype="bfloat16", model_impl="transformers") as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([prompt]))[0][0].mean(0)
        assert torch.cosine_similarity(torch.tensor(output.outputs.embedding), mean, dim=0) > 0.999


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_compiled_kernel_writes_keys_and_values_where_its_twin_does(changes: dict) -> None:
    Write(**{**changes, "device": "cuda"}).assert_kernel_equals_twin()
