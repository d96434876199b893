"""Cohere2: its own parts against those of transformers, and a config.json as its checkpoints have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.cohere2.modeling_cohere2 import (
    Cohere2LayerNorm,
    Cohere2RotaryEmbedding,
    apply_rotary_pos_emb,
)

from nanoinfer import LLM, SamplingParams
from nanoinfer.device import default_dtype
from nanoinfer.layers.layernorm import CohereLayerNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.kv_cache.spec import rotate
from tests.models.test_architectures import checkpoint, draw_prompts

__all__ = ["checkpoint"]  # a fixture
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# As c4ai-command-r7b-12-2024 has it.
OF_7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "vocab_size": 256000,
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norms(dtype: torch.dtype, size: int = 96) -> tuple[CohereLayerNorm, Cohere2LayerNorm]:
    """Ours and theirs, with the same random weights."""
    with default_dtype(dtype):
        ours, theirs = CohereLayerNorm(size, eps=1e-5), Cohere2LayerNorm(size, eps=1e-5)
    weight = (1 + 0.3 * randn(size)).to(dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_those_of_transformers(dtype: torch.dtype) -> None:
    """Of the stream alone, and after attention and MLP were added to it."""
    ours, theirs = norms(dtype)
    attention, mlp, residual = (3 + randn(5, 96, seed=seed).to(dtype) for seed in (1, 2, 3))
    normed, total = ours(None, residual)
    assert torch.equal(normed, theirs(residual))
    assert total is residual
    both = PartialSum(attention.unsqueeze(0)).plus(PartialSum(mlp.unsqueeze(0)))
    normed, total = ours(both, residual)
    torch.testing.assert_close(total, residual + attention + mlp, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(normed, theirs(total))


def test_positions_turn_neighbouring_dimensions_as_in_transformers() -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    theirs = transformers.Cohere2Config(**sizes)
    ours = read_native_config({**theirs.to_dict(), "architectures": ["Cohere2ForCausalLM"]})
    positions, x = torch.tensor([0, 1, 2, 77, 500]), randn(5, 4, 64)
    table = RotaryEmbedding(ours, max_positions=512).cos_sin_cache
    batch = x.transpose(0, 1).unsqueeze(0)  # (1, num_heads, num_tokens, head_dim)
    expected, _ = apply_rotary_pos_emb(batch, batch, *Cohere2RotaryEmbedding(theirs)(x, positions.unsqueeze(0)))
    rotated = rotate(x, positions, table, interleaved=True)
    torch.testing.assert_close(rotated, expected.squeeze(0).transpose(0, 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_log_probabilities_are_of_scaled_logits(checkpoint: Callable[..., Path], num_ranks: int) -> None:
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    folder = checkpoint("Cohere2ForCausalLM", 0, **even, logit_scale=0.3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 100, "tensor_parallel_size": num_ranks}
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = draw_prompts(0, (40, 17))
    with LLM(folder, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = [
            entry[token].logprob for token, entry in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
        ]
        expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert found == pytest.approx(expected.tolist(), abs=5e-5)


def test_a_config_of_command_r7b_is_read_as_transformers_does() -> None:
    config = read_native_config(OF_7B)
    assert config.windows == (4096, 4096, 4096, None) * 8
    assert config.unrotated == (False, False, False, True) * 8, "also where no sequence outgrows the window"
    assert (config.rms_norm_eps, config.logits_scaling, config.rope.theta) == (1e-5, 4.0, 50000)
    assert config.tie_word_embeddings
    written = {**transformers.Cohere2Config(**OF_7B).to_dict(), "architectures": ["Cohere2ForCausalLM"]}
    assert read_native_config(written) == config
