"""What the user chose (EngineConfig) and what the model is (ModelConfig): read once, validated, never changed.

Nothing that a run finds out (how many blocks fit, how long a sequence may be) is written back here.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.utils.hub import read_json

T = TypeVar("T", int, float)

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIZE, MAX_LAYERS, MAX_FLOAT = 2**24, 2**12, 1e30  # what is beyond them in a config.json is a mistake
ROPE_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
# What config.json may ask for that is not built in, and the value that does not ask for it.
UNSUPPORTED_UNLESS = {
    "use_sliding_window": False,
    "quantization_config": None,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}
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
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not known; use one of {', '.join(choices)}")
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "kvcache_block_size"):
            self._check_positive_int(name)
        for name in ("max_model_len", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                self._check_positive_int(name)
        for name in ("enable_prefix_caching", "enforce_eager", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a bool; use True or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r} is not an int of 64 bits; use a whole number such as 0")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, (int, float)) or not 0 < utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={utilization!r} must lie in (0, 1]; 0.9 suits a card of one's own"
            )
        if self.kvcache_block_size % 16 != 0:
            nearest = max(16, round(self.kvcache_block_size / 16) * 16)
            raise ConfigError(f"kvcache_block_size={self.kvcache_block_size} is no multiple of 16; use {nearest}")

    def _check_positive_int(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 2**31:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1, and below 2**31")
        object.__setattr__(self, name, int(value))  # NumPy's integers, say

    @classmethod
    def from_options(cls, model: str | Path, options: Mapping[str, Any]) -> "EngineConfig":
        """Build the config of `LLM(model, **options)`; an unknown option is a TypeError that names the nearest."""
        known = [f.name for f in fields(cls) if f.name != "model"]
        for name in options:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"LLM has no option {name!r}; did you mean {nearest!r}? Options: {', '.join(known)}")
        return cls(model=str(model), **options)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model. `theta` is the base; `parameters` are the other numbers of its type."""

    rope_type: str = "default"
    theta: float = 10000.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes, read from config.json in the spellings of transformers 4.51 to 5.x."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    rope: RopeConfig

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read `folder`/config.json. Raises ModelError where it is missing, not JSON, or lacks a size."""
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
        return cls.from_dict(read_json(folder / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read the fields of a config.json; what the engine would have to ignore is refused."""
        for name, supported in UNSUPPORTED_UNLESS.items():
            if raw.get(name, supported) not in (supported, None):
                raise ModelError(
                    f"config.json has {name}={raw[name]!r}, which is not supported; use a model without it"
                )
        num_heads = _number(raw, "num_attention_heads")
        num_kv_heads = _number(raw, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads != 0:
            raise ModelError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
        head_dim = _number(raw, "head_dim", default=128)  # Qwen3's default, not hidden_size / num_attention_heads
        if head_dim % 2 != 0:
            raise ModelError(f"head_dim={head_dim} is odd; rotary embedding turns pairs of dimensions")
        architectures = raw.get("architectures") or ["(none)"]  # which the registry refuses
        if not isinstance(architectures, list):
            raise ModelError(f"config.json has architectures={architectures!r}; it must be a list of names")
        config = cls(
            architecture=str(architectures[0]),
            vocab_size=_number(raw, "vocab_size"),
            hidden_size=_number(raw, "hidden_size"),
            intermediate_size=_number(raw, "intermediate_size"),
            num_hidden_layers=_number(raw, "num_hidden_layers", limit=MAX_LAYERS),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_number(raw, "max_position_embeddings", default=32768),
            rms_norm_eps=_number(raw, "rms_norm_eps", float, default=1e-6),
            initializer_range=_number(raw, "initializer_range", float, default=0.02),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            attention_bias=_flag(raw, "attention_bias"),
            dtype=_read_dtype(raw),
            rope=_read_rope(raw),
        )
        if not 0 < config.max_model_len <= MAX_SIZE:
            raise ModelError(
                f"config.json stretches the context to {config.max_model_len} tokens; check its RoPE factor"
            )
        return config

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the model's positions are made for."""
        factor = self.rope.parameters.get("factor", 1.0)
        if self.rope.rope_type == "linear":
            return int(self.max_position_embeddings * factor)
        if self.rope.rope_type == "yarn":
            original = self.rope.parameters.get("original_max_position_embeddings")
            return int(original * factor) if original else self.max_position_embeddings
        return self.max_position_embeddings

    def check_tensor_parallel_size(self, size: int) -> None:
        """Raise ConfigError where heads or MLP cannot be split over `size` ranks, with the sizes that would do."""
        heads, kv_heads, mlp = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size

        def fits(n: int) -> bool:  # ranks may share a KV head
            return heads % n == 0 and mlp % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

        if not fits(size):
            sizes = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
            raise ConfigError(
                f"tensor_parallel_size={size} cannot split num_attention_heads={heads}, num_key_value_heads="
                f"{kv_heads} and intermediate_size={mlp} of this model; use one of {sizes}"
            )


def _number(
    raw: Mapping[str, Any], name: str, kind: type[T] = int, default: T | None = None, limit: int = MAX_SIZE
) -> T:
    """A positive number; null and a missing one mean the default, where there is one."""
    value = default if raw.get(name) is None else raw[name]
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        wanted = "a whole number of at least 1" if kind is int else "a positive number"
        raise ModelError(f"config.json has {name}={value!r}; it must be {wanted}")
    if value > (limit if kind is int else MAX_FLOAT):
        raise ModelError(f"config.json has {name}={value!r}, beyond any model; download it again")
    return kind(value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json has {name}={value!r}; it must be true or false")
    return bool(value)


def _read_dtype(raw: Mapping[str, Any]) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (before); float32 where neither is given."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"config.json has dtype={dtype!r}; supported are {', '.join(DTYPES)}")
    return dtype


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = raw.get(name) or {}
        if not isinstance(part, Mapping) or any(isinstance(value, Mapping) for value in part.values()):
            raise ModelError(f"config.json has {name}={part!r}; one set of numbers for all layers is supported")
        parameters |= {key: value for key, value in part.items() if value is not None}
    old_spelling = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", old_spelling) or "default"
    theta = {"rope_theta": parameters.pop("rope_theta", None) or raw.get("rope_theta")}
    for name in parameters.keys() & {*ROPE_FLOATS, "mscale", "mscale_all_dim", "original_max_position_embeddings"}:
        if parameters[name] != 0 or not name.startswith("mscale"):  # where 0 means none
            parameters[name] = _number(parameters, name, int if name.startswith("original") else float)
    if rope_type == "default" and "factor" in parameters:
        raise ModelError(
            f"config.json has RoPE parameters {parameters!r} and no rope_type; say which type they belong to"
        )
    return RopeConfig(
        rope_type=str(rope_type), theta=_number(theta, "rope_theta", float, 10000.0), parameters=parameters
    )
