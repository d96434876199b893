"""Embeddings of encoders and of decoders on a GPU, against transformers in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nanoinfer import LLM
from nanoinfer.models.prefill_graphs import STEPS_BEFORE_CAPTURE
from tests.models.test_architectures import save_random_model
from tests.pooling.test_decoders import embeddings, normalized
from tests.pooling.test_encoders import FAMILIES, reference, save_encoder

pytestmark = pytest.mark.gpu

generator = torch.Generator().manual_seed(0)
PROMPTS = [
    torch.randint(5, 128, (length,), generator=generator).tolist() for length in (500, 1, 63, 129, 300, 16, 40, 256)
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 640}


@pytest.mark.parametrize("attention_backend", ["auto", "triton", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_give_the_mean_of_transformers(tmp_path: Path, family: str, attention_backend: str) -> None:
    """Texts share steps, and the longest has one of its own."""
    save_encoder(tmp_path, f"{family}Model", **SIZES)
    outputs = reference(tmp_path, f"{family}Model", PROMPTS)
    expected = torch.stack([normalized(output.last_hidden_state[0].mean(0)) for output in outputs])
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 512, "attention_backend": attention_backend}
    with LLM(tmp_path, max_model_len=512, **options) as llm:
        found = torch.from_numpy(np.stack(embeddings(llm, PROMPTS)))
    cosines = (found * expected).sum(-1)
    print(f"{family}, {attention_backend}: least cosine {cosines.min():.5f}")
    assert cosines.min() > 0.998


@pytest.mark.parametrize("family", [*FAMILIES, "Qwen3"])
def test_steps_of_short_texts_are_the_same_in_graphs_and_without(tmp_path: Path, family: str) -> None:
    """Equal steps give equal bits before a capture and after it; those of other sizes differ by rounding."""
    if family == "Qwen3":
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
        save_random_model(
            tmp_path,
            "Qwen3Model",
            {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 64},
            0,
        )
    else:
        save_encoder(tmp_path, f"{family}Model", **SIZES)
    texts = [ids[: 20 + index % 41] for index, ids in enumerate(PROMPTS[:1] * 100)]
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 3000, "enable_prefix_caching": False}
    with LLM(tmp_path, **options) as llm:
        runs = [np.stack(embeddings(llm, texts)) for _ in range(STEPS_BEFORE_CAPTURE + 2)]
        runner = llm.engine.runner
        assert runner is not None
        small = runner.model_runner.state.buffers.prefill_graphs.small
        assert small is not None
        assert max(small._graphs) == 3000
    with LLM(tmp_path, enforce_eager=True, **options) as llm:
        expected = np.stack(embeddings(llm, texts))
    assert all((run == runs[0]).all() for run in runs)
    cosines = (runs[0] * expected).sum(-1)
    print(f"{family}: least cosine {cosines.min():.6f}")
    assert cosines.min() > 0.9995
