"""gpt-oss's checkpoints in MXFP4 against the same weights in float32, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LLM, ModelError
from nanoinfer.ops.int4.spec import PackedWeight, block_size, dequantize, pack_e2m1
from nanoinfer.quantization.int4.formats import mxfp4_numbers
from tests.models.test_architectures import draw_prompts, generate

SIZES = {
    "vocab_size": 256,
    "hidden_size": 96,  # and 96 inner ones: no whole blocks of 128, and three groups of 32
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in MXFP4, and one with what its weights mean in float32."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES))
        for param in model.parameters():
            if param.dim() == 1:
                param.normal_(std=0.2)
    model.save_pretrained(folder / "wide")
    tensors, generator = load_file(folder / "wide" / "model.safetensors"), torch.Generator().manual_seed(0)
    packed: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        num_experts, num_inputs, num_outputs = tensor.shape
        shape = num_experts, num_outputs, num_inputs // 32
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
        wide = dequantize(read_mxfp4(packed[f"{name}_blocks"], packed[f"{name}_scales"]))
        tensors[name] = wide.mT.contiguous()
    save_file(tensors, folder / "wide" / "model.safetensors")
    write(folder / "mxfp4", json.loads((folder / "wide" / "config.json").read_text()), packed)
    return folder / "mxfp4", folder / "wide"


def read_mxfp4(blocks: Tensor, scales: Tensor) -> PackedWeight:
    """A checkpoint's weight. blocks: (..., num_groups, 16) uint8. scales: (..., num_groups) uint8."""
    numbers = mxfp4_numbers(blocks)
    return PackedWeight(pack_e2m1(numbers, block_size(numbers.shape[-1])), scales, is_e2m1=True)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, quantization: Any = MXFP4) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_tokens_are_those_of_the_weights_in_float32(checkpoints: tuple[Path, Path], tensor_parallel_size: int) -> None:
    packed, wide = checkpoints
    prompts = draw_prompts(0, (3, 17, 40))
    options = {"tensor_parallel_size": tensor_parallel_size, "max_model_len": 64}
    assert generate(packed, prompts, **options) == generate(wide, prompts, max_model_len=64)


def test_mxfp4_is_read_as_its_standard_says() -> None:
    """Against a reader of single bits, written from the standard: a sign, two bits of exponent, one of mantissa."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 3, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (2, 3, 4), dtype=torch.uint8, generator=generator)
    weight = dequantize(read_mxfp4(blocks, scales))
    assert weight.shape == (2, 3, 128)
    for place in range(weight.numel()):
        expert, output, index = place // 384, place // 128 % 3, place % 128
        byte = int(blocks[expert, output, index // 32, index % 32 // 2])
        bits = byte >> 4 if index % 2 else byte & 15
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        expected = (-size if bits & 8 else size) * 2.0 ** (int(scales[expert, output, index // 32]) - 127)
        assert float(weight[expert, output, index]) == expected


def test_a_scale_of_mxfp4_may_be_nan_and_its_extremes_are_exact() -> None:
    weight = dequantize(
        read_mxfp4(torch.full((1, 3, 16), 0x22, dtype=torch.uint8), torch.tensor([[0, 254, 255]]).byte())
    )
    assert weight[0, :64].unique().tolist() == [2.0**-127, 2.0**127]
    assert weight[0, 64:].isnan().all()


def test_the_numbers_are_those_that_transformers_reads(checkpoints: tuple[Path, Path]) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = load_file(checkpoints[0] / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    pair = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    assert torch.equal(dequantize(read_mxfp4(*pair)).mT, mxfp4.convert_moe_packed_tensors(*pair, dtype=torch.float32))


def test_an_engine_takes_new_tensors_of_its_format(checkpoints: tuple[Path, Path]) -> None:
    packed, prompts = checkpoints[0], draw_prompts(0, (3, 17))
    expected = generate(packed, prompts, max_model_len=64)
    tensors = load_file(packed / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith("_blocks")}
    with LLM(packed, device="cpu", dtype="float32", max_model_len=64, num_kvcache_blocks=20) as llm:
        llm.update_weights(zeros)
        layer = llm.engine.runner.model.model.layers[0].mlp.experts.down_proj
        assert not layer.quant_method.wide_weight(layer).any()
        llm.update_weights(tensors)
        assert layer.quant_method.wide_weight(layer).any()
    assert expected == generate(packed, prompts, max_model_len=64)


BLOCKS, SCALES = (f"model.layers.0.mlp.experts.gate_up_proj_{kind}" for kind in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: x | {BLOCKS: x[BLOCKS].int()}, "it has torch.int32 and shape"),
        (lambda x: x | {BLOCKS: x[BLOCKS][..., :8].contiguous()}, "it has blocks of 8 bytes; those of MXFP4 have 16"),
        (lambda x: x | {BLOCKS: x[BLOCKS][:3].contiguous()}, "shape"),
        (lambda x: x | {BLOCKS: x[BLOCKS][:, :-2].contiguous()}, "shape"),
        (lambda x: x | {SCALES: x[SCALES][:, :, :2].contiguous()}, "shape"),
        (lambda x: x | {SCALES: x[SCALES].float()}, "it has torch.float32 and shape"),
        (lambda x: x | {SCALES: torch.full_like(x[SCALES], 129)}, "it has the scale 2**2; at most 2**1"),
        (lambda x: {name: tensor for name, tensor in x.items() if name != SCALES}, f"lacks weights for {SCALES}; "),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    checkpoints: tuple[Path, Path], tmp_path: Path, damage: Callable[[Tensors], Tensors], message: str
) -> None:
    packed = checkpoints[0]
    config = json.loads((packed / "config.json").read_text())
    write(tmp_path, config, damage(load_file(packed / "model.safetensors")))
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj") as error:
        LLM(tmp_path, device="cpu", dtype="float32", max_model_len=64, num_kvcache_blocks=20)
    assert message in str(error.value)


def test_rounding_experts_with_biases_is_refused(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match="quantization='fp8' rounds experts without biases, and GptOssForCausalLM has"):
        LLM(checkpoints[1], device="cpu", quantization="fp8")


def test_fields_that_are_not_known_are_refused(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    packed = checkpoints[0]
    config = json.loads((packed / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4 | {"group_size": 16}}))
    with pytest.raises(ModelError, match="group_size=16"):
        LLM(tmp_path, device="cpu")


def test_random_weights_have_about_the_spread_that_is_asked_for(checkpoints: tuple[Path, Path]) -> None:
    with LLM(checkpoints[0], device="cpu", load_format="dummy", max_model_len=64, num_kvcache_blocks=20) as llm:
        layer = llm.engine.runner.model.model.layers[0].mlp.experts.gate_up_proj
        std = float(layer.quant_method.wide_weight(layer).float().std())
        plain = float(llm.engine.runner.model.model.layers[0].self_attn.qkv_proj.weight.float().std())
    assert 0.7 < std / plain < 1.42
