"""Reads weights in 4 bits from checkpoints: what a config.json says of them, and each format's tensors, unpacked.

- AWQ packs eight outputs in an int32, in an order of its own: (num_inputs, num_outputs / 8).
- GPTQ packs eight inputs in a row: (num_inputs / 8, num_outputs). Zero points of its first version are one less than
  they should be. With desc_act, `g_idx` says which group each input belongs to.
- compressed-tensors ("pack-quantized") packs eight inputs in a row, too: (num_outputs, num_inputs / 8). Its numbers are
  signed, from -8 to 7, with 8 added.
- MXFP4 packs two values of e2m1 in a byte, the first in the low bits: (..., num_groups, 16) for groups of 32 inputs,
  with a power of two as their scale, whose exponent has 127 added (e8m0; 255 is NaN).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.quantization_config import (
    QuantizationConfig,
    checked_names,
    module_names,
    refuse_the_rest,
    require,
    unsupported,
)
from nanoinfer.errors import ModelError
from nanoinfer.ops.int4.spec import PACKED, ZERO, unpack

Format = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
Reader = Callable[[Tensor], Tensor]

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of the eight numbers of a word each output is
GROUP_SIZES = (32, 64, 128)
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
    *("act_data_type", "act_dynamic", "act_group_size", "act_sym"),  # of activations in 16 bits; see `_check_common`
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
    checkpoint_format: Format | None = None
    group_size: int | None = None
    has_zeros: bool = False
    orders_inputs: bool = False
    only_modules: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        names = (name for spellings in self._checkpoint_names(module) for name in spellings)
        is_listed = not self.only_modules or any(name.endswith(self.only_modules) for name in names)
        return is_listed and QuantizationConfig.covers(self, module)

    @property
    def has_bfloat16_kernels(self) -> bool:
        return not self.orders_inputs

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


def read_awq(fields: Fields) -> Int4Config:
    """Read the quantization_config of AutoAWQ and GPTQModel."""
    _check_common(fields, "awq")
    require(fields, _spelt(fields, "bits", "w_bit"), (4,))
    group_size = require(fields, _spelt(fields, "group_size", "q_group_size"), GROUP_SIZES)
    if (version := str(fields.get("version", "gemm")).lower()) != "gemm":
        raise unsupported("version", version, ("gemm",))
    if fields.values.get("backend") == "llm-awq":  # which packs otherwise
        raise unsupported("backend", "llm-awq", ("autoawq",))
    has_zeros = require(fields, "zero_point", (True, False), True)
    for name in ("checkpoint_format", "format"):  # which GPTQModel writes, too
        require(fields, name, (None, "gemm"))
    ignored = module_names(fields, "modules_to_not_convert")
    # transformers writes its default of sym, whatever the tensors are.
    refuse_the_rest(fields, {"sym", *WITHOUT_EFFECT})
    return Int4Config(checkpoint_format="awq", group_size=group_size, has_zeros=has_zeros, ignored=ignored)


def read_gptq(fields: Fields) -> Int4Config:
    """Read the quantization_config of AutoGPTQ and GPTQModel."""
    _check_common(fields, "gptq")
    require(fields, "bits", (4,))
    group_size = require(fields, "group_size", (*GROUP_SIZES, -1), 128)
    version: Any = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise unsupported("checkpoint_format", version, ("gptq", "gptq_v2"))
    require(fields, "format", (None, version))  # GPTQModel writes it twice
    desc_act, sym = require(fields, "desc_act", (True, False), False), require(fields, "sym", (True, False), True)
    of_all = {"bits": 4, "group_size": group_size, "desc_act": desc_act, "sym": sym}
    ignored = module_names(fields, "modules_to_not_convert")
    ignored += checked_names("dynamic", [*_dynamic(fields, of_all)])
    listed = fields.get("modules_in_block_to_quantize") or []
    if isinstance(listed, list):  # of names, or of lists of them
        listed = [name for part in listed for name in (part if isinstance(part, list) else [part])]
    refuse_the_rest(fields, WITHOUT_EFFECT)
    return Int4Config(
        checkpoint_format=version,
        group_size=None if group_size == -1 else group_size,
        has_zeros=not sym,
        orders_inputs=desc_act and group_size != -1,  # with one group there is nothing to order
        only_modules=tuple(f".{name}" for name in checked_names("modules_in_block_to_quantize", listed)),
        ignored=ignored,
    )


def read_auto_round(fields: Fields) -> Int4Config:
    """Read the quantization_config of AutoRound, whose tensors are those of AWQ or GPTQ."""
    packing = fields.get(_spelt(fields, "packing_format", "backend")) or "auto_round"  # backend is the older name
    kernels = set(str(packing).split(":"))
    sym = require(fields, "sym", (True, False), True)
    of_all = {"sym": sym, **{name: fields.get(name) for name in ("bits", "group_size", "data_type")}}
    ignored = module_names(fields, "modules_to_not_convert")
    for name, scheme in _rules(fields, "extra_config"):
        if _is_ignored(f"extra_config[{name!r}]", scheme, of_all):
            # A name that is no module's is an expression.
            pattern = name if re.fullmatch(r"[\w.]+", name) else f"re:.*(?:{name})"
            ignored += checked_names("extra_config", [pattern])
    values = {**fields.values, "sym": sym, "modules_to_not_convert": [*ignored]}
    if kernels & {"awq", "auto_awq"}:
        return read_awq(replace(fields, values={"zero_point": not sym, **values}))
    is_first_version = bool(kernels & {"gptq", "auto_gptq"})
    if not is_first_version and not kernels <= AUTO_ROUND_KERNELS:
        raise unsupported("packing_format", packing, ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round"))
    values["checkpoint_format"] = "gptq" if is_first_version else "gptq_v2"
    return read_gptq(replace(fields, values=values))


def read_pack_quantized(weights: Fields) -> Int4Config:
    """Read the weights of a scheme of llm-compressor with packed integers."""
    require(weights, "num_bits", (4,))
    require(weights, "type", ("int",))
    require(weights, "dynamic", (False,), False)
    is_grouped = require(weights, "strategy", ("group", "channel")) == "group"
    # "static" and "weight" are two names of one order, which leaves the groups alone; so are "dynamic" and "group".
    order = require(weights, "actorder", (None, False, "group", "weight", "static", "dynamic"))
    return Int4Config(
        checkpoint_format="compressed-tensors",
        group_size=require(weights, "group_size", GROUP_SIZES) if is_grouped else None,
        has_zeros=not require(weights, "symmetric", (True, False), True),
        orders_inputs=is_grouped and order in ("group", "dynamic"),
    )


def _check_common(fields: Fields, method: str) -> None:
    """Refuse values that would change answers, in fields that AWQ and GPTQ share."""
    require(fields, "method", (None, method))  # GPTQModel's own name for quant_method
    require(fields, "pack_dtype", (None, "int32"))
    require(fields, "lm_head", (False,), False)
    require(fields, "data_type", (None, "int"))
    require(fields, "act_bits", (None, 16, 32))


def _spelt(fields: Fields, name: str, other: str) -> str:
    """Return which of two names of a field a config has."""
    return other if name not in fields.values and other in fields.values else name


def _rules(fields: Fields, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name or expression of modules, fields of their weights) pairs."""
    rules = fields.get(name) or {}
    if not isinstance(rules, Mapping) or not all(isinstance(part, Mapping) for part in rules.values()):
        raise unsupported(name, rules, ({},))
    return [*rules.items()]


