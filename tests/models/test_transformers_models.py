"""Models of transformers behind the engine: its own tokens and log-probabilities, and refusals with a reason."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, masking_utils

from nanoinfer import LLM, ConfigError, ModelError, SamplingParams
from nanoinfer.models.transformers.catalog import REFUSED as REASONS
from nanoinfer.models.transformers.guards import check_cache, check_mixing
from nanoinfer.models.transformers.probe import HostReads, Sight, sight_of
from nanoinfer.models.transformers.split_model import SplitModel
from tests.models.test_tiny_transformers import NO_ANSWER
from tests.models.tiny_transformers import Answer, causal_names, reference, write_tiny
from tests.models.tiny_transformers import load as load_hf

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
NUM_TOKENS = 8
PROMPTS = [[(7 * length * index + 11) % 230 + 5 for index in range(length)] for length in (14, 46, 30, 62)]
# Whole prompts at once; chunks shorter than the windows of 20, in mixed batches; so few blocks that rows are preempted.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preempted": {"num_kvcache_blocks": 7, "max_model_len": 96, "enable_prefix_caching": False},
}
DAILY = (
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "Starcoder2ForCausalLM", "Gemma3nForCausalLM"),
    *("GptOssForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM"),
    *("RobertaForCausalLM", "Qwen2VLForConditionalGeneration", "LlamaForCausalLM"),
)
OVERRIDES: dict[str, dict[str, Any]] = {
    # Chunks that blocks of 16 divide; the queries grow at 512, beyond the longest position.
    "Llama4ForCausalLM": {"attention_chunk_size": 32, "floor_scale": 512},
    "Llama4ForConditionalGeneration": {"text_config": {"attention_chunk_size": 32, "floor_scale": 512}},
    "XLMRobertaXLForCausalLM": {"pad_token_id": 1},  # it is never drawn: transformers takes it for padding
}
# Classes with the attention interface that are refused, and a part of the reason.
REFUSED = {
    "AXK2ForCausalLM": "indices",
    "DeepseekV32ForCausalLM": "indices",
    "DeepseekV4ForCausalLM": "supported is one key for each token",
    "DogeForCausalLM": "a mask that its model changed",
    "DoryForCausalLM": "otherwise with transformers' cache",
    "Dots3NoteForCausalLM": "indices",
    "Gemma4AssistantForCausalLM": "cannot compute a text alone",
    "Gemma4UnifiedAssistantForCausalLM": "cannot compute a text alone",
    "GlmMoeDsaForCausalLM": "indices",
    "GraniteMoeHybridForCausalLM": "reach each other outside attention",
    "HYV4ForCausalLM": "indices",
    "Lfm2ForCausalLM": "reach each other outside attention",
    "Lfm2MoeForCausalLM": "reach each other outside attention",
    "Lfm3ForCausalLM": "reach each other outside attention",
    "MiniMaxForCausalLM": "reach each other outside attention",
    "MiniMaxM3VLForCausalLM": "block_indices",
    "RecurrentGemmaForCausalLM": "reach each other outside attention",
    "ZayaForCausalLM": "reach each other outside attention",
}


REFUSED_BEFORE_5 = ("Gemma3nForCausalLM", "OPTForCausalLM")  # other answers with a cache; a mask of its own


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "model_impl": "transformers", "kvcache_block_size": 16, **options})


def answers(llm: LLM) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append(Answer(tokens, [one[token].logprob for token, one in zip(tokens, logprobs, strict=True)]))
    return found


def assert_close(found: list[Answer], expected: list[Answer]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


def skip_unless_it_runs(architecture: str) -> None:
    """Skip a test of a class that the installed version of transformers has not, or has without what is needed."""
    has_interface = getattr(getattr(transformers, architecture, None), "_supports_attention_backend", False)
    if not has_interface or (architecture in REFUSED_BEFORE_5 and not IS_5):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture} that can run")


def assert_answers_as_transformers(architecture: str, folder: Path) -> None:
    write_tiny(architecture, folder, **OVERRIDES.get(architecture, {}))
    expected = reference(folder, PROMPTS, NUM_TOKENS)
    for way, options in WAYS.items():
        with load(folder, **options) as llm:
            assert_close(answers(llm), expected)
            assert_close(answers(llm), expected)  # with hits in the prefix cache
            num_preempted = llm.get_metrics().num_preemptions if way == "preempted" else None
            assert num_preempted is None or num_preempted > 0


@pytest.mark.parametrize("architecture", DAILY)
def test_a_model_of_transformers_answers_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    assert_answers_as_transformers(architecture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", causal_names())
def test_every_class_with_the_interface_answers_right_or_is_refused(architecture: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    if architecture in NO_ANSWER:
        pytest.skip(f"transformers itself cannot answer: it {NO_ANSWER[architecture]}")
    if architecture not in REFUSED:
        assert_answers_as_transformers(architecture, tmp_path)
        return
    write_tiny(architecture, tmp_path)
    with pytest.raises(ModelError, match=REFUSED[architecture]):
        load(tmp_path)


def test_the_documented_refusals_are_those_that_happen() -> None:
    drafts = {"Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"}
    assert {*REASONS} - {"MobileBertModel"} == {*REFUSED} | drafts


ENCODERS = ("AlbertModel", "DistilBertModel", "ElectraModel", "EuroBertModel", "NomicBertModel", "RobertaModel")


@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoder_of_transformers_embeds_the_mean_of_its_hidden_states(architecture: str, tmp_path: Path) -> None:
    skip_unless_it_runs(architecture)
    write_tiny(architecture, tmp_path)
    model = getattr(transformers, architecture).from_pretrained(tmp_path).eval()
    with load(tmp_path) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                mean = model(input_ids=torch.tensor([prompt]))[0][0].mean(0)
            expected = nn.functional.normalize(mean, dim=0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)
        with pytest.raises(Exception, match="use embed"):
            llm.generate("1 + 1 =")


# -------- Which layers a model has -----------------------------------------------------------------------------------


def test_auto_takes_our_layers_where_there_are_any_and_the_log_says_whose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("LlamaForCausalLM", tmp_path / "llama")
    write_tiny("GPTNeoXForCausalLM", tmp_path / "neox")
    with caplog.at_level(logging.INFO, "nanoinfer"):
        with LLM(tmp_path / "llama", dtype="float32"), LLM(tmp_path / "neox", dtype="float32"):
            pass
        assert "LlamaForCausalLM runs by" not in caplog.text
        assert "GPTNeoXForCausalLM runs by the layers of transformers, which nanoinfer has no layers of" in caplog.text
        with load(tmp_path / "llama"):
            assert "LlamaForCausalLM runs by the layers of transformers, as model_impl='transformers'" in caplog.text
    with pytest.raises(ModelError, match="'GPTNeoXForCausalLM' is not supported"):
        LLM(tmp_path / "neox", model_impl="nanoinfer")
    with pytest.raises(ConfigError, match="model_impl='vllm' is not known; use one of auto, nanoinfer, transformers"):
        LLM(tmp_path / "neox", model_impl="vllm")


def test_engines_of_both_kinds_answer_alike_side_by_side(tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    with LLM(tmp_path, dtype="float32", kvcache_block_size=16) as ours, load(tmp_path) as theirs:
        assert_close(answers(theirs), answers(ours))
        assert_close(answers(ours), answers(theirs))


def test_our_own_models_import_no_modeling_code_of_transformers() -> None:
    code = (
        "import sys; from nanoinfer import LLM\n"
        "LLM('tiny', device='cpu').close()\n"
        "print([name for name in sys.modules if name.startswith('transformers.models.') and '.modeling_' in name])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# -------- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Lfm2ForCausalLM", "reach each other outside attention"),
        ("DeepseekV32ForCausalLM", "indices, which is not supported"),
        ("DogeForCausalLM", "a mask that its model changed"),
        ("DoryForCausalLM", "otherwise with transformers' cache"),
        ("FalconForCausalLM", "has no attention interface in transformers"),
    ],
)
def test_a_guard_refuses_the_model_that_it_is_for(architecture: str, reason: str, tmp_path: Path) -> None:
    if not hasattr(transformers, architecture):
        pytest.skip("this version of transformers has no such class")
    write_tiny(architecture, tmp_path)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


class CountsItself(LlamaForCausalLM):
    """A Llama whose tokens know where they are in the step, instead of in their text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_pre_hook(
            lambda _module, args: (args[0] + torch.arange(args[0].shape[1])[None, :, None],)
        )


