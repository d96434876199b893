"""Models of transformers behind the engine, in bfloat16 on a GPU: graphs, kernels, and errors that are the format's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from nanoinfer import LLM, SamplingParams
from nanoinfer.models.prefill_graphs import STEPS_BEFORE_CAPTURE
from nanoinfer.models.transformers.captured_prefill import CapturedStep
from tests.gpu.test_architectures_gpu import reference_logprobs
from tests.kernels.test_store_keys_values import CASES, Write
from tests.models.tiny_transformers import write_tiny

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False)
PROMPTS = [[(7 * length * index + 11) % 230 + 5 for index in range(length)] for length in range(3, 99, 3)]
# Chunks that blocks of 16 divide; queries grow at 512, beyond the longest position.
CHUNKS = {"Llama4ForCausalLM": {"attention_chunk_size": 32, "floor_scale": 512}}
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


def assert_errors_are_those_of_bfloat16(folder: Path, llm: LLM) -> list[list[int]]:
    """Generate in bfloat16, compare log-probabilities with float32 beside transformers' own; return the tokens."""
    sequences, found = [], []
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        [completion] = output.outputs
        sequences.append(prompt + list(completion.token_ids))
        entries = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        found += [entry[token_id].logprob for entry, token_id in zip(entries, sequences[-1][1:], strict=True)]
    exact = reference_logprobs(folder, sequences, "cpu", torch.float32)
    ours = (torch.tensor(found) - exact).abs().mean()
    theirs = (reference_logprobs(folder, sequences, "cuda", torch.bfloat16) - exact).abs().mean()
    print(f"{folder.name}: {ours:.4f}, transformers {theirs:.4f}")
    assert ours <= 1.3 * theirs + 0.002
    return [sequence[len(prompt) :] for prompt, sequence in zip(PROMPTS, sequences, strict=True)]


def load(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder,
        **{
            "dtype": "bfloat16",
            "model_impl": "transformers",
            "max_model_len": 128,
            "num_kvcache_blocks": 100,
            "max_num_seqs": 4,
            **options,
        },
    )


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_nearly_all_equal(found: list[list[int]], expected: list[list[int]]) -> None:
    num_equal = sum(one == other for one, other in zip(found, expected, strict=True))
    assert num_equal >= len(PROMPTS) * 0.75  # near ties, after which answers go on otherwise


@pytest.mark.parametrize(("architecture", "has_graphs"), KINDS)
def test_errors_in_bfloat16_are_no_larger_than_those_of_transformers(
    architecture: str, has_graphs: bool, tmp_path: Path
) -> None:
    write_tiny(architecture, tmp_path)
    with load(tmp_path, max_num_batched_tokens=100, max_num_seqs=512) as llm:
        assert llm.engine.runner.model.captures_decode == has_graphs  # type: ignore[attr-defined]
        assert_errors_are_those_of_bfloat16(tmp_path, llm)


@pytest.mark.parametrize("head_dim", [320, 512])
def test_heads_beyond_those_of_the_kernels_run_by_the_specification(head_dim: int, tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path, head_dim=head_dim)
    with load(tmp_path) as llm:
        runner = llm.engine.runner
        assert runner.setup.backends.name == "torch"  # type: ignore[attr-defined]
        assert runner.model_runner.state.decode_graphs is None  # type: ignore[attr-defined]
        assert_errors_are_those_of_bfloat16(tmp_path, llm)


@pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler says of speed
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM", "OlmoeForCausalLM"])
def test_compiled_layers_in_graphs_and_eager_give_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    write_tiny(architecture, tmp_path)
    with load(tmp_path, compile=True) as llm:
        num_graphs = counters["stats"]["unique_graphs"]
        assert llm.engine.runner.model_runner.state.decode_graphs is not None  # type: ignore[attr-defined]
        in_graphs = assert_errors_are_those_of_bfloat16(tmp_path, llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert_nearly_all_equal(tokens(llm), in_graphs)
        assert counters["stats"]["unique_graphs"] == num_graphs, "steps of all sizes run what was compiled at load"
    with load(tmp_path, compile=True, enforce_eager=True) as llm:
        assert_nearly_all_equal(tokens(llm), in_graphs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("architecture", ["GPTNeoXForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM"])
def test_small_prefill_steps_replay_graphs_that_compute_the_same(
    architecture: str, compile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_replays = 0
    replay = CapturedStep.replay

    def counted(self: CapturedStep, *args: Any) -> torch.Tensor:
        nonlocal num_replays
        num_replays += 1
        return replay(self, *args)

    monkeypatch.setattr(CapturedStep, "replay", counted)
    write_tiny(architecture, tmp_path, **CHUNKS.get(architecture, {}))
    options = {"max_num_batched_tokens": 128, "enable_prefix_caching": False, "kvcache_block_size": 16}
    with load(tmp_path, compile=compile, **options) as llm:
        num_replays = 0  # without that of the comparison at load
        prompt = {"prompt_token_ids": PROMPTS[20]}
        ways = []
        for _ in range(STEPS_BEFORE_CAPTURE + 3):
            [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
            entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
            ways.append([next(iter(entry.values())).logprob for entry in entries])
        assert num_replays == 3
        assert all(way == ways[0] for way in ways), "a step in a graph computes what the padded step does"
        assert_errors_are_those_of_bfloat16(tmp_path, llm)
        llm.sleep(level=1)
        llm.wake_up()
        assert_errors_are_those_of_bfloat16(tmp_path, llm)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_attention_in_chunks_is_the_same_in_graphs(enforce_eager: bool, tmp_path: Path) -> None:
    """Prompts and answers go on beyond one, two and three chunks of 32 tokens."""
    write_tiny("Llama4ForCausalLM", tmp_path, **CHUNKS["Llama4ForCausalLM"])
    with load(tmp_path, enforce_eager=enforce_eager, kvcache_block_size=16) as llm:
        has_graphs = llm.engine.runner.model_runner.state.decode_graphs is not None  # type: ignore[attr-defined]
        assert has_graphs != enforce_eager
        assert_errors_are_those_of_bfloat16(tmp_path, llm)


@pytest.mark.parametrize("architecture", ["GPTNeoXForCausalLM", "DeepseekV3ForCausalLM", "OlmoeForCausalLM"])
def test_graphs_and_eager_give_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    write_tiny(architecture, tmp_path)
    found = []
    for enforce_eager in (False, True):
        with load(tmp_path, enforce_eager=enforce_eager) as llm:
            found.append(tokens(llm))
    assert_nearly_all_equal(*found)


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
def test_the_compiled_kernel_writes_keys_and_values_where_its_specification_does(changes: dict) -> None:
    Write(**{**changes, "device": "cuda"}).assert_kernel_equals_specification()
