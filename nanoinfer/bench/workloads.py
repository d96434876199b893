"""What a benchmark runs: a model, and requests of chosen sizes made of random tokens."""

import json
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanoinfer import tiny_model_path
from nanoinfer.checkpoint.hub import resolve_model_folder
from nanoinfer.checkpoint.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Load:
    """Says how many requests a run has, and how many tokens; lengths are uniform from the least to the most.

    max_num_seqs: the most sequences that run at once. nano-vllm's is 512; every engine that takes this option is given
        it. A request has as many sequences as samples.
    shared_prefix: how many tokens all prompts of a run have in common, before those that `input_len` counts.
    num_samples: how many samples of each prompt are drawn; those of a prompt are equally long.
    num_answers: how many answers to each prompt are scored, in place of completions; `output_len` is theirs.
    prompt_logprobs, detokenize: as in SamplingParams.
    """

    num_seqs: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    max_num_seqs: int = 512
    shared_prefix: int = 0
    num_samples: int = 1
    num_answers: int = 0
    prompt_logprobs: int | None = None
    detokenize: bool = True

    @property
    def longest(self) -> int:
        """Return the most tokens that a request can have at its end."""
        return self.shared_prefix + self.input_len[1] + self.output_len[1]


# By device and name; each load of a name is a run of its own. The loads of a CPU are the same kinds of work, and take
# seconds with the tiny checkpoint.
LOADS: dict[str, dict[str, list[Load]]] = {
    "cuda": {
        "default": [Load(256, (100, 1024), (100, 1024))],  # nano-vllm's
        "small": [Load(num_seqs, (128, 512), (256, 256)) for num_seqs in (1, 4, 16)],
        "steady": [Load(4096, (100, 1024), (100, 1024))],
        "shared": [Load(256, (100, 1024), (100, 1024), shared_prefix=2048)],
        "samples": [Load(32, (1100, 1100), (512, 512), num_samples=8)],
        "long": [Load(8, (32768, 32768), (512, 512))],
        "read": [Load(512, (1500, 2500), (1, 1))],
        "fewshot": [Load(2048, (50, 150), (4, 4), shared_prefix=2000)],
        "short": [Load(4096, (20, 60), (8, 8))],
        "logprobs": [Load(128, (2000, 2000), (1, 1), prompt_logprobs=1)],
        "logprobs_ids": [Load(128, (2000, 2000), (1, 1), prompt_logprobs=1, detokenize=False)],
        "score": [Load(1024, (500, 500), (10, 10), num_answers=4)],
        "book": [Load(8, (30000, 30000), (16, 16))],
    },
    "cpu": {
        "default": [Load(16, (64, 64), (64, 64))],
        "small": [Load(num_seqs, (32, 128), (32, 32)) for num_seqs in (1, 4, 16)],
        "steady": [Load(64, (8, 64), (8, 64), max_num_seqs=8)],
        "shared": [Load(16, (64, 64), (32, 32), shared_prefix=256)],
        "samples": [Load(4, (275, 275), (32, 32), num_samples=4)],
        "long": [Load(2, (2048, 2048), (32, 32))],
        "read": [Load(16, (150, 250), (1, 1))],
        "fewshot": [Load(32, (5, 15), (4, 4), shared_prefix=200)],
        "short": [Load(64, (2, 6), (8, 8))],
        "logprobs": [Load(8, (200, 200), (1, 1), prompt_logprobs=1)],
        "logprobs_ids": [Load(8, (200, 200), (1, 1), prompt_logprobs=1, detokenize=False)],
        "score": [Load(16, (50, 50), (10, 10), num_answers=4)],
        "book": [Load(2, (1000, 1000), (16, 16))],
    },
}


def choose_loads(load_name: str, device: str, **sizes: int | None) -> list[Load]:
    """Return the loads of this name; `sizes` that are given replace the fields of Load that they are named after.

    input_len and output_len, if given, are the most tokens. The least are those of a GPU's load, or the most if fewer.
    """
    loads, on_gpu = LOADS[device][load_name], LOADS["cuda"][load_name][0]
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    for lens in ("input_len", "output_len"):
        if most := changes.get(lens):
            changes[lens] = (min(getattr(on_gpu, lens)[0], most), most)
    return [replace(load, **changes) for load in (loads[:1] if "num_seqs" in changes else loads)]


