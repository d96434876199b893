"""Checkpoints in 4 bits as tools write them: fields that change no answer, layers of other forms, and contradictions.

The configs are what these packages wrote of a tiny model, without the parts that only say how.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import LLM, ConfigError, ModelError
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models import get_model_class
from nanoinfer.models.native_config import read_native_config
from nanoinfer.quantization.int4.formats import Int4Config
from nanoinfer.quantization.method_selection import read_quantization
from tests.quantization.test_checkpoints import BLOCKS, EXPERTS, SIZES, plain_folder, write_plain
from tests.quantization.test_checkpoints import write_pair as write_fp8
from tests.quantization.test_int4 import (
    KINDS,
    Kind,
    Tensors,
    assert_says_the_same,
    awq,
    changed,
    draw,
    gptq,
    run,
    words,
    write_pair,
)

__all__ = ["plain_folder"]  # a fixture

DOWN = "model.layers.0.mlp.down_proj"
AUTO_ROUND = {
    "autoround_version": "0.15.1",
    "bits": 4,
    "data_type": "int",
    "enable_quanted_input": False,
    "group_size": 32,
    "static_attention_granularity": "tensor",
    "static_kv_granularity": "tensor",
    "sym": True,
}
ITS_GPTQ = AUTO_ROUND | {
    "damp_percent": 0.01,
    "desc_act": False,
    "lm_head": False,
    "provider": "auto-round",
    "quant_method": "gptq",
    "true_sequential": False,
}
ITS_AWQ = AUTO_ROUND | {
    "modules_to_not_convert": ["lm_head"],
    "provider": "auto-round",
    "quant_method": "awq",
    "to_quant_block_names": "model.layers",
    "version": "gemm",
    "zero_point": False,
}
ITS_OWN = AUTO_ROUND | {
    "block_name_to_quantize": "model.layers",
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
}
TUNED = {  # AutoRound 0.4, with what it writes of tuning
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "enable_quanted_input": True,
    "enable_minmax_tuning": True,
    "seqlen": 512,
    "batch_size": 4,
    "scale_dtype": "torch.float16",
    "lr": 0.005,
    "minmax_lr": 0.005,
    "gradient_accumulate_steps": 1,
    "iters": 100,
    "amp": True,
    "nsamples": 64,
    "low_gpu_mem_usage": False,
    "to_quant_block_names": None,
    "enable_norm_bias_tuning": False,
    "act_bits": 16,
    "act_group_size": None,
    "act_sym": None,
    "act_dynamic": True,
    "act_data_type": None,
    "super_bits": None,
    "dataset": "NeelNanda/pile-10k",
    "autoround_version": "0.4.7",
    "quant_method": "intel/auto-round",
    "backend": "auto_round:gptq:exllamav2",
}
GPTQMODEL = {
    "bits": 4,
    "desc_act": False,
    "group_size": 32,
    "lm_head": False,
    "meta": {
        "act_group_aware": True,
        "quantizer": ["gptqmodel:7.7.0"],
        "uri": "https://github.com/modelcloud/gptqmodel",
    },
    "pack_dtype": "int32",
}
ITS_AWQ_TOO = GPTQMODEL | {
    "checkpoint_format": "gemm",
    "format": "gemm",
    "method": "awq",
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
TRANSFORMERS = {  # 5.24, from its own AwqConfig
    "zero_point": True,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "bits": 4,
    "tokenizer": None,
    "dataset": None,
    "group_size": 32,
    "damp_percent": 0.1,
    "desc_act": False,
    "act_group_aware": True,
    "sym": True,
    "true_sequential": True,
    "format": "gemm",
    "meta": None,
    "backend": "auto",
    "batch_size": 1,
    "cache_block_outputs": True,
    "modules_in_block_to_quantize": None,
    "version": "gemm",
}
V1, V2 = GPTQMODEL | {"method": "gptq", "quant_method": "gptq", "sym": True}, {"checkpoint_format": "gptq_v2"}


def read(config: dict[str, Any], architecture: str = "Qwen3ForCausalLM") -> Int4Config:
    model_class = get_model_class(architecture)
    fields = Fields({"quantization_config": config})
    found = read_quantization(fields, None, model_class.packed_modules_mapping, model_class.renamed_modules)
    assert isinstance(found, Int4Config)
    return found


@pytest.mark.parametrize(
    ("config", "layout", "has_zeros"),
    [
        (ITS_GPTQ, "gptq", False),
        (ITS_GPTQ | {"sym": False}, "gptq", True),
        (ITS_AWQ, "awq", False),
        (ITS_AWQ | {"sym": False, "zero_point": True}, "awq", True),
        (ITS_OWN, "gptq", False),
        (ITS_OWN | {"sym": False, "packing_format": "auto_round:auto_awq"}, "awq", True),
        (ITS_OWN | {"sym": False, "packing_format": "auto_round"}, "gptq_v2", True),
        (ITS_OWN | {"packing_format": "auto_round:gptqmodel"}, "gptq_v2", False),
        (ITS_OWN | {"static_kv_dtype": "fp8"}, "gptq", False),
        (TUNED, "gptq", False),
        (TUNED | {"sym": False, "backend": "auto_round:exllamav2"}, "gptq_v2", True),
        (ITS_AWQ_TOO, "awq", True),
        (ITS_AWQ_TOO | {"zero_point": False}, "awq", False),
        (V1 | {"checkpoint_format": "gptq", "format": "gptq"}, "gptq", False),
        (V1 | V2 | {"format": "gptq_v2", "sym": False}, "gptq_v2", True),
        (V1 | {"format": "gptq_v2"}, "gptq_v2", False),
        (TRANSFORMERS, "awq", True),
    ],
)
def test_fields_that_change_no_answer_are_passed_over(config: dict[str, Any], layout: str, has_zeros: bool) -> None:
    found = read(config)
    assert (found.checkpoint_format, found.group_size, found.has_zeros) == (layout, 32, has_zeros)
    assert not found.orders_inputs
    assert found.covers("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ITS_GPTQ | {"data_type": "mx_fp"}, "data_type='mx_fp'"),
        (ITS_AWQ | {"data_type": "fp"}, "data_type='fp'"),
        (ITS_OWN | {"act_bits": 8, "act_dynamic": True}, "act_bits=8"),
        (ITS_OWN | {"super_bits": 6}, "super_bits=6"),
        (ITS_OWN | {"rotation_configs": [{"kind": "hadamard"}]}, "rotation_configs="),
        (ITS_OWN | {"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8'"),
        (ITS_OWN | {"bits": 8}, "bits=8"),
        (ITS_OWN | {"extra_config": {DOWN: {"bits": 8}}}, f"extra_config['{DOWN}']={{'bits': 8}}"),
        (ITS_OWN | {"extra_config": {DOWN: {"group_size": 64}}}, f"extra_config['{DOWN}']={{'group_size': 64}}"),
        (ITS_OWN | {"extra_config": {DOWN: {"sym": False}}}, f"extra_config['{DOWN}']={{'sym': False}}"),
        (ITS_OWN | {"extra_config": {DOWN: {"act_bits": 8}}}, f"extra_config['{DOWN}']={{'act_bits': 8}}"),
        (ITS_OWN | {"extra_config": [DOWN]}, "extra_config=["),
        (ITS_OWN | {"extra_config": {"(": {"bits": 16}}}, "extra_config='re:.*(?:()': missing )"),
        (ITS_GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8, "group_size": 32, "sym": True}}}, "dynamic['+:.*down.*']="),
        (ITS_GPTQ | {"lm_head": True}, "lm_head=True"),
        (ITS_GPTQ | {"modules_in_block_to_quantize": "q_proj"}, "modules_in_block_to_quantize='q_proj'; it must be"),
        (V1 | {"rotation": "hadamard"}, "rotation='hadamard'"),
        (V1 | {"activation": {"mode": "w4afp8"}}, "activation={'mode': 'w4afp8'}"),
        (V1 | {"pack_dtype": "int16"}, "pack_dtype='int16'"),
        (V1 | {"is_marlin_format": True}, "is_marlin_format=True"),
        (ITS_AWQ_TOO | {"method": "gptq"}, "method='gptq'"),
        (TRANSFORMERS | {"backend": "llm-awq"}, "backend='llm-awq'"),
    ],
)
def test_fields_that_would_change_answers_are_refused_by_name_and_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        read(config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        (ITS_OWN | {"extra_config": {DOWN: {"bits": 16}}}, {DOWN}),
        (ITS_OWN | {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, set()),
        (ITS_OWN | {"extra_config": {r".*model\.layers\.0\.mlp\.down.*": {"bits": 16, "data_type": "float"}}}, {DOWN}),
        (ITS_OWN | {"extra_config": {r"0\.mlp\.down": {"bits": 16}}}, {DOWN}),
        (ITS_OWN | {"extra_config": {DOWN: {"bits": 4, "group_size": 32, "sym": True, "super_bits": None}}}, set()),
        (ITS_AWQ | {"modules_to_not_convert": ["lm_head", DOWN]}, {DOWN}),
        (ITS_GPTQ | {"dynamic": {r"-:.*model\.layers\.0\.mlp\.down_proj.*": {}}}, {DOWN}),
        (ITS_GPTQ | {"dynamic": {"lm_head": {}, "-:.*down.*": {}, "-:.*visual.*": {}}}, {DOWN, DOWN.replace("0", "1")}),
        (ITS_GPTQ | {"dynamic": {"+:.*[.]1[.].*": {"bits": 4}, "-:.*down.*": {}}}, {DOWN}),
        (ITS_GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj", "mlp.gate_proj"], ["self_attn.o_proj"]]},
         {DOWN, DOWN.replace("0", "1")}),
    ],
)  # fmt: skip
def test_layers_in_16_bits_are_those_that_the_tools_leave_so(config: dict[str, Any], ignored: set[str]) -> None:
    found = read(config)
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    modules = {f"model.layers.{index}.{part}" for index in (0, 1) for part in parts}
    assert {module for module in modules if not found.covers(module)} == ignored


def test_experts_are_listed_by_the_names_that_the_checkpoint_gives_them() -> None:
    of_experts = [[f"mlp.experts.{index}.{part}_proj" for index in (0, 1) for part in ("gate", "up", "down")]]
    found = read(ITS_GPTQ | {"modules_in_block_to_quantize": of_experts}, "Qwen3MoeForCausalLM")
    assert found.covers("model.layers.0.mlp.experts.gate_up_proj")
    assert found.covers("model.layers.0.mlp.experts.down_proj")
    assert not found.covers("model.layers.0.self_attn.o_proj")


ROUTERS = {rf".*model\.layers\.{index}\.mlp\.gate.*": {"bits": 16, "data_type": "float"} for index in (0, 1)}
WITHOUT_DOWN = {f"model.layers.{index}.mlp.down_proj": {"bits": 16} for index in (0, 1)}


@pytest.mark.parametrize(
    ("kind", "sparse", "keep"),
    [
        (Kind(ITS_OWN | {"extra_config": WITHOUT_DOWN}, gptq, 32, True), False, ("down_proj",)),
        (Kind(ITS_OWN | {"extra_config": ROUTERS}, gptq, 32, True), True, ()),
        (Kind(ITS_OWN | {"sym": False, "packing_format": "auto_round:auto_awq"}, awq, 32, False), False, ()),
        (Kind(ITS_AWQ, awq, 32, True), False, ()),
        (Kind(ITS_AWQ_TOO, awq, 32, False), True, ()),
    ],
    ids=["a layer in 16 bits", "experts", "asymmetric", "awq", "gptqmodel's awq"],
)
def test_what_tools_write_says_what_its_weights_in_float32_say(
    kind: Kind, sparse: bool, keep: tuple[str, ...], plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    assert_says_the_same(*write_pair(plain_folder(sparse), tmp_path, kind, keep))


# --- tensors that contradict the config ---


def signed_bytes(it: Any) -> Tensors:
    """Zero points as compressed-tensors wrote them before 0.9."""
    tensors = KINDS["compressed with zeros"].write(it)
    return {**tensors, "weight_zero_point": (it.zeros - 8).to(torch.int8)}


def without(config: dict[str, Any], *path: str, **changes: Any) -> dict[str, Any]:
    """The config without what `changes` names, or with another value of it, in the part that `path` leads to."""
    config = json.loads(json.dumps(config))
    part = config
    for name in path:
        part = part[name]
    for name, value in changes.items():
        part.pop(name, None)
        if value is not None:
            part[name] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
ZEROS, ORDER = "it has zero points other than 8", "it has inputs in another order than their groups"
DENIED = {
    "gptq": ("gptq with zeros", lambda raw: without(raw, sym=True), "qzeros", ZEROS),
    "gptq, sym absent": ("gptq with zeros", lambda raw: without(raw, sym=None), "qzeros", ZEROS),
    "gptq v2": ("gptq v2", lambda raw: without(raw, sym=True), "qzeros", ZEROS),
    "awq": ("awq 64", lambda raw: without(raw, zero_point=False), "qzeros", ZEROS),
    "compressed": (
        "compressed with zeros", lambda raw: without(raw, *WEIGHTS, symmetric=True), "weight_zero_point", ZEROS
    ),
    "gptq's order": ("gptq desc_act", lambda raw: without(raw, desc_act=None), "g_idx", ORDER),
    "compressed's order": (
        "compressed ordered", lambda raw: without(raw, *WEIGHTS, actorder=None), "weight_g_idx", ORDER
    ),
}  # fmt: skip


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", DENIED)
def test_a_tensor_that_the_config_denies_is_refused_and_the_remedy_reads_it(
    name: str, sparse: bool, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    of_kind, deny, tensor, rule = DENIED[name]
    packed, wide = write_pair(plain_folder(sparse), tmp_path, KINDS[of_kind])
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] = deny(raw["quantization_config"])
    (packed / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=rf"model\.layers\.0\..*\.{tensor} in .*{rule}") as error:
        run(packed)
    remedy = str(error.value).partition("hf_overrides=")[2].partition("; ")[0]
    tokens, logprobs = run(packed, hf_overrides=eval(remedy))
    expected, expected_logprobs = run(wide)
    assert tokens == expected
    assert torch.allclose(torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=1e-4)


@pytest.mark.parametrize("name", ["gptq", "gptq channels", "awq 64"])
def test_new_weights_that_the_config_denies_are_refused(
    name: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Zero points that are 8, and groups in order, may be sent."""
    kind = KINDS[name]
    config = {**kind.config, "zero_point": False} if "awq" in name else kind.config
    packed, _ = write_pair(plain_folder(False), tmp_path, kind._replace(config=config, symmetric=True))
    tensors = load_file(packed / "model.safetensors")
    names = [f"{DOWN}.qzeros", *([] if "awq" in name else [f"{DOWN}.g_idx"])]
    with LLM(packed, device="cpu", dtype="float32", max_model_len=112) as llm:
        llm.update_weights(tensors)
        for denied in names:
            with pytest.raises(ModelError, match=f"'{denied}' cannot be updated: it has .* no weight has"):
                llm.update_weights({denied: tensors[denied] + 1})


