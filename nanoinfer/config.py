"""What the user chose (EngineConfig) and what the model is (ModelConfig): read once, validated, never changed.

Nothing that a run finds out (how many blocks fit, how long a sequence may be) is written back here.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.checkpoint.hub import read_json

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
# What config.json may leave out; and, unless it says otherwise, each query head has a KV head of its own.
DEFAULTS = {
    "head_dim": 128,  # Qwen3's, not hidden_size / num_attention_heads
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
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


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a model. `theta` is the base; `parameters` are the other numbers of its type."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]


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
            value = raw.get(name, supported)
            if value not in (supported, None):
                raise ModelError(f"config.json has {name}={value!r}, which is not supported; use a model without it")
        architectures = raw.get("architectures") or ["(none)"]  # which the registry refuses
        if not isinstance(architectures, list):
            raise ModelError(f"config.json has architectures={architectures!r}; it must be a list of names")
        defaults = {"num_key_value_heads": raw.get("num_attention_heads"), **DEFAULTS}
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.type in (int, float):
                values[field.name] = _number(raw, field.name, field.type, defaults.get(field.name))
            elif field.type is bool:
                flag = raw.get(field.name)
                if not isinstance(flag, (bool, type(None))):
                    raise ModelError(f"config.json has {field.name}={flag!r}; it must be true or false")
                values[field.name] = bool(flag)
        config = cls(architecture=str(architectures[0]), dtype=_read_dtype(raw), rope=_read_rope(raw), **values)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        if num_heads % num_kv_heads != 0:
            raise ModelError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
        if config.head_dim % 2 != 0:
            raise ModelError(f"head_dim={config.head_dim} is odd; rotary embedding turns pairs of dimensions")
        length = config.max_model_len
        if not 0 < length <= MAX_SIZE:
            raise ModelError(f"config.json stretches the context to {length} tokens; check its RoPE factor")
        return config

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that the model's positions are made for."""
        stretched: dict[str, Any] = {"linear": self.max_position_embeddings}
        stretched["yarn"] = self.rope.parameters.get("original_max_position_embeddings")
        original = stretched.get(self.rope.rope_type)
        return int(original * self.rope.parameters.get("factor", 1.0)) if original else self.max_position_embeddings

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


def _number(raw: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """A positive number; null and a missing one mean the default, where there is one."""
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, bool) or not isinstance(value, kind if kind is int else (int, float)) or not value > 0:
        wanted = "a whole number of at least 1" if kind is int else "a positive number"
        raise ModelError(f"config.json has {name}={value!r}; it must be {wanted}")
    limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE if kind is int else MAX_FLOAT
    if value > limit:
        raise ModelError(f"config.json has {name}={value!r}, beyond any model; download it again")
    return kind(value)


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
        raise ModelError(f"config.json has RoPE parameters {parameters!r} and no rope_type; say of which type")
    return RopeConfig(str(rope_type), _number(theta, "rope_theta", float, 10000.0), parameters)