def _dynamic(fields: Fields, of_all: Mapping[str, Any]) -> Iterator[str]:
    """Yield expressions for the modules that GPTQModel's rules leave in 16 bits. The first rule that matches counts.

    "-:" begins the expression of modules in 16 bits. of_all: the fields of modules without a rule.
    """
    before = ""
    for rule, scheme in _rules(fields, "dynamic"):
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


def readers(checkpoint_format: Format) -> Mapping[str, tuple[str, Reader] | None]:
    """Return by a tensor's name in the checkpoint our name for it, and what unpacks it; None: it is not needed.

    Numbers and zero points become (num_outputs, ...) uint8, scales (num_outputs, num_groups) float32.
    """
    if checkpoint_format == "compressed-tensors":
        return {
            "weight_packed": ("weight", _unpacked),
            "weight_scale": ("weight_scale", _scales),
            "weight_zero_point": ("weight_zero_point", _signed_zeros),
            "weight_g_idx": ("weight_g_idx", _integers),
            "weight_shape": None,
        }
    if checkpoint_format == "awq":
        return {
            "qweight": ("weight", lambda x: _awq_outputs(x).T),
            "qzeros": ("weight_zero_point", lambda x: _awq_outputs(x).T),
            "scales": ("weight_scale", lambda x: _scales(x).T),
        }
    # Adds 1 to each number of a word; a stored 15 carries into the next number.
    offset = 0 if checkpoint_format == "gptq_v2" else 0x11111111
    return {
        "qweight": ("weight", lambda x: _unpacked(x.T)),
        "qzeros": ("weight_zero_point", lambda x: _unpacked(x + offset).T),
        "scales": ("weight_scale", lambda x: _scales(x).T),
        "g_idx": ("weight_g_idx", _integers),
    }


def mxfp4_numbers(blocks: Tensor) -> Tensor:
    """Return the bits of each value of MXFP4's blocks, (..., num_groups, 16) -> (..., num_groups * 32) uint8."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def _awq_outputs(words: Tensor) -> Tensor:
    """Return the numbers of AWQ's words in the order of the outputs, (size, num_outputs)."""
    numbers = _unpacked(words).unflatten(-1, (-1, PACKED))
    return numbers[..., torch.tensor(AWQ_ORDER, device=words.device)].flatten(-2)


def _unpacked(x: Tensor) -> Tensor:
    """Return the numbers of words, eight neighbours in each."""
    if x.dtype != torch.int32 or x.dim() != 2:
        raise ModelError(f"it has {x.dtype} and shape {tuple(x.shape)}; packed numbers are a matrix of torch.int32")
    return unpack(x, PACKED)


def _signed_zeros(x: Tensor) -> Tensor:
    """Return compressed-tensors' zero points, (num_outputs, num_groups): in words, before 0.9 in bytes."""
    return (x + ZERO).to(torch.uint8) if x.dtype == torch.int8 else _unpacked(x.T).T


def _scales(x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.dim() != 2:
        raise ModelError(f"it has {x.dtype} and shape {tuple(x.shape)}; scales are a floating-point matrix")
    return x.float()


def _integers(x: Tensor) -> Tensor:
    if x.is_floating_point() or x.dim() != 1:
        raise ModelError(f"it has {x.dtype} and shape {tuple(x.shape)}; the groups of inputs are a list of integers")
    return x.to(torch.int32)