@dataclass(frozen=True, slots=True)
class Workload:
    """Holds the requests of one run: the token ids of each prompt, and how many tokens each sample of it has.

    answers: of each prompt those that are scored; a prompt that has any is not completed.
    """

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]
    shared_prefix: int = 0  # how many tokens all prompts begin with
    num_samples: int = 1  # of each prompt
    prompt_logprobs: int | None = None
    detokenize: bool = True
    answers: list[list[list[int]]] = field(default_factory=list)

    @property
    def num_input_tokens(self) -> int:
        """Return how many tokens the prompts have, each counted once for all its samples."""
        return sum(map(len, self.prompts))

    @property
    def output_lens(self) -> list[int]:
        """Return how many tokens each sample of the first prompt has, then each one of the next prompts.

        If answers are scored, nothing is generated, and the numbers of their tokens come instead.
        """
        if self.answers:
            return [len(answer) for answers in self.answers for answer in answers]
        return [max_tokens for max_tokens in self.max_tokens for _ in range(self.num_samples)]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def draw_workload(seed: int, load: Load, vocab_size: int) -> Workload:
    """Draw the requests of a load as nano-vllm's benchmark draws its own, so that figures can be compared.

    The shared prefix is drawn last, so that the rest is the same without it. Ids stay inside the vocabulary.
    """
    randint = random.Random(seed).randint
    max_id = min(10000, vocab_size - 1)
    prompts = [[randint(0, max_id) for _ in range(randint(*load.input_len))] for _ in range(load.num_seqs)]
    max_tokens = [randint(*load.output_len) for _ in range(load.num_seqs)]
    prefix = [randint(0, max_id) for _ in range(load.shared_prefix)]
    prompts = [prefix + prompt for prompt in prompts]
    if not load.num_answers:
        options = load.num_samples, load.prompt_logprobs, load.detokenize
        return Workload(seed, prompts, max_tokens, load.shared_prefix, *options)
    answers = [[[randint(0, max_id) for _ in range(n)] for _ in range(load.num_answers)] for n in max_tokens]
    return Workload(seed, prompts, [1] * load.num_seqs, load.shared_prefix, answers=answers)


def _qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, is_tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": is_tied,
    }


# What the config.json of a size says; those without another name are Qwen3's.
SIZES = {
    "0.6B": _qwen3(1024, 3072, 28, 16, True),
    "1.7B": _qwen3(2048, 6144, 28, 16, True),
    "4B": _qwen3(2560, 9728, 36, 32, True),
    "8B": _qwen3(4096, 12288, 36, 32, False),
    "14B": _qwen3(5120, 17408, 40, 40, False),
    "32B": _qwen3(5120, 25600, 64, 64, False),
    "30B-A3B": {
        **_qwen3(2048, 6144, 48, 32, False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "llama-8B": {  # Llama 3.1
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3.5-9B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "qwen3.5-27B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 32768,
    },
    "qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "qwen3-next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "gemma3-12B": {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "rope_theta": 1000000.0,
    },
    "qwen2-7B": {  # Qwen2.5
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
    },
}


@dataclass(frozen=True, slots=True)
class Model:
    """Names a model; `folder` holds its config.json and, unless `random_weights`, its checkpoint.

    quantization: how its weights are rounded when they are loaded; None: not at all.
    """

    name: str
    folder: Path
    config: ModelConfig
    random_weights: bool
    quantization: str | None = None

    def __str__(self) -> str:
        rounded = f", {self.quantization}" if self.quantization else ""
        return f"{self.name} ({'random' if self.random_weights else 'its own'} weights{rounded})"

    @property
    def load_format(self) -> str:
        """Return the option of nanoinfer and vLLM that says where weights come from."""
        return "dummy" if self.random_weights else "auto"

    @property
    def options(self) -> dict[str, Any]:
        """Return all options of nanoinfer and vLLM that belong to the model."""
        return {"load_format": self.load_format, "quantization": self.quantization}


def choose_model(
    model: str | None, size: str | None, device: str, scratch: Path, quantization: str | None = None
) -> Model:
    """Return the model asked for; if none is, Qwen3-0.6B on a GPU and the bundled tiny checkpoint on a CPU.

    A size gets random weights, and its config.json is written to the folder `scratch`: a forward pass is as fast with
    random weights as with trained ones.
    """
    from nanoinfer.models import REGISTRY  # imports PyTorch, which --help need not wait for

    if model is None and (size or device == "cuda"):
        size = size or "0.6B"
        write_config(size, scratch)
        name = f"Qwen3-{size}" if size[0].isdigit() else size
        config = ModelConfig.from_folder(scratch, REGISTRY, quantization=quantization)
        return Model(name, scratch, config, True, quantization)
    folder = resolve_model_folder(model or str(tiny_model_path()))
    config = ModelConfig.from_folder(folder, REGISTRY, quantization=quantization)
    return Model(model or "tiny-qwen3", folder, config, False, quantization)


def write_config(size: str, folder: Path) -> None:
    """Write the config.json of a size, with the tokenizer of the tiny checkpoint beside it.

    With a tokenizer every engine turns its output into text, as nano-vllm does in its own benchmark.
    """
    config = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_path() / name, folder / name)
