"""Gemma 3: its own layers against those of transformers, to the last bit, and both spellings of its config.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Gemma3TextConfig
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding

from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoint.model_config import ModelConfig, RopeConfig
from nanoinfer.device import default_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers.layernorm import GemmaRMSNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.models.gemma import Gemma3Embedding
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul
from tests.models.test_architectures import checkpoint, draw_prompts

__all__ = ["checkpoint"]  # a fixture
PAGE = Path(__file__).parents[2] / "docs/models.md"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# As gemma-3-1b-it has it, in the spelling of transformers 4.50.
OF_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(raw: dict[str, Any]) -> ModelConfig:
    return read_native_config(raw)


# --- layers ---


def norms(dtype: torch.dtype, seed: int) -> tuple[GemmaRMSNorm, Gemma3RMSNorm]:
    """Ours and theirs, with the same random weights."""
    with default_dtype(dtype):
        ours, theirs = GemmaRMSNorm(96, eps=1e-5), Gemma3RMSNorm(96, eps=1e-5)
    weight = (0.3 * randn(96, seed=seed)).to(dtype)
    ours.weight_loader(ours.weight, weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_before_and_after_attention_equal_those_of_transformers(dtype: torch.dtype) -> None:
    (ours, theirs), (our_post_norm, their_post_norm) = norms(dtype, seed=1), norms(dtype, seed=2)
    attended, residual = randn(5, 96).to(dtype), randn(5, 96, seed=3).to(dtype)
    assert torch.equal(ours(None, residual)[0], theirs(residual))
    out, total = ours(our_post_norm.of_sum(PartialSum(attended.unsqueeze(0))), residual)
    expected = residual + their_post_norm(attended)
    assert torch.equal(total, expected)
    assert torch.equal(out, theirs(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_scaled_as_by_transformers(dtype: torch.dtype) -> None:
    """In bfloat16 the square root of 1152 is 34."""
    weight, token_ids = randn(7, 1152).to(dtype), torch.tensor([0, 6, 3, 3])
    with default_dtype(dtype):
        ours = Gemma3Embedding(7, 1152, TensorParallel())
        theirs = Gemma3TextScaledWordEmbedding(7, 1152, padding_idx=0, embed_scale=1152**0.5)
    ours.weight_loader(ours.weight, weight)
    theirs.weight.data.copy_(weight)
    assert torch.equal(ours(token_ids), theirs(token_ids))
    if dtype == torch.bfloat16:
        assert torch.equal(ours(token_ids), weight[token_ids] * 34)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation_is_that_of_transformers(dtype: torch.dtype) -> None:
    gate_up = (2 * randn(5, 192)).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(gelu_tanh_and_mul(gate_up), ACT2FN["gelu_pytorch_tanh"](gate) * up)


def test_random_weights_have_norms_that_multiply_by_1(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    Gemma3TextConfig(**sizes, architectures=["Gemma3ForCausalLM"]).save_pretrained(tmp_path)
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 64, "num_kvcache_blocks": 1}
    with LLM(tmp_path, device="cpu", **options) as llm:
        norm_weights = [p for name, p in llm.engine.runner.model.named_parameters() if name.endswith("norm.weight")]
        assert len(norm_weights) == 2 * (4 + 2) + 1
        assert all(weight.dtype == torch.float32 and bool(weight.eq(1).all()) for weight in norm_weights)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert len(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].token_ids) == 4


def test_logits_are_capped_where_config_json_says_so_as_by_transformers(checkpoint: Callable[..., Path]) -> None:
    folder, prompt = checkpoint("Gemma3ForCausalLM", 0, final_logit_softcapping=0.3), draw_prompts(0, (40,))[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=100) as llm:
        found = (llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs or [])[1:]
    assert [entry[token].logprob for token, entry in zip(prompt[1:], found, strict=True)] == pytest.approx(
        expected, abs=5e-5
    )


# --- config.json ---


def test_a_config_of_gemma_3_1b_is_read_in_both_spellings() -> None:
    config = read(OF_1B)
    assert config.windows == (*((512,) * 5 + (None,)) * 4, 512, 512), "every sixth layer attends to all tokens"
    assert (config.rope, config.local_rope) == (RopeConfig("default", 1e6, {}), RopeConfig("default", 1e4, {}))
    assert (config.attention_scale, config.tie_word_embeddings) == (1 / 16, True)
    assert config.max_model_len == 32768
    written = Gemma3TextConfig(**OF_1B).to_dict()
    assert written["rope_parameters"].keys() == {"full_attention", "sliding_attention"}
    assert len(written["layer_types"]) == 26
    assert read(written) == config


def test_the_base_of_both_kinds_of_layers_in_one_field_is_read() -> None:
    """GPTQModel writes it into the sets of transformers 5; it counts where a set has no base of its own."""
    bases = {"global": 1e6, "local": 1e4}
    sets = Gemma3TextConfig(**OF_1B).to_dict()["rope_parameters"]
    assert read({**OF_1B, "rope_parameters": {**sets, "rope_type": "default", "rope_theta": bases}}) == read(OF_1B)
    assert read({**OF_1B, "rope_parameters": sets, "rope_theta": {"global": 7.0, "local": 7.0}}) == read(OF_1B)
    config = read({**OF_1B, "rope_theta": {"global": 5e6, "local": 5e4}})
    assert (config.rope, config.local_rope) == (RopeConfig("default", 5e6, {}), RopeConfig("default", 5e4, {}))


def test_rope_scaling_is_that_of_full_attention_and_does_not_stretch_the_context_again() -> None:
    """As in the larger models: 131,072 positions are what their linear scaling makes of an eighth of them."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {**OF_1B, "max_position_embeddings": 131072, "query_pre_attn_scalar": 168, "rope_scaling": linear}
    config = read(old)
    assert config.rope == RopeConfig("linear", 1e6, {"factor": 8.0})
    assert config.local_rope == RopeConfig("default", 1e4, {})
    assert config.max_model_len == 131072
    assert config.attention_scale == 168**-0.5
    assert read(Gemma3TextConfig(**old).to_dict()) == config


