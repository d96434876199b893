"""FP8 checkpoints of every format against the same weights in float32, and what is refused, by field and value."""

import copy
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LLM, ConfigError, ModelError, SamplingParams
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.quantization_config import QuantizationConfig
from nanoinfer.models import get_model_class
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.common.fp8_format import FP8
from nanoinfer.ops.fp8.spec import dequantize_weight, fit_weight, quantize_weight
from nanoinfer.quantization import method_selection
from nanoinfer.quantization.method_selection import read_quantization

Tensors = dict[str, Tensor]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
EXPERTS = {"moe_intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
FP8_DYNAMIC = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8_DYNAMIC | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mlp.gate"]}


def compressed_tensors(weights: str, inputs: str, **changes: Any) -> dict[str, Any]:
    """What llm-compressor writes of weights and inputs that share scales so."""
    common = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "actorder": None, "observer": "x"}
    of_weights = {**common, "strategy": weights, "dynamic": False}
    of_inputs = {**common, "strategy": inputs, "dynamic": inputs != "tensor"}
    if weights == "block":
        of_weights["block_structure"], of_inputs["group_size"] = [128, 128], 128
    group = {"targets": ["Linear"], "weights": of_weights, "input_activations": of_inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp[.]gate$"],
        "kv_cache_scheme": None,
        "version": "0.12",
        **changes,
    }


