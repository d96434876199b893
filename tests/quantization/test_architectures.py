"""Every architecture with weights in FP8, against the weights that they stand for in float32."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.ops.fp8.spec import dequantize_weight, fit_weight
from nanoinfer.quantization import method_selection
from tests.models.test_architectures import ARCHITECTURES, SMALL_WEIGHTS, checkpoint, draw_prompts, generate

__all__ = ["checkpoint"]
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}


def in_16_bits(name: str) -> bool:
    """Norms, biases, the two ends of the model, and what is small."""
    return any(part in name for part in ("norm", "bias", "embed", "lm_head", *SMALL_WEIGHTS))


def rounded(folder: Path, target: Path) -> Path:
    """The checkpoint with its weights rounded to FP8 and back."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if not in_16_bits(name):
            # Each row has a scale of its own, so it does not matter what is packed with what.
            tensors[name] = dequantize_weight(*fit_weight(tensor))
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    return target


ROUNDED = [name for name in ARCHITECTURES if name != "GptOssForCausalLM"]  # whose experts are not, see test_mxfp4.py


@pytest.mark.parametrize("architecture", ROUNDED)
def test_weights_that_are_rounded_while_they_are_loaded(
    checkpoint: Callable[..., Path], architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = checkpoint(architecture, 0, **SIZES), draw_prompts(0)
    wide = rounded(folder, tmp_path)
    assert generate(folder, prompts, quantization="fp8") == generate(wide, prompts)

    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    params, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for model, options in ((folder, {"quantization": "fp8"}), (wide, {})):
        with LLM(model, device="cpu", dtype="float32", **options) as llm:
            [output] = llm.generate([prompts[-1]], params, use_tqdm=False)
        entries = zip(prompts[-1], output.prompt_logprobs or [], strict=True)
        found.append(torch.tensor([entry[token].logprob for token, entry in entries if entry]))
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.median() < 0.5
