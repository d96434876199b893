"""Which weights of a model are in 8 bits and how: `quantization_config` of a config.json, or the option quantization.

Two dialects are read: "fp8" (Qwen3-FP8, DeepSeek, static scales) and "compressed-tensors" (llm-compressor). What would
change the answer and is not built in is refused by field and value.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanoinfer.errors import ModelError

logger = logging.getLogger("nanoinfer")

BLOCK_SIZE = 128  # rows and columns of a weight, and inputs of a token, that share a scale
# Fields that say how a checkpoint was made, or what it is not; they change nothing here.
WITHOUT_EFFECT = {
    *("version", "quantization_status", "global_compression_ratio", "run_compressed", "dequantize", "provider"),
    *("observer", "observer_kwargs", "sparsity_config", "transform_config"),
}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Describes the weights of linear layers in FP8 (e4m3) and the activations that they are multiplied by.

    weights: what shares a scale: an output channel; a block of 128 x 128; or a whole tensor of the checkpoint.
    static_inputs: whether activations have one scale that the checkpoint gives; else each token's is computed.
    in_checkpoint: whether the checkpoint holds the weights in 8 bits. If not, they are rounded when they are loaded.
    scale_name: what the checkpoint calls the scales of a `weight`.
    ignored: the checkpoint's modules that stay in 16 bits, by name; "re:" begins a regular expression.
    packed, renamed: our names of modules -> those of the checkpoint.
    """

    weights: Literal["channel", "block", "tensor"] = "channel"
    static_inputs: bool = False
    in_checkpoint: bool = False
    scale_name: str = "weight_scale"
    ignored: tuple[str, ...] = ()
    packed: Mapping[str, tuple[str, ...]] | None = None
    renamed: Mapping[str, str] | None = None

    @property
    def shard_multiple(self) -> int:
        """Return what a rank's share of a row-parallel layer's inputs has to be a multiple of."""
        return BLOCK_SIZE if self.weights == "block" or not self.static_inputs else 1

    def covers(self, module: str) -> bool:
        """Return whether the weight of one of our modules is in 8 bits, such as "model.layers.0.self_attn.qkv_proj".

        Raises ModelError where only some of the weights that it packs are.
        """
        names = self._checkpoint_names(module)
        ignored = [name for name in names if self._ignores(name)]
        if 0 < len(ignored) < len(names):
            raise ModelError(
                f"quantization_config leaves {', '.join(ignored)} in 16 bits and not {names[0]} .. {names[-1]}, which "
                "are computed in one product with it; use a checkpoint that treats them alike"
            )
        return not ignored and not self._ignores(module)  # a checkpoint may pack as we do

    def _ignores(self, name: str) -> bool:
        return any(_matches(name, pattern) for pattern in self.ignored)

    def _checkpoint_names(self, module: str) -> list[str]:
        """Return what a checkpoint calls the modules that one of ours packs; of experts, those of the first one."""
        path, _, last = module.rpartition(".")
        modules: tuple[str, ...] = (last,)
        if path.endswith("experts"):
            path, modules = f"{path}.0", ("gate_up_proj", "down_proj")  # one kernel computes both
        packed, renamed = self.packed or {}, self.renamed or {}
        path = ".".join(renamed.get(part, part) for part in path.split("."))
        return [f"{path}.{name}" for module in modules for name in packed.get(module, (module,))]


