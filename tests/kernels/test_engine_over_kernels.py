"""An engine on the CPU whose attention is by our kernels, in Triton's interpreter: from a prompt to shared prefixes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.layers.attention import backend_selection

pytest.importorskip("triton")

from nanoinfer.layers.attention import triton as triton_backend
from nanoinfer.ops.decode_attention import triton as decode_kernels
from tests.kernels.helpers import exact_fp8, loops_are_interpreted
from tests.models.test_architectures import draw_options, save_random_model

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
    monkeypatch.setattr(backend_selection, "select_backend", lambda *args: triton_backend.TritonBackend(args[3]))
    assert draw(folder, 10**9, kv_cache_dtype) == expected
    assert not passes
    assert draw(folder, 0, kv_cache_dtype) == expected
    assert len(passes) == 2 * 2, "each decode step, in both layers"
