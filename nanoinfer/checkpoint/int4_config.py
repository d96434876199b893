"""Which weights of a model are in 4 bits and how, as AWQ, GPTQ, AutoRound and compressed-tensors say it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanoinfer.checkpoint.quantization_fields import (
    QuantizationConfig,
    drop_kv_scales,
    module_names,
    only,
    refuse_the_rest,
    unsupported,
)

GROUP_SIZES = (32, 64, 128)
MXFP4_GROUP = 32  # inputs that share a scale
# Fields of AutoAWQ, AutoGPTQ, GPTQModel, AutoRound and transformers that say how a checkpoint was made.
WITHOUT_EFFECT = {
    *("meta", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "modules_in_block"),
    *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "use_exllama", "exllama_config", "backend"),
    *("disable_exllama", "use_cuda_fp16", "max_input_length", "cache_block_outputs", "batch_size", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "do_fuse", "fuse_max_seq_len"),
    *("modules_to_fuse", "uri", "quantizer", "act_group_aware", "autoround_version", "enable_quanted_input", "lr"),
    *("to_quant_block_names", "quant_block_list", "enable_minmax_tuning", "enable_norm_bias_tuning", "minmax_lr"),
    *("seqlen", "nsamples", "iters", "amp", "gradient_accumulate_steps", "low_gpu_mem_usage", "scale_dtype"),
    *("static_kv_granularity", "static_attention_granularity", "supported_types"),
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym"),  # of activations in 16 bits; see `_read_common`
}
# What AutoRound calls kernels. Without "gptq" or "awq", its tensors are those of GPTQ's second version.
AUTO_ROUND_KERNELS = {"auto_round", "autoround", "exllamav2", "triton", "tritonv2", "gptqmodel"}


@dataclass(frozen=True, slots=True)
class Int4Config(QuantizationConfig):
    """Describes the weights of linear layers in 4 bits; activations keep the dtype of the model.

    checkpoint_format: whose tensors the checkpoint has; None: it has 16 bits, which are rounded when they are loaded.
    group_size: inputs of an output that share a scale; None: all. has_zeros: whether each group has a zero point.
    orders_inputs: whether a tensor says which group each input belongs to (desc_act). only_modules: how the names of
    all modules in 4 bits end; empty: any.
    """

    weight_bits = 4.25
    checkpoint_format: Literal["awq", "gptq", "gptq_v2", "compressed-tensors"] | None = None
    group_size: int | None = None
    has_zeros: bool = False
    orders_inputs: bool = False
    only_modules: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        names = (name for spellings in self._checkpoint_names(module) for name in spellings)
        is_listed = not self.only_modules or any(name.endswith(self.only_modules) for name in names)
        return is_listed and QuantizationConfig.covers(self, module)

    @property
    def shard_multiple(self) -> int:
        return self.group_size or 8

    @property
    def mlp_multiple(self) -> int:
        return max(self.shard_multiple, *GROUP_SIZES)  # what kernels take at once

    @property
    def unsplittable_reason(self) -> str | None:
        if self.orders_inputs:
            return "the groups of inputs are spread over all of them (desc_act)"
        return None


@dataclass(frozen=True, slots=True)
class Mxfp4Config(QuantizationConfig):
    """Describes experts in MXFP4, as gpt-oss has them; all else has 16 bits."""

    weight_bits = 4.25

    def covers(self, module: str) -> bool:
        return ".experts." in module

    @property
    def shard_multiple(self) -> int:
        return MXFP4_GROUP


def read_awq(raw: dict[str, Any], **common: Any) -> Int4Config:
    """Read the quantization_config of AutoAWQ and GPTQModel. common: fields that all configs have."""
    _read_common(raw, "awq")
    only("bits", raw.pop("bits", raw.pop("w_bit", None)), (4,))
    group_size = raw.pop("group_size", raw.pop("q_group_size", None))
    only("group_size", group_size, GROUP_SIZES)
    only("version", str(raw.pop("version", "gemm")).lower(), ("gemm",))
    if raw.get("backend") == "llm-awq":  # which packs otherwise
        raise unsupported("backend", "llm-awq", ("autoawq",))
    raw.pop("sym", None)  # transformers writes its default, whatever the tensors are
    has_zeros = raw.pop("zero_point", True)
    only("zero_point", has_zeros, (True, False))
    for name in ("checkpoint_format", "format"):  # which GPTQModel writes, too
        only(name, raw.pop(name, None), (None, "gemm"))
    ignored = module_names("modules_to_not_convert", raw.pop("modules_to_not_convert", None) or [])
    refuse_the_rest(raw, {"quant_method", *WITHOUT_EFFECT})
    return Int4Config(checkpoint_format="awq", group_size=group_size, has_zeros=has_zeros, ignored=ignored, **common)


def read_gptq(raw: dict[str, Any], **common: Any) -> Int4Config:
    """Read the quantization_config of AutoGPTQ and GPTQModel."""
    _read_common(raw, "gptq")
    only("bits", raw.pop("bits", None), (4,))
    group_size = raw.pop("group_size", 128)
    only("group_size", group_size, (*GROUP_SIZES, -1))
    version: Any = raw.pop("checkpoint_format", None) or raw.get("format") or "gptq"
    only("checkpoint_format", version, ("gptq", "gptq_v2"))
    only("format", raw.pop("format", None), (None, version))  # GPTQModel writes it twice
    desc_act, sym = raw.pop("desc_act", False), raw.pop("sym", True)
    only("desc_act", desc_act, (True, False))
    only("sym", sym, (True, False))
    of_all = {"bits": 4, "group_size": group_size, "desc_act": desc_act, "sym": sym}
    ignored = module_names("modules_to_not_convert", raw.pop("modules_to_not_convert", None) or [])
    ignored += module_names("dynamic", [*_dynamic(raw.pop("dynamic", None), of_all)])
    listed = raw.pop("modules_in_block_to_quantize", None) or []
    if isinstance(listed, list):  # of names, or of lists of them
        listed = [name for part in listed for name in (part if isinstance(part, list) else [part])]
    refuse_the_rest(raw, {"quant_method", *WITHOUT_EFFECT})
    return Int4Config(
        checkpoint_format=version,
        group_size=None if group_size == -1 else group_size,
        has_zeros=not sym,
        orders_inputs=desc_act and group_size != -1,  # with one group there is nothing to order
        only_modules=tuple(f".{name}" for name in module_names("modules_in_block_to_quantize", listed)),
        ignored=ignored,
        **common,
    )


def read_auto_round(raw: dict[str, Any], **common: Any) -> Int4Config:
    """Read the quantization_config of AutoRound, whose tensors are those of AWQ or GPTQ."""
    backend = raw.pop("backend", None)  # the older name
    packing = raw.pop("packing_format", backend) or "auto_round"
    kernels = set(str(packing).split(":"))
    sym = raw.setdefault("sym", True)
    only("sym", sym, (True, False))
    of_all = {name: raw.get(name) for name in ("bits", "group_size", "sym", "data_type")}
    ignored = module_names("modules_to_not_convert", raw.pop("modules_to_not_convert", None) or [])
    for name, scheme in _rules("extra_config", raw.pop("extra_config", None)):
        if _is_ignored(f"extra_config[{name!r}]", scheme, of_all):
            # A name that is no module's is an expression.
            pattern = name if re.fullmatch(r"[\w.]+", name) else f"re:.*(?:{name})"
            ignored += module_names("extra_config", [pattern])
    raw["modules_to_not_convert"] = [*ignored]
    if kernels & {"awq", "auto_awq"}:
        return read_awq({"zero_point": not sym, **raw, "quant_method": "awq"}, **common)
    is_first_version = bool(kernels & {"gptq", "auto_gptq"})
    if not is_first_version and not kernels <= AUTO_ROUND_KERNELS:
        raise unsupported("packing_format", packing, ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round"))
    version = "gptq" if is_first_version else "gptq_v2"
    return read_gptq({**raw, "quant_method": "gptq", "checkpoint_format": version}, **common)


def _read_common(raw: dict[str, Any], method: str) -> None:
    """Take fields that AWQ and GPTQ share out of a config, and refuse the values that would change answers."""
    raw.setdefault("kv_cache_scheme", raw.pop("static_kv_dtype", None))  # AutoRound's name
    drop_kv_scales(raw)
    only("method", raw.pop("method", None), (None, method))  # GPTQModel's own name for quant_method
    only("pack_dtype", raw.pop("pack_dtype", None), (None, "int32"))
    only("lm_head", raw.pop("lm_head", False), (False,))
    only("data_type", raw.pop("data_type", None), (None, "int"))
    only("act_bits", raw.pop("act_bits", None), (None, 16, 32))


def _rules(field: str, rules: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name or expression of modules, fields of their weights) pairs."""
    if not isinstance(rules or {}, Mapping) or not all(isinstance(part, Mapping) for part in (rules or {}).values()):
        raise unsupported(field, rules, ({},))
    return [*(rules or {}).items()]


