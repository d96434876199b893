"""Which weights of a model are in 4 bits and how, as AWQ, GPTQ and compressed-tensors say it in a config.json."""

from collections.abc import Mapping
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
# Fields of AutoAWQ, AutoGPTQ and GPTQModel that say how a checkpoint was made.
WITHOUT_EFFECT = {
    *("meta", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "modules_in_block"),
    *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "use_exllama", "exllama_config", "backend"),
    *("disable_exllama", "use_cuda_fp16", "max_input_length", "cache_block_outputs", "batch_size", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "do_fuse", "fuse_max_seq_len"),
    *("modules_to_fuse", "pack_dtype", "is_marlin_format", "uri", "quantizer"),
}


@dataclass(frozen=True, slots=True)
class Int4Config(QuantizationConfig):
    """Describes the weights of linear layers in 4 bits; activations keep the dtype of the model.

    checkpoint_format: whose tensors the checkpoint has; None: it has 16 bits, which are rounded when they are loaded.
    group_size: inputs of an output that share a scale; None: all. has_zeros: whether each group has a zero point.
    orders_inputs: whether a tensor says which group each input belongs to (desc_act).
    """

    checkpoint_format: Literal["awq", "gptq", "gptq_v2", "compressed-tensors"] | None = None
    group_size: int | None = None
    has_zeros: bool = False
    orders_inputs: bool = False

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

    def covers(self, module: str) -> bool:
        return ".experts." in module

    @property
    def covers_attention(self) -> bool:
        return False

    @property
    def shard_multiple(self) -> int:
        return MXFP4_GROUP


def read_awq(raw: dict[str, Any], **common: Any) -> Int4Config:
    """Read the quantization_config of AutoAWQ. common: fields that all configs have."""
    drop_kv_scales(raw)
    only("bits", raw.pop("bits", raw.pop("w_bit", None)), (4,))
    group_size = raw.pop("group_size", raw.pop("q_group_size", None))
    only("group_size", group_size, GROUP_SIZES)
    only("version", str(raw.pop("version", "gemm")).lower(), ("gemm",))
    only("zero_point", raw.pop("zero_point", True), (True,))
    for name in ("checkpoint_format", "format"):  # which GPTQModel writes, too
        only(name, raw.pop(name, None), (None, "gemm"))
    ignored = module_names("modules_to_not_convert", raw.pop("modules_to_not_convert", None) or [])
    refuse_the_rest(raw, {"quant_method", *WITHOUT_EFFECT})
    return Int4Config(checkpoint_format="awq", group_size=group_size, has_zeros=True, ignored=ignored, **common)


def read_gptq(raw: dict[str, Any], **common: Any) -> Int4Config:
    """Read the quantization_config of AutoGPTQ and GPTQModel."""
    drop_kv_scales(raw)
    only("bits", raw.pop("bits", None), (4,))
    group_size = raw.pop("group_size", 128)
    only("group_size", group_size, (*GROUP_SIZES, -1))
    version: Any = raw.pop("checkpoint_format", "gptq") or "gptq"
    only("checkpoint_format", version, ("gptq", "gptq_v2"))
    # GPTQModel writes these twice.
    only("format", raw.pop("format", None), (None, version))
    only("method", raw.pop("method", None), (None, "gptq"))
    desc_act, sym = raw.pop("desc_act", False), raw.pop("sym", True)
    only("desc_act", desc_act, (True, False))
    only("sym", sym, (True, False))
    only("lm_head", raw.pop("lm_head", False), (False,))
    if (dynamic := raw.pop("dynamic", None)) not in (None, {}):
        raise unsupported("dynamic", dynamic, (None,))
    refuse_the_rest(raw, {"quant_method", *WITHOUT_EFFECT})
    return Int4Config(
        checkpoint_format=version,
        group_size=None if group_size == -1 else group_size,
        has_zeros=not sym,
        orders_inputs=desc_act and group_size != -1,  # with one group there is nothing to order
        **common,
    )


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
