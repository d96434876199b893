"""The options of an engine: validated once, never changed.

Nothing that a run finds out (how many blocks fit, how long a sequence may be) is written back here.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

from nanoinfer.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
CHOICES = {
    "dtype": ("auto", *DTYPES),
    "attention_backend": ("auto", "flash_attn", "triton", "torch"),
    "load_format": ("auto", "safetensors", "dummy"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of `LLM`, validated.

    model: a local folder, or the id of a model on the Hugging Face hub.
    dtype: of weights, activations and KV cache; "auto" is the checkpoint's on CUDA, float32 on a CPU.
    device: "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N".
    tensor_parallel_size: over how many GPUs the model is split, those from `device` on; on a CPU, how many processes.
    max_model_len: the most tokens of a sequence, prompt and completion; None is the model's own limit, lowered to
        what the KV cache can hold.
    max_num_seqs: the most sequences in the running set.
    max_num_batched_tokens: the most prompt tokens of one step; longer prompts are computed in chunks.
    gpu_memory_utilization: the share of the GPU's memory that the engine may use, in (0, 1].
    kvcache_block_size: tokens in a block of the KV cache; a multiple of 16 (flash_attn: of 256).
    num_kvcache_blocks: how many blocks; None is what fits.
    enable_prefix_caching: reuse the KV blocks of prefixes seen before.
    enforce_eager: no CUDA graphs.
    attention_backend: "triton" (our kernels for decode; prefill by flash-attn where that is installed, else by
        PyTorch), "flash_attn" (both by flash-attn), "torch" (plain), or "auto": the first of these that can serve.
    overlap: launch each step before the last one's tokens are collected, so that the GPU does not wait for the host.
    load_format: "auto" and "safetensors" read the checkpoint, "dummy" draws random weights from config.json alone.
    seed: what the random streams of all requests derive from.

    Raises ConfigError (a ValueError) for a value out of range.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    kvcache_block_size: int = 256
    num_kvcache_blocks: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    attention_backend: str = "auto"
    overlap: bool = True
    load_format: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        # A Path, a torch.device or a torch.dtype says what it means as a string.
        object.__setattr__(self, "model", str(self.model))
        object.__setattr__(self, "device", str(self.device))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in CHOICES and value not in CHOICES[name]:
                raise ConfigError(f"{name}={value!r} is not known; use one of {', '.join(CHOICES[name])}")
            if field.type is bool and not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} is not a bool; use True or False")
            is_count = int in (field.type, *get_args(field.type)) and name != "seed"
            if is_count and (value is not None or field.default is not None):
                if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 2**31:
                    raise ConfigError(f"{name}={value!r} must be a whole number of at least 1, and below 2**31")
                object.__setattr__(self, name, int(value))  # NumPy's integers, say
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral) or not -(2**63) <= int(self.seed) < 2**63:
            raise ConfigError(f"seed={self.seed!r} is not an int of 64 bits; use a whole number such as 0")
        object.__setattr__(self, "seed", int(self.seed))
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization={share!r} must lie in (0, 1]; 0.9 suits a card of one's own")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len=1 has no room for a prompt and a completion; use at least 2")
        if self.kvcache_block_size % 16 != 0:
            nearest = max(16, round(self.kvcache_block_size / 16) * 16)
            raise ConfigError(f"kvcache_block_size={self.kvcache_block_size} is no multiple of 16; use {nearest}")

    @classmethod
    def from_options(cls, model: str | Path, options: Mapping[str, Any]) -> "EngineConfig":
        """Build the config of `LLM(model, **options)`; an unknown option is a TypeError that names a similar one."""
        known = [f.name for f in fields(cls) if f.name != "model"]
        for name in options:
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
                hint = f"did you mean {similar[0]!r}? " if similar else ""
                raise TypeError(f"LLM has no option {name!r}; {hint}Options: {', '.join(known)}")
        return cls(model=str(model), **options)
