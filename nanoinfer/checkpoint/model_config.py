"""The sizes of a model, read from its config.json, in the spellings of transformers 4.51 to 5.x."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.hub import GGUF_REMEDY, read_json
from nanoinfer.config import DTYPES
from nanoinfer.errors import ConfigError, ModelError

MAX_SIZE, MAX_LAYERS, MAX_FLOAT = 2**24, 2**12, 1e30  # what is beyond them in a config.json is a mistake
ROPE_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
# What config.json may ask for that is not built in, and the value that does not ask for it.
UNSUPPORTED_UNLESS = {
    "use_sliding_window": False,
    "quantization_config": None,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}
# What config.json may leave out. Without num_key_value_heads, each query head has a KV head of its own.
DEFAULTS = {
    "head_dim": 128,  # Qwen3's, not hidden_size / num_attention_heads
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes a rotary embedding: `theta` is the base; `parameters` are the other numbers of its type."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Holds a decoder's sizes, read from config.json in the spellings of transformers 4.51 to 5.x."""

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
    def from_folder(cls, folder: Path, supported: Collection[str] | None = None) -> "ModelConfig":
        """Read `folder`/config.json. Raises ModelError where it is missing, not JSON, or lacks a size.

        supported: the names of the architectures that can be run; any other is refused first, since its config.json
        may name its sizes differently.
        """
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder} {_what_it_is_instead(folder)}")
        return cls.from_dict(read_json(folder / "config.json"), supported)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], supported: Collection[str] | None = None) -> "ModelConfig":
        """Read the fields of a config.json; what the engine would have to ignore is refused."""
        architectures = raw.get("architectures") or ["(none)"]
        if not isinstance(architectures, list):
            raise ModelError(f"config.json has architectures={architectures!r}; it must be a list of names")
        architecture = str(architectures[0])
        if supported is not None and architecture not in supported:
            raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(supported)}")
        for name, without in UNSUPPORTED_UNLESS.items():
            value = raw.get(name, without)
            if value not in (without, None):
                raise ModelError(f"config.json has {name}={value!r}, which is not supported; use a model without it")
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
        config = cls(architecture=architecture, dtype=_read_dtype(raw), rope=_read_rope(raw), **values)
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
        """Return the longest sequence, in tokens, that the model's positions are made for."""
        factor = self.rope.parameters.get("factor", 1.0)
        original = self.rope.parameters.get("original_max_position_embeddings")
        if self.rope.rope_type == "linear":
            return int(self.max_position_embeddings * factor)
        if self.rope.rope_type == "yarn" and original:
            return int(original * factor)
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


def _what_it_is_instead(folder: Path) -> str:
    """Say why a folder without config.json is no model, and what to do."""
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"holds a LoRA adapter of {base!r}, not a model, and adapters are not supported; merge it into its base "
            "model with peft's merge_and_unload, and give the folder where that is saved"
        )
    if any(folder.glob("*.gguf")):
        return f"has only GGUF files; {GGUF_REMEDY}"
    return "has no config.json; give the folder of a Hugging Face checkpoint"


def _number(raw: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """Read a positive number; null and a missing one mean the default, where there is one."""
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, bool) or not isinstance(value, kind if kind is int else (int, float)) or not value > 0:
        wanted = "a whole number of at least 1" if kind is int else "a positive number"
        raise ModelError(f"config.json has {name}={value!r}; it must be {wanted}")
    limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE if kind is int else MAX_FLOAT
    if value > limit:
        raise ModelError(f"config.json has {name}={value!r}, beyond any model; download it again")
    return kind(value)


def _read_dtype(raw: Mapping[str, Any]) -> str:
    """Read `dtype` (transformers 5) or `torch_dtype` (before); float32 where neither is given."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"config.json has dtype={dtype!r}; supported are {', '.join(DTYPES)}")
    return dtype


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
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