def test_zero_points_in_bytes_are_read(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    kind = KINDS["compressed with zeros"]._replace(write=signed_bytes)
    assert_says_the_same(*write_pair(plain_folder(False), tmp_path, kind))


def zeros_with_borrow(it: Any) -> Tensors:
    """Zero points as GPTQModel writes them: one is taken from each place of a word, which borrows where it has 0."""
    it.zeros[::3] = 0
    return {**gptq(it), "qzeros": words(it.zeros.T) - 0x11111111}


def test_zero_points_of_gptq_may_be_0(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    assert_says_the_same(
        *write_pair(plain_folder(False), tmp_path, KINDS["gptq with zeros"]._replace(write=zeros_with_borrow))
    )


# --- biases of layers without one ---


def with_biases(value: float) -> Callable[[Any], Tensors]:
    return lambda it: {**gptq(it), "bias": torch.full((len(it.q),), value)}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_biases_of_zeros_change_nothing_where_a_layer_has_none(
    sparse: bool, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    packed, wide = write_pair(plain_folder(sparse), tmp_path, KINDS["gptq"]._replace(write=with_biases(0.0)))
    assert_says_the_same(packed, wide)
    zeros = {name: tensor for name, tensor in load_file(packed / "model.safetensors").items() if "bias" in name}
    with LLM(packed, device="cpu", dtype="float32", max_model_len=112) as llm:
        llm.update_weights(zeros)
        name = next(iter(zeros))
        with pytest.raises(ModelError, match=f"'{name}' cannot be updated: the model has no weight of this name"):
            llm.update_weights({name: zeros[name] + 1})


def test_other_biases_are_an_error_where_a_layer_has_none(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    packed, _ = write_pair(plain_folder(False), tmp_path, KINDS["gptq"]._replace(write=with_biases(0.001)))
    with pytest.raises(ModelError, match=r"weights that the model does not know: .*bias"):
        run(packed)


# --- weights in more or fewer bits than the config says ---

GATE = "model.layers.0.mlp.gate"


def in_4_bits(tensors: Tensors, module: str) -> None:
    del tensors[f"{module}.weight"]
    tensors |= {f"{module}.{part}": tensor for part, tensor in gptq(draw(8, 128, 32, True)).items()}


def in_fp8(tensors: Tensors, module: str) -> None:
    tensors[f"{module}.weight"] = tensors[f"{module}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{module}.weight_scale_inv"] = torch.ones(1, 1)


def in_16_bits(tensors: Tensors, module: str, *shape: int) -> None:
    for name in [name for name in tensors if name.startswith(f"{module}.")]:
        del tensors[name]
    tensors[f"{module}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)


IS_WIDE, IS_IN_4 = (
    r"the weight is in 16 bits \(torch.bfloat16\), and must be in {} by",
    "the weight is in 4 bits, and must be in 16",
)
DISAGREEING = {
    "a weight in 16 bits": (False, lambda x: in_16_bits(x, DOWN, 128, 384), f"{DOWN}.weight in .*{IS_WIDE.format(4)}"),
    "an expert in 16 bits": (
        True,
        lambda x: in_16_bits(x, "model.layers.1.mlp.experts.3.up_proj", 384, 128),
        f"model.layers.1.mlp.experts.3.up_proj.weight in .*{IS_WIDE.format(4)}",
    ),
    "a router in 4 bits": (True, lambda x: in_4_bits(x, GATE), rf"{GATE}\.\w+ in .*{IS_IN_4}.*routers, embeddings"),
    "an embedding in 4 bits": (False, lambda x: in_4_bits(x, "model.embed_tokens"), rf"embed_tokens\.\w+ .*{IS_IN_4}"),
    "a router in 8 bits": (True, lambda x: in_fp8(x, GATE), f"{GATE}.weight in .* is in 8 bits, and must be in 16"),
    "a weight in FP8": (
        False, lambda x: x.update({f"{DOWN}.weight": torch.zeros(128, 384).to(torch.float8_e4m3fn)}),
        f"{DOWN}.weight in .*the weight is in 8 bits .torch.float8_e4m3fn., and must be in 4",
    ),
    "a weight in 8 bits": (
        False, lambda x: x.update({f"{DOWN}.qweight": torch.zeros(96, 128).int()}),
        f"{DOWN}.qweight in .*it is in 8 bits, and must be in 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEING)
def test_a_weight_in_other_bits_than_it_must_have_is_named_with_both(
    name: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    sparse, change, message = DISAGREEING[name]
    packed, _ = write_pair(plain_folder(sparse), tmp_path, KINDS["gptq"])
    with pytest.raises(ModelError, match=message):
        run(changed(packed, change))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, f"{IS_IN_4}.*config.json has no quantization_config"),
        ({**KINDS["gptq"].config, "dynamic": {"-:.*[.]0[.].*": {}}}, rf"layers\.0\..*{IS_IN_4}"),
    ],
)
def test_weights_in_4_bits_that_the_config_leaves_in_16_are_named(
    config: dict[str, Any] | None, message: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    packed, _ = write_pair(plain_folder(True), tmp_path, KINDS["gptq"])
    raw = json.loads((packed / "config.json").read_text()) | {"quantization_config": config}
    (packed / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        run(packed)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_weights_of_fp8_in_other_bits_are_named_too(
    sparse: bool, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    module, shape = ("model.layers.0.mlp.experts.1.down_proj", (128, 384)) if sparse else (DOWN, (128, 384))
    fp8, _ = write_fp8(plain_folder(sparse), tmp_path, BLOCKS)
    with LLM(fp8, device="cpu", dtype="float32", max_model_len=112) as llm:
        with pytest.raises(ModelError, match=f"'{module}.weight' cannot be updated: {IS_WIDE.format(8)}"):
            llm.update_weights({f"{module}.weight": torch.zeros(shape, dtype=torch.bfloat16)})
        if sparse:
            with pytest.raises(
                ModelError, match=f"'{GATE}.weight' cannot be updated: the weight is in 8 bits, and must"
            ):
                llm.update_weights({f"{GATE}.weight": torch.zeros(4, 128).to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match=f"{module}.weight in .*{IS_WIDE.format(8)} quantization_config"):
        run(changed(fp8, lambda tensors: in_16_bits(tensors, module, *shape)))


def test_fp8_is_not_rounded_to_4_bits_without_its_scale(plain_folder: Callable[[bool], Path]) -> None:
    name, weight = f"{DOWN}.weight", torch.zeros(128, 384).to(torch.float8_e4m3fn)
    message = f"'{name}' cannot be updated: the weight is in 8 bits, and must be in 16"
    options = {"device": "cpu", "dtype": "float32", "quantization": "int4", "max_model_len": 112}
    with LLM(plain_folder(False), **options) as llm, pytest.raises(ModelError, match=message):
        llm.update_weights({name: weight})


# --- only what has fewer bits is checked for groups and blocks ---


ATTENTION = [f"{name}_proj" for name in "qkvo"]


def test_two_ranks_may_cut_heads_that_are_in_16_bits(tmp_path: Path) -> None:
    """Of two query heads of 64 values each rank has one, and with groups of 128 only attention would be cut."""
    plain, ignored = tmp_path / "plain", {"modules_to_not_convert": ATTENTION}
    write_plain(plain, False, num_attention_heads=2, num_key_value_heads=1)
    kind = KINDS["awq 128"]
    (tmp_path / "pair").mkdir()
    packed, wide = write_pair(
        plain, tmp_path / "pair", kind._replace(config=kind.config | ignored), keep=("self_attn",)
    )
    assert_says_the_same(packed, wide, tensor_parallel_size=2)


def test_a_kv_head_of_64_values_may_be_in_16_bits_beside_blocks(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_plain(plain, True, num_key_value_heads=1)
    config = BLOCKS | {"modules_to_not_convert": ["lm_head", "mlp.gate", *ATTENTION]}
    fp8, wide = write_fp8(plain, tmp_path, config, keep=("self_attn",))
    assert run(fp8)[0] == run(wide)[0]


def cut(architecture: str, quantization: dict[str, Any], size: int, **sizes: Any) -> str | None:
    """The error with which so many ranks, or one, are refused."""
    raw = {"architectures": [architecture], **SIZES, **sizes, "quantization_config": quantization}
    try:
        read_native_config(raw).check_tensor_parallel_size(size)
    except (ModelError, ConfigError) as error:
        return str(error)
    return None


IN_4 = KINDS["awq 128"].config
LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 96,
    **EXPERTS,
    "shared_expert_intermediate_size": 128,
}
HYBRID = "Qwen3NextForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "config", "ignored", "size", "sizes", "refused"),
    [
        ("Qwen3ForCausalLM", IN_4, [], 4, {}, "the query heads, 64 values"),
        ("Qwen3ForCausalLM", IN_4, ["o_proj"], 4, {}, None),
        ("Qwen3ForCausalLM", IN_4, ["model.layers.0.self_attn.o_proj"], 4, {}, "the query heads, 64 values"),
        ("Qwen3ForCausalLM", IN_4, [f"model.layers.{index}.self_attn.o_proj" for index in (0, 1)], 4, {}, None),
        ("Qwen3ForCausalLM", BLOCKS, [], 1, {"num_key_value_heads": 1}, "the KV heads, 64 values"),
        ("Qwen3ForCausalLM", BLOCKS, ["o_proj"], 1, {"num_key_value_heads": 1}, "the KV heads, 64 values"),
        ("Qwen3ForCausalLM", BLOCKS, ["q_proj", "k_proj", "v_proj"], 1, {"num_key_value_heads": 1}, None),
        ("Qwen3ForCausalLM", BLOCKS, [], 1, {"intermediate_size": 192}, "intermediate_size=192"),
        ("Qwen3ForCausalLM", BLOCKS, ["gate_proj", "up_proj"], 1, {"intermediate_size": 192}, "intermediate_size=192"),
        ("Qwen3ForCausalLM", BLOCKS, ["gate_proj", "up_proj", "down_proj"], 1, {"intermediate_size": 192}, None),
        (HYBRID, BLOCKS, [], 1, LINEAR, "the linear value heads, 192 values"),
        (HYBRID, BLOCKS, ["in_proj_qkvz", "in_proj_ba", "out_proj"], 1, LINEAR, None),
        (HYBRID, BLOCKS, [f"model.layers.{index}.linear_attn" for index in (0, 1, 2)], 2, LINEAR, None),
        (HYBRID, IN_4, [], 2, LINEAR, "the linear value heads, 96 values"),
        (HYBRID, IN_4, ["out_proj"], 2, LINEAR, None),
        (
            HYBRID,
            BLOCKS,
            [f"model.layers.{index}.linear_attn" for index in (0, 1)],
            2,
            LINEAR,
            "the linear value heads",
        ),
    ],
)
def test_only_weights_in_fewer_bits_are_checked_for_cuts(
    architecture: str, config: dict[str, Any], ignored: list[str], size: int, sizes: dict[str, Any], refused: str | None
) -> None:
    found = cut(architecture, config | {"modules_to_not_convert": ["mlp.gate", *ignored]}, size, **sizes)
    assert found is None if refused is None else found is not None and refused in found, found