def read_quantization(
    raw: Any, requested: str | None, packed: Mapping[str, tuple[str, str]], renamed: Mapping[str, str]
) -> QuantizationConfig | None:
    """Read a config.json's quantization_config, or what the user asks for where it has none. Raises ModelError.

    packed, renamed: names of the checkpoint's modules -> ours, as a model class has them.
    """
    if not raw and requested is None:
        return None
    # Of two names for a shard the architecture's own comes last.
    by_shard = {place: name for name, place in packed.items()}
    ours: dict[str, tuple[str, ...]] = {}
    for (module, _), name in by_shard.items():
        ours[module] = (*ours.get(module, ()), name)
    names: dict[str, Any] = {"packed": ours, "renamed": {new: old for old, new in renamed.items()}}
    if not raw:
        return QuantizationConfig(**names)
    if not isinstance(raw, Mapping):
        raise ModelError(f"config.json has quantization_config={raw!r:.99}; it must be a JSON object")
    method = raw.get("quant_method")
    readers = {"fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors}
    if method not in readers:
        raise ModelError(
            f"config.json has quantization_config with quant_method={method!r}, which is not supported; supported are "
            f"{', '.join(readers)}; use such a checkpoint, or the original one in 16 bits with quantization='fp8'"
        )
    fields = dict(raw)
    if fields.pop("kv_cache_scheme", None):
        logger.info(
            "the checkpoint has scales for a KV cache in 8 bits, and none are needed: kv_cache_dtype='int8' or 'fp8' "
            "finds one for each key and value; without it the cache has 16 bits"
        )
    return QuantizationConfig(in_checkpoint=True, **readers[method](fields), **names)


def _read_fp8(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the dialect of Qwen3-FP8, DeepSeek and of per-tensor checkpoints."""
    block = raw.pop("weight_block_size", None)
    scheme = raw.pop("activation_scheme", "dynamic")
    ignored = [*(raw.pop("modules_to_not_convert", None) or ()), *(raw.pop("ignored_layers", None) or ())]
    _only("weight_block_size", block, (None, [BLOCK_SIZE, BLOCK_SIZE]))
    _only("activation_scheme", scheme, ("dynamic", "static"))
    _only("fmt", raw.pop("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    _refuse_the_rest(raw, {"quant_method"})
    if block and scheme == "static":
        raise _unsupported("activation_scheme", scheme, ("dynamic",), " with weight_block_size")
    return {
        "weights": "block" if block else "tensor",
        "static_inputs": scheme == "static",
        "scale_name": "weight_scale_inv" if block else "weight_scale",
        "ignored": _names("modules_to_not_convert", ignored),
    }


def _read_compressed_tensors(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the dialect of llm-compressor: float-quantized weights, one scheme for all linear layers."""
    _only("format", raw.pop("format", None), ("float-quantized",))
    groups, ignored = raw.pop("config_groups", None), raw.pop("ignore", None) or []
    _refuse_the_rest(raw, {"quant_method"})
    schemes = [*groups.values()] if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(group := schemes[0], Mapping):
        raise ModelError(
            f"config.json has quantization_config with config_groups={groups!r:.200}; one group for all linear layers "
            "is supported; use a checkpoint with one"
        )
    _only("targets", group.get("targets"), (["Linear"],))
    _only("format", group.get("format"), (None, "float-quantized"))
    _only("output_activations", group.get("output_activations"), (None,))
    weights, inputs = (_scheme(name, group.get(name)) for name in ("weights", "input_activations"))
    strategy, static = weights.get("strategy"), not inputs.get("dynamic")
    _only("weights.strategy", strategy, ("channel", "block", "tensor"))
    _only("weights.dynamic", weights.get("dynamic", False), (False,))
    if strategy == "block":
        block = weights.get("block_structure")
        _only("weights.block_structure", block, ([BLOCK_SIZE, BLOCK_SIZE], f"{BLOCK_SIZE}x{BLOCK_SIZE}"))
        _only("input_activations.dynamic", inputs.get("dynamic"), (True,))
        _only("input_activations.strategy", inputs.get("strategy"), ("group", "token"))
        _only("input_activations.group_size", inputs.get("group_size"), (None, BLOCK_SIZE))
    else:
        _only("input_activations.strategy", inputs.get("strategy"), ("tensor",) if static else ("token",))
    return {"weights": strategy, "static_inputs": static, "ignored": _names("ignore", ignored)}


def _scheme(name: str, part: Any) -> Mapping[str, Any]:
    """Return what a group says of its weights or inputs, which have to be in FP8."""
    if not isinstance(part, Mapping):
        raise _unsupported(name, part, ("a scheme of 8 bits",))
    _only(f"{name}.num_bits", part.get("num_bits"), (8,))
    _only(f"{name}.type", part.get("type"), ("float",))
    _only(f"{name}.symmetric", part.get("symmetric", True), (True,))
    _only(f"{name}.actorder", part.get("actorder"), (None, False))
    return part


def _only(name: str, value: Any, supported: tuple[Any, ...]) -> None:
    # True equals 1, and a tuple does not equal a list.
    if not any(value == item and type(value) is type(item) for item in supported):
        raise _unsupported(name, value, supported)


def _unsupported(name: str, value: Any, supported: tuple[Any, ...], where: str = "") -> ModelError:
    return ModelError(
        f"config.json has quantization_config with {name}={value!r:.200}{where}, which is not supported; supported: "
        f"{', '.join(map(repr, supported))}; use such a checkpoint, or the original one with quantization='fp8'"
    )


def _refuse_the_rest(raw: Mapping[str, Any], known: set[str]) -> None:
    for name, value in raw.items():
        if name not in known | WITHOUT_EFFECT and value not in (None, False, {}, []):
            raise _unsupported(name, value, (None,))


def _names(field: str, names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json has quantization_config with {field}={names!r:.200}; it must be a list of names")
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ModelError(
                f"config.json has quantization_config with {field}={name!r}: {error}; use a valid expression"
            ) from None
    return tuple(names)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern means a module: by its name, that of something it lies in, or the end of its name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