@pytest.mark.parametrize(
    ("entry", "windows"),
    [
        ({}, (8, 8, 8, 8, 8, None, 8)),
        ({"sliding_window_pattern": None}, (8, 8, 8, 8, 8, None, 8)),
        ({"sliding_window_pattern": 2}, (8, None, 8, None, 8, None, 8)),
        ({"sliding_window_pattern": 1}, (None,) * 7),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 6]}, (None, 8, 8, 8, 8, 8, 8)),
    ],
    ids=str,
)
def test_which_layers_have_a_window(entry: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    raw = {name: value for name, value in OF_1B.items() if name != "sliding_window_pattern"}
    config = read({**raw, "num_hidden_layers": 7, "sliding_window": 8, **entry})
    assert config.windows == windows
    assert config.windows_within(8) == (None,) * 7, "no sequence outgrows them"
    assert config.windows_within(9) == windows


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "config.json has attn_logit_softcapping=50.0, which is not supported"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping=0; it must be a positive number"),
        ({"use_bidirectional_attention": True}, "has use_bidirectional_attention=True, which is not supported"),
        ({"hidden_activation": "gelu"}, "config.json has hidden_activation='gelu', which is not supported"),
        ({"sliding_window": None}, "sliding_window=None; it must be a whole number of at least 1"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0; it must be a whole number of at least 1"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0; it must be a positive number"),
        ({"rope_local_base_freq": "x"}, "rope_local_base_freq='x'; it must be a positive number"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "it must have a set for each of ('full_attention'",
        ),
        ({"rope_theta": {"global": 1e6}}, "local=None; it must be a positive number"),
        ({"rope_parameters": {"sliding_attention": 5}}, "config.json has sliding_attention=5; one set of numbers"),
        ({"rope_parameters": {"sliding_attention": {"factor": 8.0}}}, "and no rope_type; say of which type"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5, which is not supported",
        ),
    ],
    ids=str,
)
def test_what_is_not_built_in_or_makes_no_sense_is_refused_by_field_and_value(
    entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        read({**OF_1B, **entry})
    assert message in str(error.value)