STATIC = FP8_DYNAMIC | {"activation_scheme": "static", "ignored_layers": ["lm_head", "mlp.gate"]}
# As transformers 5 writes it, and Ministral 3 and Devstral 2 have it.
OF_TRANSFORMERS = {
    "activation_scheme": "static",
    "dequantize": False,
    "expert_dtype": "fp8",
    "modules_to_convert": None,
    "modules_to_not_convert": ["lm_head", "mlp.gate"],
    "quant_method": "fp8",
    "scale_fmt": "float",
    "weight_block_size": None,
}
MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_algo": "FP8",
    "quant_method": "modelopt",
}
FORMATS = {
    "blocks": BLOCKS,
    "blocks of transformers 5": OF_TRANSFORMERS | {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "static tensors of transformers 5": OF_TRANSFORMERS,
    "dynamic tensors of transformers 5": OF_TRANSFORMERS | {"activation_scheme": "dynamic"},
    "modelopt": MODELOPT,
    "static tensors": STATIC,
    "dynamic tensors": STATIC | {"activation_scheme": "dynamic"},
    "compressed channels": compressed_tensors("channel", "token"),
    "compressed tensors": compressed_tensors("tensor", "token"),
    "compressed static": compressed_tensors("tensor", "tensor"),
    "compressed static channels": compressed_tensors("channel", "tensor"),
    "compressed blocks": compressed_tensors("block", "group"),
}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight") or ".experts." in name


def has_input_scale(config: dict[str, Any]) -> bool:
    """Whether activations have one scale that the checkpoint gives."""
    if (groups := config.get("config_groups")) is not None:
        return not groups["group_0"]["input_activations"]["dynamic"]
    return config["activation_scheme"] == "static"


def round_weight(name: str, weight: Tensor, config: dict[str, Any]) -> tuple[Tensors, Tensor]:
    """The tensors that a checkpoint has in place of a weight, and the weight that they stand for."""
    text, stem = json.dumps(config), name.removesuffix(".weight")
    rounded: Tensors
    scale_name = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
    if config.get("weight_block_size") or '"block"' in text:
        values, scales = quantize_weight(weight, 128)
        rounded = {name: values, f"{stem}.{scale_name}": scales}
    elif '"channel"' in text:
        values, scales = quantize_weight(weight)
        rounded = {name: values, f"{stem}.weight_scale": scales.unsqueeze(1).bfloat16()}
        scales = scales.bfloat16().float()
    else:
        scale, is_scalar = weight.abs().max() / 448, config.get("activation_scheme") == "static"
        values, scales = (weight / scale).to(FP8), scale.expand(len(weight))
        rounded = {name: values, f"{stem}.{scale_name}": scale if is_scalar else scale.reshape(1)}
    if has_input_scale(config):
        scale_name = "activation_scale" if "weight_block_size" in config else "input_scale"
        rounded[f"{stem}.{scale_name}"] = torch.tensor(0.05 + len(stem) % 3 / 100)
    return rounded, dequantize_weight(values, scales)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    folders: dict[bool, Path] = {}

    def build(sparse: bool) -> Path:
        if sparse not in folders:
            folders[sparse] = tmp_path_factory.mktemp("plain")
            write_plain(folders[sparse], sparse)
        return folders[sparse]

    return build


def write_plain(folder: Path, sparse: bool, **changes: Any) -> None:
    model_class = getattr(transformers, "Qwen3MoeForCausalLM" if sparse else "Qwen3ForCausalLM")
    sizes = {**SIZES, **(EXPERTS if sparse else {}), **changes}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model_class(model_class.config_class(**sizes)).save_pretrained(folder)


def write_pair(plain: Path, folder: Path, config: dict[str, Any], keep: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Write a checkpoint in FP8, and one in float32 of the weights that it stands for."""
    tensors, rounded, wide = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if is_linear(name) and not any(part in name for part in keep):
            parts, wide[name] = round_weight(name, tensor, config)
            rounded |= parts
        else:
            rounded[name] = wide[name] = tensor
    raw = json.loads((plain / "config.json").read_text())
    for name, content, extra in (("fp8", rounded, {"quantization_config": config}), ("wide", wide, {})):
        (folder / name).mkdir()
        save_file({key: value.contiguous() for key, value in content.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(raw | extra))
    return folder / "fp8", folder / "wide"


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 17, 40, 90)]


def run(folder: Path, **options: Any) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens and their log-probabilities."""
    with LLM(folder, device="cpu", dtype="float32", max_model_len=112, **options) as llm:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    logprobs = [
        step[token].logprob
        for output in outputs
        for token, step in zip(output.token_ids, output.outputs[0].logprobs or [], strict=True)
    ]
    return [output.token_ids for output in outputs], logprobs


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_in_fp8_gives_the_tokens_of_its_weights_in_float32(
    name: str, sparse: bool, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    """On a CPU the weights are widened, and activations stay as they are."""
    fp8, wide = write_pair(plain_folder(sparse), tmp_path, FORMATS[name])
    tokens, logprobs = run(fp8)
    expected_tokens, expected = run(wide)
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_fp8_are_near_those_of_widened_weights(
    name: str, sparse: bool, plain_folder: Callable[[bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    fp8, wide = write_pair(plain_folder(sparse), tmp_path, FORMATS[name])
    token_ids, params = prompts()[-1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for folder in (fp8, wide):
        with LLM(folder, device="cpu", dtype="float32", max_model_len=112) as llm:
            entries = llm.generate([token_ids], params, use_tqdm=False)[0].prompt_logprobs or []
        found.append(torch.tensor([e[t].logprob for t, e in zip(token_ids, entries, strict=True) if e]))
    difference = (found[0] - found[1]).abs()
    assert 0 < difference.median() < 0.5, "random weights of this size leave nothing to be sure of"
    assert found[0].isfinite().all()


def test_a_16_bit_checkpoint_is_rounded_while_it_is_loaded(
    plain_folder: Callable[[bool], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each weight by itself, by rows."""
    tensors = load_file(plain_folder(True) / "model.safetensors")
    wide = {
        name: dequantize_weight(*fit_weight(tensor)) if is_linear(name) else tensor for name, tensor in tensors.items()
    }
    save_file(wide, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain_folder(True) / "config.json").read_text())
    with caplog.at_level(logging.INFO, "nanoinfer"):
        rounded = run(plain_folder(True), quantization="fp8")
    expected = run(tmp_path)
    assert rounded[0] == expected[0]
    assert rounded[1] == pytest.approx(expected[1], abs=1e-4)
    assert [record.message for record in caplog.records].count(
        "cpu has no FP8 products: weights are held in FP8, and widened for each product"
    ) == 1


@pytest.mark.parametrize("name", ["static tensors of transformers 5", "modelopt"])
def test_scales_of_packed_layers_lie_with_their_own_rows(
    name: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    """q, k and v have three scales, gate and up two; inputs have the largest."""
    folder, wide = write_pair(plain_folder(False), tmp_path, FORMATS[name])
    tensors = load_file(folder / "model.safetensors")
    with LLM(folder, device="cpu", dtype="float32", max_model_len=32, num_kvcache_blocks=4) as llm:
        layer = llm.engine.runner.model.model.layers[1]
        wide_tensors, input_scale = load_file(wide / "model.safetensors"), INPUT_SCALES[name]
        for module, path, parts in (
            (layer.self_attn.qkv_proj, "model.layers.1.self_attn", ("q", "k", "v")),
            (layer.mlp.gate_up_proj, "model.layers.1.mlp", ("gate", "up")),
        ):
            expected = torch.cat([wide_tensors[f"{path}.{part}_proj.weight"] for part in parts])
            assert torch.equal(module.quant_method.wide_weight(module), expected)
            input_scales = [tensors[f"{path}.{part}_proj.{input_scale}"] for part in parts]
            assert module.largest_input_scale == max(input_scales)


INPUT_SCALES = {"static tensors of transformers 5": "activation_scale", "modelopt": "input_scale"}


def test_scales_may_have_either_name_and_those_of_experts_lie_in_one_tensor(
    plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    """transformers 5 has the experts of a layer in one tensor, and so their scales; `update_weights` takes both."""
    folder = write_pair(plain_folder(True), tmp_path, OF_TRANSFORMERS)[0]
    expected, tensors = run(folder), load_file(folder / "model.safetensors")
    other = {
        name.replace("weight_scale_inv", "weight_scale").replace("activation_scale", "input_scale"): tensor
        for name, tensor in tensors.items()
    }
    merged = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(SIZES["num_hidden_layers"]):
        for projection, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            path = f"model.layers.{layer}.mlp.experts"
            experts = range(EXPERTS["num_experts"])

            def stacked(kind: str, path=path, parts=parts, experts=experts) -> list[Tensor]:
                return [torch.stack([tensors[f"{path}.{i}.{part}.{kind}"] for i in experts]) for part in parts]

            merged[f"{path}.{projection}"] = torch.cat([x.view(torch.uint8) for x in stacked("weight")], 1).view(FP8)
            merged[f"{path}.{projection}_scale_inv"] = torch.stack(stacked("weight_scale_inv"), 1).unsqueeze(2)
            merged[f"{path}.{projection}_activation_scale"] = torch.stack(stacked("activation_scale")).amax(0)
    for content in (other, merged):
        save_file(content, folder / "model.safetensors")
        assert run(folder) == expected
    with LLM(folder, device="cpu", dtype="float32", max_model_len=112) as llm:
        llm.update_weights({name: torch.zeros_like(tensor) for name, tensor in merged.items() if "scale" in name})
        for content in (other, merged, tensors):
            llm.update_weights(content)
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            assert [output.token_ids for output in outputs] == expected[0]


@pytest.mark.parametrize("name", [None, "compressed channels", "static tensors"])
def test_two_ranks_give_the_tokens_of_one(
    name: str | None, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Experts have three groups of 128, of which the first rank takes two, and the second is filled up with zeros."""
    folder, options = plain_folder(True), {"quantization": "fp8"}
    if name is not None:
        folder, options = write_pair(folder, tmp_path, FORMATS[name])[0], {}
    one, two = (run(folder, tensor_parallel_size=size, **options) for size in (1, 2))
    assert one[0] == two[0]
    assert one[1] == pytest.approx(two[1], abs=1e-4)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
def test_ranks_share_blocks(sparse: bool, tmp_path: Path) -> None:
    """Three blocks on two ranks, with KV heads of whole blocks."""
    (tmp_path / "plain").mkdir()
    write_plain(tmp_path / "plain", sparse, head_dim=128)
    folder = write_pair(tmp_path / "plain", tmp_path, BLOCKS)[0]
    one, two = (run(folder, tensor_parallel_size=size) for size in (1, 2))
    assert one[0] == two[0]
    assert one[1] == pytest.approx(two[1], abs=1e-4)


def test_ranks_that_would_cut_a_block_of_kv_heads_are_refused(
    plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Two of 64 would share a block of scales."""
    folder = write_pair(plain_folder(True), tmp_path, BLOCKS)[0]
    with pytest.raises(ConfigError) as error:
        run(folder, tensor_parallel_size=2)
    assert (
        "a rank's share of the KV heads, 64 values, is no multiple of the 128 that share a scale; use one of 1"
        in str(error.value)
    )


@pytest.mark.parametrize("pattern", ["model.layers.1", "re:.*layers[.]1[.].*", "model.layers.1.self_attn"])
def test_layers_that_the_checkpoint_leaves_in_16_bits_are_read_so(
    pattern: str, plain_folder: Callable[[bool], Path], tmp_path: Path
) -> None:
    kept = "layers.1.self_attn" if "attn" in pattern else "layers.1."
    config = compressed_tensors("channel", "token", ignore=["lm_head", pattern])
    fp8, wide = write_pair(plain_folder(False), tmp_path, config, keep=(kept,))
    assert run(fp8)[0] == run(wide)[0]


@pytest.mark.parametrize("name", [None, *FORMATS])
def test_random_weights_need_no_checkpoint(
    name: str | None, plain_folder: Callable[[bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = json.loads((plain_folder(True) / "config.json").read_text())
    quantization = {} if name is None else {"quantization_config": FORMATS[name]}
    (tmp_path / "config.json").write_text(json.dumps(raw | quantization))
    options = {"load_format": "dummy", "quantization": "fp8" if name is None else None}
    tokens, logprobs = run(tmp_path, **options)
    assert all(map(math.isfinite, logprobs))
    if name is None:  # what is drawn is what would be drawn in 32 bits
        plain, expected = run(tmp_path, load_format="dummy")
        assert sum(a == b for one, two in zip(tokens, plain, strict=True) for a, b in zip(one, two, strict=True)) > 0
        assert logprobs != expected
    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    assert all(map(math.isfinite, run(tmp_path, **options)[1]))


def test_a_missing_scale_is_named(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    fp8, _ = write_pair(plain_folder(False), tmp_path, BLOCKS)
    tensors = load_file(fp8 / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, fp8 / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks weights for model.layers.0.mlp.up_proj.weight_scale_inv; "):
        run(fp8)


def test_scales_of_another_shape_are_refused(plain_folder: Callable[[bool], Path], tmp_path: Path) -> None:
    fp8, _ = write_pair(plain_folder(False), tmp_path, BLOCKS)
    tensors = load_file(fp8 / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2, 1)
    save_file(tensors, fp8 / "model.safetensors")
    with pytest.raises(ModelError, match=r"it has shape \(2, 1\), config.json implies \(3, 1\)"):
        run(fp8)


# --- what config.json says ---


def read(raw: Any, requested: str | None = None, architecture: str = "Qwen3ForCausalLM") -> QuantizationConfig | None:
    model_class = get_model_class(architecture)
    fields = Fields({"quantization_config": raw})
    return read_quantization(fields, requested, model_class.packed_modules_mapping, model_class.renamed_modules)


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    *above, last = path.split("/")
    for name in above:
        inner = inner[name]
    inner[last] = value
    return config


CHANNELS = FORMATS["compressed channels"]
GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("config", "path", "value", "message"),
    [
        (BLOCKS, "quant_method", "hqq", "quant_method='hqq', which is not supported; supported are fp8, compressed-"),
        (BLOCKS, "fmt", "e5m2", "fmt='e5m2', which is not supported; supported: 'e4m3', 'float8_e4m3fn'"),
        (BLOCKS, "weight_block_size", [64, 64], "weight_block_size=[64, 64], which is not supported"),
        (BLOCKS, "activation_scheme", "none", "activation_scheme='none', which is not supported"),
        (BLOCKS, "activation_scheme", "static", "activation_scheme='static' with weight_block_size, which is not"),
        (BLOCKS, "scale_fmt", "ue8m0", "scale_fmt='ue8m0', which is not supported"),
        (OF_TRANSFORMERS, "expert_dtype", "fp4", "expert_dtype='fp4', which is not supported"),
        (OF_TRANSFORMERS, "modules_to_convert", ["embed_tokens"], "modules_to_convert=['embed_tokens'], which is not"),
        (OF_TRANSFORMERS, "weight_block_size", [1, 128], "weight_block_size=[1, 128], which is not supported"),
        (MODELOPT, "quant_algo", "NVFP4", "quant_algo='NVFP4', which is not supported; supported: 'FP8'"),
        (MODELOPT, "quantized_layers", {"a": {}}, "quantized_layers={'a': {}}, which is not supported"),
        (
            CHANNELS,
            "transform_config",
            {"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}},
            "transform_config.location='q_attn', which is not supported; supported: 'weight_input', 'weight_output'",
        ),
        (BLOCKS, "modules_to_not_convert", "lm_head", "modules_to_not_convert='lm_head'; it must be a list of names"),
        (BLOCKS, "modules_to_not_convert", [7], "modules_to_not_convert=[7]; it must be a list of names"),
        (CHANNELS, "format", "int-quantized", "format='int-quantized', which is not supported"),
        (CHANNELS, "config_groups", {}, "config_groups={}; one group for all linear layers is supported"),
        (CHANNELS, "ignore", "lm_head", "ignore='lm_head'; it must be a list of names"),
        (CHANNELS, "ignore", ["re:("], "ignore='re:(': missing ), unterminated subpattern"),
        (CHANNELS, f"{GROUP}/targets", ["re:.*q_proj"], "targets=['re:.*q_proj'], which is not supported"),
        (CHANNELS, f"{GROUP}/weights/num_bits", 4, "weights.num_bits=4, which is not supported; supported: 8"),
        (CHANNELS, f"{GROUP}/weights/type", "int", "weights.type='int', which is not supported"),
        (CHANNELS, f"{GROUP}/weights/strategy", "group", "weights.strategy='group', which is not supported"),
        (CHANNELS, f"{GROUP}/weights/symmetric", False, "weights.symmetric=False, which is not supported"),
        (CHANNELS, f"{GROUP}/input_activations", None, "input_activations=None, which is not supported"),
        (CHANNELS, f"{GROUP}/input_activations/strategy", "group", "input_activations.strategy='group', which is not"),
        (CHANNELS, f"{GROUP}/output_activations", {"num_bits": 8}, "output_activations={'num_bits': 8}, which is not"),
        (CHANNELS, "quant_future", "x", "quant_future='x', which is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_field_and_value(
    config: dict[str, Any], path: str, value: Any, message: str
) -> None:
    read(config)
    quantization = changed(config, path, value)
    with pytest.raises(ModelError) as error:
        read_native_config({"architectures": ["Qwen3ForCausalLM"], **SIZES, "quantization_config": quantization})
    assert message in str(error.value)
    assert "use " in str(error.value) or "must be" in str(error.value)


@pytest.mark.parametrize("config", [BLOCKS, CHANNELS])
def test_scales_for_a_cache_in_8_bits_are_not_needed(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanoinfer"):
        assert read(changed(config, "kv_cache_scheme", {"num_bits": 8, "type": "float"})) == read(config)
    assert "kv_cache_dtype='int8' or 'fp8' finds one for each key and value" in caplog.text


def test_an_option_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization='int3' is not known; use one of fp8, int8, int4"):
        LLM("anything", quantization="int3")


def test_a_checkpoint_in_fp8_may_be_asked_for_fp8_too_and_have_another_name_for_it() -> None:
    assert read(BLOCKS, "fp8") == read(BLOCKS)
    assert read(changed(CHANNELS, "format", "naive-quantized")) == read(CHANNELS)
    assert read(None) is None


EXPERTS_OF_0 = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("architecture", "ignored", "module", "is_covered"),
    [
        ("Qwen3ForCausalLM", "lm_head", "model.layers.0.self_attn.qkv_proj", True),
        ("Qwen3ForCausalLM", "model.layers.0", "model.layers.0.self_attn.qkv_proj", False),
        ("Qwen3ForCausalLM", "model.layers.1", "model.layers.10.self_attn.qkv_proj", True),
        ("Qwen3ForCausalLM", "mlp.down_proj", "model.layers.0.mlp.down_proj", False),
        ("Qwen3MoeForCausalLM", "mlp.gate", "model.layers.0.mlp.experts.gate_up_proj", True),
        ("MixtralForCausalLM", "re:.*block_sparse_moe.*", "model.layers.0.mlp.experts.down_proj", False),
        ("MixtralForCausalLM", "re:.*[.]w[123]", "model.layers.0.mlp.experts.gate_up_proj", False),
        ("Phi3ForCausalLM", "self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj", False),
        # transformers 5 renames Mixtral's experts; either version may have written the list
        ("MixtralForCausalLM", "re:.*mlp[.]experts[.]0[.](gate|up|down)_proj", EXPERTS_OF_0, False),
        ("MixtralForCausalLM", "model.layers.0.mlp.experts", EXPERTS_OF_0, False),
        ("MixtralForCausalLM", "model.layers.0.mlp.experts.gate_up_proj", EXPERTS_OF_0, False),
        ("MixtralForCausalLM", "model.layers.0.block_sparse_moe", EXPERTS_OF_0, False),
        ("MixtralForCausalLM", "model.layers.0.block_sparse_moe.gate", EXPERTS_OF_0, True),
        ("MiniMaxM2ForCausalLM", "gate", EXPERTS_OF_0, True),
        ("Glm4MoeForCausalLM", "re:.*mlp[.]shared_experts.*", "model.layers.1.mlp.shared_expert.down_proj", False),
        ("Glm4MoeForCausalLM", "model.layers.1.mlp.shared_expert", "model.layers.1.mlp.shared_expert.down_proj", False),
        # the text part of models that also see images
        ("MistralForCausalLM", "model.language_model.layers.0.mlp", "model.layers.0.mlp.down_proj", False),
        ("MistralForCausalLM", "language_model.model.layers.0.mlp", "model.layers.0.mlp.down_proj", False),
        ("MistralForCausalLM", "language_model.model.layers.1.mlp", "model.layers.0.mlp.down_proj", True),
        ("MistralForCausalLM", "re:model[.]language_model[.]layers[.]0", "model.layers.0.mlp.down_proj", False),
        ("MistralForCausalLM", "model.vision_tower", "model.layers.0.mlp.down_proj", True),
        ("Qwen3ForCausalLM", "re:layers[.]0[.]mlp", "model.layers.0.mlp.down_proj", False),
        # a name of what the module lies in, a wildcard, and an expression as transformers reads it
        ("Qwen3ForCausalLM", "self_attn", "model.layers.0.self_attn.qkv_proj", False),
        ("Qwen3ForCausalLM", "model.layers.*.self_attn", "model.layers.10.self_attn.qkv_proj", False),
        ("Qwen3ForCausalLM", "*self_attn*", "model.layers.0.self_attn.o_proj", False),
        ("Qwen3ForCausalLM", "model.layers.1*", "model.layers.0.self_attn.o_proj", True),
        ("Qwen3ForCausalLM", r"model\.layers\.[01]\.mlp", "model.layers.1.mlp.gate_up_proj", False),
        ("Qwen3ForCausalLM", r"model\.layers\.[01]\.mlp", "model.layers.10.mlp.gate_up_proj", True),
        ("Qwen3ForCausalLM", r"re:^(?!model\.layers).*", "model.layers.0.self_attn.o_proj", True),
        ("MistralForCausalLM", "re:^(?!.*language_model).*", "model.layers.0.mlp.down_proj", True),
        ("Qwen3ForCausalLM", r"re:.*layers\.(?!1)\d\.", "model.layers.0.self_attn.o_proj", False),
        ("Qwen3ForCausalLM", "self_att", "model.layers.0.self_attn.qkv_proj", True),
    ],
)
def test_what_is_ignored_is_found_by_the_checkpoints_names(
    architecture: str, ignored: str, module: str, is_covered: bool
) -> None:
    config = read(compressed_tensors("channel", "token", ignore=[ignored]), architecture=architecture)
    assert config is not None
    assert config.covers(module) is is_covered


def test_weights_of_one_product_cannot_be_treated_differently() -> None:
    config = read(compressed_tensors("channel", "token", ignore=["re:.*k_proj"]))
    assert config is not None
    with pytest.raises(ModelError, match=r"leaves model.layers.0.self_attn.k_proj in 16 bits and not"):
        config.covers("model.layers.0.self_attn.qkv_proj")


def test_a_list_may_name_each_expert_as_either_transformers_does() -> None:
    """Such lists are long: each layer is looked up in them, not compared with all their names."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(0, 56, 2)
        for expert in range(128)
        for part in ("gate", "up", "down")
    ]
    config = read(compressed_tensors("channel", "token", ignore=names), architecture="MixtralForCausalLM")
    assert config is not None
    assert [config.covers(f"model.layers.{layer}.mlp.experts.down_proj") for layer in range(56)] == [False, True] * 28