@pytest.mark.parametrize("guard", [check_mixing, check_cache])
def test_a_model_that_counts_the_places_of_a_step_is_refused(guard: Callable[..., None], tmp_path: Path) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    split = SplitModel(CountsItself.from_pretrained(tmp_path, attn_implementation="nanoinfer").eval())
    with pytest.raises(ModelError, match=r"depends on how its prompt is cut|otherwise with transformers' cache"):
        guard(split, 256) if guard is check_mixing else guard(split)


class FailsOnFewTokens(LlamaForCausalLM):
    """A Llama that cannot run the few tokens of a guard."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].register_forward_pre_hook(lambda _module, args: {}["few tokens"])


@pytest.mark.parametrize("guard", [check_mixing, check_cache])
def test_an_error_while_a_guard_runs_is_a_refusal_that_names_class_and_cause(
    guard: Callable[..., None], tmp_path: Path
) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    split = SplitModel(FailsOnFewTokens.from_pretrained(tmp_path, attn_implementation="nanoinfer").eval())
    with pytest.raises(ModelError, match=r"FailsOnFewTokens .*\(KeyError: 'few tokens'\).*; run it with transformers"):
        guard(split, 256) if guard is check_mixing else guard(split)


def test_loading_shows_no_bar_of_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tiny("LlamaForCausalLM", tmp_path)
    capfd.readouterr()
    load(tmp_path).close()
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled(), "the user's own loading shows it"


def test_what_transformers_layers_cannot_have_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_tiny("GPTNeoXForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="use data_parallel_size=2"):
        LLM(tmp_path, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="quantization='fp8' rounds the layers that are nanoinfer's own"):
        LLM(tmp_path, quantization="fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quant_method='gptq' has others; use the checkpoint in 16 bits"):
        LLM(tmp_path)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_errors_by_name(change: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_tiny("GPTNeoXForCausalLM", tmp_path)
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.bias"
    tensors = load_file(tmp_path / "model.safetensors")
    weight = tensors.pop(name)
    others = {"missing": {}, "unknown": {name: weight, "extra.weight": weight.clone()}, "shape": {name: weight[:3]}}
    tensors |= others[change]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"extra\.weight" if change == "unknown" else r"dense_h_to_4h\.bias"):
        LLM(tmp_path, dtype="float32")


DEVICES = ("cpu", "meta") if IS_5 else ()  # before, left padding is no argument
chunked = masking_utils.chunked_causal_mask_function


# -------- Masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "sight"),
    [
        (masking_utils.causal_mask_function, Sight(True)),
        (lambda batch, head, query, key: key >= 0, Sight(False)),
        (masking_utils.sliding_window_causal_mask_function(20), Sight(True, 20)),
        (masking_utils.sliding_window_causal_mask_function(100), Sight(True)),
        (lambda batch, head, query, key: (query - key).abs() <= 20, Sight(False, 21)),
        *((chunked(24, torch.zeros(1, dtype=torch.int, device=device)), Sight(True, chunk=24)) for device in DEVICES),
    ],
)
def test_what_a_mask_shows_is_read_off_its_function(function: Callable[..., Any], sight: Sight) -> None:
    assert sight_of(function, 64, "a layer") == sight


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
        lambda batch, head, query, key: (key <= query) & ((key > query - 10) | (key < 4)),
        lambda batch, head, query, key: key <= query + 3,
    ],
)
def test_a_mask_of_another_shape_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match="mask of a layer"):
        sight_of(function, 64, "a layer")


def test_what_a_model_reads_back_from_meta_is_answered_and_noted() -> None:
    x, mask = torch.empty(4, 2, device="meta"), torch.empty(4, dtype=torch.bool, device="meta")
    answers: list[Callable[[], Any]] = [
        lambda: x[0, 0].item(),
        lambda: x.tolist()[3],
        lambda: bool(mask.any()),
        lambda: x[mask].shape[0],
        lambda: [part.shape[0] for part in x.split([0, 0, 0])],
        lambda: torch.where(mask)[0].shape[0],
        lambda: mask.nonzero().shape,
        lambda: x.__setitem__(mask, x[mask]),
    ]
    expected = [0, [0, 0], False, 0, [4, 0, 0], 0, (0, 1), None]
    for answer, value in zip(answers, expected, strict=True):
        with HostReads() as reads:
            assert answer() == value
        assert reads.found
    with HostReads() as reads:
        assert [part.shape[0] for part in x.split([1, 3])] == [1, 3]
        assert torch.where(mask, x[:, 0], 0).shape == (4,)
        assert torch.ones(3).tolist() == [1, 1, 1]  # of a tensor on the host
    assert not reads.found


# -------- Weights and rotations ---------------------------------------------------------------------------------------


def test_weights_sleep_and_are_updated_by_the_names_of_transformers_buffers_too(tmp_path: Path) -> None:
    write_tiny("DeepseekV3ForCausalLM", tmp_path)
    state = load_hf(tmp_path).state_dict()
    assert any(name.endswith("e_score_correction_bias") for name in state)
    with load(tmp_path) as llm:
        before = answers(llm)
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(state)
        assert_close(answers(llm), before)
        llm.update_weights({name: torch.zeros_like(tensor) for name, tensor in state.items() if "lm_head" in name})
        assert all(one.logprobs[0] == pytest.approx(-5.5452, abs=1e-4) for one in answers(llm))  # ln(1 / 256)


@pytest.mark.skipif(not IS_5, reason="transformers 4 spells the fields otherwise")
@pytest.mark.parametrize("max_model_len", [48, 128])
def test_longrope_is_that_of_the_longest_sequence(max_model_len: int, tmp_path: Path) -> None:
    """Long factors beyond 64 positions, for short prompts too: transformers would choose by each step's longest."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 2.0}
    write_tiny("Phi3ForCausalLM", tmp_path, rope_parameters=rope, max_position_embeddings=128, sliding_window=None)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS if len(prompt) < 40]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    found = {}
    for model_impl in ("nanoinfer", "transformers"):
        with load(tmp_path, max_model_len=max_model_len, model_impl=model_impl) as llm:
            found[model_impl] = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    assert found["transformers"] == found["nanoinfer"]


def test_hidden_states_of_layers_are_those_of_transformers(tmp_path: Path) -> None:
    write_tiny("GPTNeoXForCausalLM", tmp_path)
    model = load_hf(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPTS[2]]), output_hidden_states=True).hidden_states
    with load(tmp_path) as llm:
        [output] = llm.generate(
            {"prompt_token_ids": PROMPTS[2]}, SamplingParams(max_tokens=1), hidden_states=[0, 1, 2], use_tqdm=False
        )
        states = output.hidden_states
    for layer in range(3):
        found: Tensor = torch.as_tensor(states[layer])
        torch.testing.assert_close(found.float(), expected[layer][0], rtol=0, atol=1e-4)
