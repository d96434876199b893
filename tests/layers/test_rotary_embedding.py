"""Rotary embedding against transformers: the frequencies of each type, and the rotation itself."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.errors import ModelError
from nanoinfer.layers.rotary_embedding import ROPE_TYPES, RotaryEmbedding, rope_frequencies
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store, rotate

SIZES: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
TRANSFORMERS_TRUNCATES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 55)
DEFAULT = None
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
CASES = {
    "default": DEFAULT,
    "linear": LINEAR,
    "linear, old spelling": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "dynamic, old spelling": {"type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3, factor 32, wide ramp": {**LLAMA3, "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 20.0},
    "proportional": {"rope_type": "proportional", "factor": 2.0},
    "yarn": YARN,
    "yarn, factor 1": {**YARN, "factor": 1.0, "original_max_position_embeddings": 4096},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, mscale without mscale_all_dim": {**YARN, "mscale": 0.7},
    "yarn, mscale of 0": {**YARN, "mscale": 0.0, "mscale_all_dim": 0.8},
    "yarn, attention_factor before mscale": {**YARN, "attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, beta_fast and beta_slow": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, betas not truncated": {**YARN, "beta_fast": 8.0, "beta_slow": 4.0, "truncate": False},
    "yarn, equal betas": {**YARN, "beta_fast": 10000.0, "beta_slow": 10000.0},
    "yarn, short original context": {**YARN, "factor": 16.0, "original_max_position_embeddings": 256},
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both_configs(rope_scaling: dict[str, Any] | None, head_dim: int, theta: float) -> tuple[Qwen3Config, ModelConfig]:
    options = {**SIZES, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": rope_scaling}
    return Qwen3Config(**options), read_native_config(options)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 1000000.0)])
@pytest.mark.parametrize("case", CASES)
def test_the_frequencies_are_those_of_transformers(case: str, head_dim: int, theta: float) -> None:
    if "not truncated" in case and not TRANSFORMERS_TRUNCATES:
        pytest.skip("transformers knows `truncate` from 4.55 on")
    if case == "proportional" and case not in ROPE_INIT_FUNCTIONS:
        pytest.skip(f"transformers {transformers.__version__} does not know the type")
    theirs, ours = both_configs(CASES[case], head_dim, theta)
    inv_freq, scale = rope_frequencies(ours, 4096)
    if ours.rope.rope_type == "default":
        expected, expected_scale = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    else:
        expected, expected_scale = ROPE_INIT_FUNCTIONS[ours.rope.rope_type](theirs, torch.device("cpu"))
    assert inv_freq.dtype == torch.float32
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale, rel=1e-12)


def test_the_cases_reach_every_type_and_differ_in_their_frequencies_or_scale() -> None:
    configs = [both_configs(rope_scaling, 64, 10000.0)[1] for rope_scaling in CASES.values()]
    # longrope needs factors for each pair of dimensions; tests/models has it.
    assert {config.rope.rope_type for config in configs} == {*ROPE_TYPES} - {"longrope"}
    frequencies = [rope_frequencies(config, 4096) for config in configs]
    seen = {(tuple(inv_freq.tolist()), scale) for inv_freq, scale in frequencies}
    # Five say what another says: dynamic, plain in both spellings, linear in its old one, and two forms of mscale that
    # fall back on the default.
    assert len(seen) >= len(CASES) - 6


@pytest.mark.parametrize("case", ["default", "dynamic", "linear", "llama3", "yarn", "yarn, attention_factor"])
def test_heads_are_rotated_as_transformers_rotates_them(case: str) -> None:
    theirs, ours = both_configs(CASES[case], head_dim=64, theta=10000.0)
    positions = torch.tensor([0, 1, 2, 77, 1023, 77, 2047])
    x = randn(len(positions), 4, 64)
    rotated = rotate(x, positions, RotaryEmbedding(ours, max_positions=2048).cos_sin_cache)
    expected = rotated_by_transformers(theirs, x, positions)
    # An angle of 2047 is good to 2047 * 2**-24 in float32.
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(rotated[:3], expected[:3], rtol=0, atol=1e-6)


def rotated_by_transformers(config: Qwen3Config, x: Tensor, positions: Tensor) -> Tensor:
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions.unsqueeze(0))  # (1, num_tokens, head_dim)
    batch = x.transpose(0, 1).unsqueeze(0)  # (1, num_heads, num_tokens, head_dim)
    rotated, _ = apply_rotary_pos_emb(batch, batch, cos, sin)
    return rotated.squeeze(0).transpose(0, 1)


def test_queries_and_keys_are_normalised_then_rotated_and_stored() -> None:
    """Four query heads over two KV heads; the third of four tokens has no slot."""
    theirs, ours = both_configs(DEFAULT, head_dim=64, theta=10000.0)
    norms = [Qwen3RMSNorm(64, eps=1e-6) for _ in "qk"]
    for seed, norm in enumerate(norms):
        norm.weight.data.copy_(1 + 0.3 * randn(64, seed=seed))
    positions, slots = torch.tensor([0, 1, 2, 30]), torch.tensor([5, 0, -1, 18])
    qkv = 5 * randn(len(positions), 8 * 64)
    expected_q, expected_k, expected_v = qkv.clone().unflatten(1, (8, 64)).split([4, 2, 2], dim=1)
    expected_q = rotated_by_transformers(theirs, norms[0](expected_q).detach(), positions)
    expected_k = rotated_by_transformers(theirs, norms[1](expected_k).detach(), positions)
    k_cache, v_cache = torch.zeros(2, 2, 16, 64), torch.zeros(2, 2, 16, 64)
    weights = (norms[0].weight.data, norms[1].weight.data)
    table = RotaryEmbedding(ours, max_positions=31).cos_sin_cache
    q, k, v = norm_rope_store(qkv, weights, 1e-6, positions, table, LayerCache(k_cache, v_cache), slots)
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, expected_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(v, expected_v)
    for token, (block, offset) in {0: (0, 5), 1: (0, 0), 3: (1, 2)}.items():
        assert torch.equal(k_cache[block, :, offset], k[token])
        assert torch.equal(v_cache[block, :, offset], v[token])
    assert k_cache.any(dim=-1).sum() == v_cache.any(dim=-1).sum() == 3 * 2


def test_position_0_changes_nothing_and_one_quarter_turn_swaps_the_halves() -> None:
    cos_sin_cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # cosine and sine of no turn, and of a quarter turn
    x = torch.tensor([[[3.0, 4.0]], [[3.0, 4.0]]])
    assert rotate(x, torch.tensor([0, 1]), cos_sin_cache).tolist() == [[[3.0, 4.0]], [[-4.0, 3.0]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rotated_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    _, config = both_configs(YARN, head_dim=64, theta=10000.0)
    cos_sin_cache = RotaryEmbedding(config, max_positions=512).cos_sin_cache
    positions = torch.arange(0, 512, 73)
    x = randn(len(positions), 2, 64).to(dtype)
    exact = rotate(x.float(), positions, cos_sin_cache)
    assert torch.equal(rotate(x, positions, cos_sin_cache), exact.to(dtype))


@pytest.mark.parametrize("rope_type", ["ntk", "axial"])
def test_an_unknown_type_is_refused_with_the_list(rope_type: str) -> None:
    config = read_native_config({**SIZES, "rope_scaling": {"rope_type": rope_type, "factor": 2.0}})
    with pytest.raises(ModelError) as error:
        rope_frequencies(config, 4096)
    assert str(error.value) == (
        f"rope_type='{rope_type}' is not supported; supported are default, dynamic, linear, llama3, longrope, "
        "proportional, yarn"
    )


@pytest.mark.parametrize(
    ("rope_scaling", "name"),
    [
        (LINEAR, "factor"),
        ({"rope_type": "dynamic", "factor": 2.0}, "factor"),
        (YARN, "factor"),
        (LLAMA3, "factor"),
        (LLAMA3, "low_freq_factor"),
        (LLAMA3, "high_freq_factor"),
        (LLAMA3, "original_max_position_embeddings"),
    ],
)
def test_a_missing_parameter_is_refused_by_name(rope_scaling: dict[str, Any], name: str) -> None:
    without = {key: value for key, value in rope_scaling.items() if key != name}
    with pytest.raises(ModelError) as error:
        rope_frequencies(read_native_config({**SIZES, "rope_scaling": without}), 4096)
    assert str(error.value) == f"rope_type='{rope_scaling['rope_type']}' needs the parameter '{name}' in config.json"


def test_dynamic_is_refused_for_positions_beyond_the_models_own() -> None:
    config = both_configs({"rope_type": "dynamic", "factor": 2.0}, 64, 10000.0)[1]
    assert rope_frequencies(config, 4096)[1] == 1.0
    with pytest.raises(ModelError, match=r"a sequence that outgrows 4096, and .*; use max_model_len=4096 at most"):
        rope_frequencies(config, 4097)


def test_yarn_without_an_original_context_stretches_the_models_own() -> None:
    without = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    written = {**YARN, "original_max_position_embeddings": SIZES["max_position_embeddings"]}
    inv_freq, scale = rope_frequencies(both_configs(without, 64, 10000.0)[1], 4096)
    expected, expected_scale = rope_frequencies(both_configs(written, 64, 10000.0)[1], 4096)
    assert torch.equal(inv_freq, expected)
    assert scale == expected_scale