def _dynamic(rules: Any, of_all: Mapping[str, Any]) -> Iterator[str]:
    """Yield expressions for the modules that GPTQModel's rules leave in 16 bits. The first rule that matches counts.

    rules: "-:" begins the expression of modules in 16 bits. of_all: the fields of modules without a rule.
    """
    before = ""
    for rule, scheme in _rules("dynamic", rules):
        expression = rule.removeprefix("-:").removeprefix("+:")
        if rule.startswith("-:") or _is_ignored(f"dynamic[{rule!r}]", scheme, of_all):
            yield f"re:{before}(?:{expression})"
        elif expression != "lm_head":  # which is in no layer
            before += f"(?!{expression})"


def _is_ignored(field: str, scheme: Mapping[str, Any], of_all: Mapping[str, Any]) -> bool:
    """Return whether a rule leaves modules in 16 bits. Raises ModelError where it gives them another form of 4."""
    bits = scheme.get("bits")
    if isinstance(bits, int) and bits >= 16:
        return True
    of_all = {**of_all, "act_bits": 16}
    if any(scheme[name] not in (None, of_all.get(name)) for name in scheme.keys() - WITHOUT_EFFECT):
        raise unsupported(field, dict(scheme), ({"bits": 16}, {}))
    return False


def read_mxfp4(raw: dict[str, Any], **common: Any) -> Mxfp4Config:
    """Read the quantization_config of gpt-oss."""
    refuse_the_rest(raw, {"quant_method", "modules_to_not_convert"})
    return Mxfp4Config(**common)


def read_pack_quantized(weights: Mapping[str, Any], **common: Any) -> Int4Config:
    """Read the weights of a scheme of llm-compressor with packed integers."""
    only("weights.num_bits", weights.get("num_bits"), (4,))
    only("weights.type", weights.get("type"), ("int",))
    only("weights.dynamic", weights.get("dynamic", False), (False,))
    only("weights.strategy", weights.get("strategy"), ("group", "channel"))
    is_grouped = weights.get("strategy") == "group"
    if is_grouped:
        only("weights.group_size", weights.get("group_size"), GROUP_SIZES)
    only("weights.symmetric", weights.get("symmetric", True), (True, False))
    # "static" and "weight" are two names of one order, which leaves the groups alone; so are "dynamic" and "group".
    only("weights.actorder", weights.get("actorder"), (None, False, "group", "weight", "static", "dynamic"))
    return Int4Config(
        checkpoint_format="compressed-tensors",
        group_size=weights["group_size"] if is_grouped else None,
        has_zeros=not weights.get("symmetric", True),
        orders_inputs=is_grouped and weights.get("actorder") in ("group", "dynamic"),
        **common,
    )
