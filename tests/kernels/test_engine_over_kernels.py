"""An engine on the CPU whose attention is by our kernels, in Triton's interpreter: from a prompt to shared prefixes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, SamplingParams

pytest.importorskip("triton")

from nanoinfer.layers.attention import triton as triton_backend
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.ops.decode_attention import triton as decode_kernels
from tests.kernels.helpers import exact_fp8, loops_are_interpreted
from tests.models.test_architectures import VOCAB_SIZE, draw_options, save_random_model
from tests.proposers import KnownTexts, assert_same_answers, engine_of, proposing_llm

__all__ = ["exact_fp8"]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
    pytest.mark.usefixtures("exact_fp8"),
    # Of queries after the last of a group, whose results are not stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]


def draw(folder: Path, min_saved_tokens: int, kv_cache_dtype: str) -> list[list[int]]:
    """Three tokens of two and of three samples of prompts of two blocks and a half, and of a short prompt alone."""
    alone = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
    options = {"kvcache_block_size": 16, "max_model_len": 64, "kv_cache_dtype": kv_cache_dtype}
    with LLM(folder, device="cpu", num_kvcache_blocks=100, **options) as llm:
        llm.engine.scheduler.sharer_finder.min_saved_tokens = min_saved_tokens
        params = [replace(alone, n=2), replace(alone, n=3), alone]
        outputs = llm.generate([[*range(40)], [*range(9, 49)], [7, 8, 9]], params, use_tqdm=False)
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    ("architecture", "kv_cache_dtype"),
    [(None, "auto"), (None, "int8"), (None, "fp8"), ("Gemma2ForCausalLM", "auto"), ("Gemma2ForCausalLM", "int8")],
)
def test_samples_that_read_their_prompt_together_are_those_of_plain_attention(
    random_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_dtype: str,
    architecture: str | None,
) -> None:
    """Of a plain model, and of one whose scores are capped, in full attention alone."""
    folder = tmp_path
    if architecture is None:
        folder = random_checkpoint()
    else:
        full = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": 0.2}
        save_random_model(folder, architecture, draw_options(architecture, 1) | full, seed=1)
    expected = draw(folder, 0, kv_cache_dtype)
    assert len({tuple(token_ids) for token_ids in expected}) == 6
    passes = []

    def note(*args: Any) -> Any:
        passes.append(args)
        return decode_kernels.shared_prefix_attention(*args)

    monkeypatch.setattr(decode_kernels, "num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(triton_backend, "shared_prefix_attention", note)
    monkeypatch.setattr(AttentionBackends, "select", lambda _, spec: triton_backend.TritonBackend(spec))
    assert draw(folder, 10**9, kv_cache_dtype) == expected
    assert not passes
    assert draw(folder, 0, kv_cache_dtype) == expected
    assert len(passes) == 2 * 2, "each decode step, in both layers"


@pytest.mark.parametrize(
    ("architecture", "kv_cache_dtype"), [("Qwen3ForCausalLM", "int8"), ("Gemma2ForCausalLM", "auto")]
)
def test_rows_of_several_tokens_read_their_prompt_together(
    architecture: str, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several tokens, some with prefixes that are shared, give the tokens of plain attention."""
    full = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_attention_heads": 4}
    save_random_model(tmp_path, architecture, draw_options(architecture, 1) | full | {"num_key_value_heads": 2}, seed=1)
    options = {"kvcache_block_size": 16, "max_model_len": 64, "kv_cache_dtype": kv_cache_dtype, "device": "cpu"}
    alone = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True)
    request = [[*range(40)], [*range(9, 49)], [7, 8, 9]], [replace(alone, n=2), replace(alone, n=3), alone]
    with LLM(tmp_path, num_kvcache_blocks=100, **options) as llm:
        expected = llm.generate(*request, use_tqdm=False)
    shares = []

    def note(*args: Any) -> Any:
        shares.append(args[2])
        return decode_kernels.shared_prefix_attention(*args)

    monkeypatch.setattr(decode_kernels, "num_multiprocessors", lambda device: 2)
    monkeypatch.setattr(triton_backend, "shared_prefix_attention", note)
    monkeypatch.setattr(AttentionBackends, "select", lambda _, spec: triton_backend.TritonBackend(spec))
    with proposing_llm(tmp_path, num_kvcache_blocks=100, **options) as llm:
        engine = engine_of(llm)
        engine.scheduler.sharer_finder.min_saved_tokens = 0
        engine.proposer = KnownTexts(expected, VOCAB_SIZE, share_right=0.8)
        outputs = llm.generate(*request, use_tqdm=False)
        metrics = llm.get_metrics()
    assert_same_answers(outputs, expected)
    assert shares
    assert metrics.num_decode_steps < 5
