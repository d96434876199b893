"""Embeddings of encoders and of decoders on a GPU, against transformers in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nanoinfer import LLM
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
