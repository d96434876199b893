"""How fast is it, and how fast could it be: nano-vllm's workload, timed and set against the hardware's floor.

    python bench.py                          # on a GPU: Qwen3-0.6B with random weights, 256 requests
    python bench.py --size 8B --runs 3       # another size; each run draws a new workload
    python bench.py --model Qwen/Qwen3-0.6B  # real weights
    python bench.py --engine vllm            # the same work by another engine, where that is installed

The speed of a forward pass does not depend on the weights' values, so random ones are as good as a download. Without a
GPU the bundled tiny checkpoint does a small load, which shows that everything runs and says little about speed.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoinfer import NanoinferError, tiny_model_path  # cheap: what takes time to import comes after the clock starts
from nanoinfer.config import ModelConfig
from nanoinfer.utils.hub import resolve_model_folder

GIB = 2**30
MAX_NUM_SEQS = 512  # nano-vllm's, given to every engine that takes it
WARM_UP_TOKENS = 16
TEMPERATURE = 0.6

# Of each Qwen3 size: hidden, intermediate, layers, heads, KV heads, whether embedding and lm_head are one matrix.
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
VOCAB_SIZE = 151936


@dataclass(frozen=True, slots=True)
class Model:
    """What is run: `folder` holds a config.json and, unless `random_weights`, a checkpoint."""

    name: str
    folder: Path
    config: ModelConfig
    random_weights: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run: token ids of each prompt, and how many tokens each is to be continued by."""

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware was seen to do. bandwidth: bytes/s; matrix_rate: FLOP/s; method: how they were measured."""

    bandwidth: float
    matrix_rate: float
    method: str


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds that a workload can take, by what they go to; `compute_floor` says how they are counted."""

    prefill_seconds: float
    decode_matrix_seconds: float
    decode_kv_seconds: float

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_matrix_seconds + self.decode_kv_seconds


@dataclass(frozen=True, slots=True)
class Result:
    """One timed run. stats: the engine's own prefill and decode figures, empty where it keeps none."""

    seed: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    stats: dict[str, float]

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def draw_workload(seed: int, num_seqs: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    """nano-vllm's workload: the same draws in the same order, so that figures compare.

    Lengths are uniform from 100 (or the maximum, if that is less) to the maximum; ids stay inside the vocabulary.
    """
    randint = random.Random(seed).randint
    max_id = min(10000, vocab_size - 1)
    prompts = [[randint(0, max_id) for _ in range(randint(min(100, input_len), input_len))] for _ in range(num_seqs)]
    return Workload(seed, prompts, [randint(min(100, output_len), output_len) for _ in range(num_seqs)])


# The model


def write_config(size: str, folder: Path) -> None:
    """Write the config.json of a Qwen3 size, with the tokenizer of the tiny checkpoint beside it.

    The tokenizer makes every engine turn its output into text, as nano-vllm does in its own benchmark.
    """
    hidden, intermediate, num_layers, num_heads, num_kv_heads, tied = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tiny_model_path() / name).exists():
            shutil.copy(tiny_model_path() / name, folder / name)


def choose_model(args: argparse.Namespace, device: str, scratch: Path) -> Model:
    """The model asked for; if none was, Qwen3-0.6B on a GPU and the tiny checkpoint on a CPU."""
    if args.model is None and (args.size or device == "cuda"):
        size = args.size or "0.6B"
        write_config(size, scratch)
        return Model(f"Qwen3-{size}", scratch, ModelConfig.from_folder(scratch), random_weights=True)
    folder = resolve_model_folder(args.model or str(tiny_model_path()))
    return Model(args.model or "tiny-qwen3", folder, ModelConfig.from_folder(folder), random_weights=False)


# The engines


class Engine:
    """What the benchmark asks of an engine. Only `generate` must be there."""

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        """Continue each prompt by its max_tokens, whatever the tokens are; return how many each was given."""
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """The engine's running totals of prefill and decode work."""
        return {}

    def reset(self) -> None:
        """Forget cached prefixes."""

    def close(self) -> None:
        """Give the memory back."""


class Nanoinfer(Engine):
    def __init__(self, model: Model, args: argparse.Namespace, max_model_len: int) -> None:
        from nanoinfer import LLM

        self.llm = LLM(
            model.folder,
            load_format="dummy" if model.random_weights else "auto",
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            tensor_parallel_size=args.tensor_parallel_size,
            enforce_eager=args.enforce_eager,
            attention_backend=args.attention_backend,
        )
        self.reset = self.llm.reset_prefix_cache  # type: ignore[method-assign]
        self.close = self.llm.close  # type: ignore[method-assign]

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        from nanoinfer import SamplingParams

        params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count) for count in max_tokens]
        return [len(output.token_ids) for output in self.llm.generate([*prompts], params, use_tqdm=False)]

    def stats(self) -> dict[str, float]:
        return asdict(self.llm.engine.stats)
