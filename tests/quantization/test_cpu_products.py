"""Products on a CPU by packed weights: they are those of the plain weights, which come back whenever they change."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer import LLM, ConfigError, ModelError
from nanoinfer.checkpoint import weights
from nanoinfer.checkpoint.loader import iterate_weights
from nanoinfer.ops.int4.spec import PackedWeight, block_size, dequantize, pack, widen
from nanoinfer.quantization import cpu_products
from nanoinfer.quantization.cpu_products import OnednnWeight, has_fast_kernels
from nanoinfer.quantization.int4 import cpu_int4
from nanoinfer.quantization.int4.cpu_int4 import CpuInt4LinearMethod, PrepackedInt4
from nanoinfer.quantization.int4.formats import Int4Config
from nanoinfer.quantization.int8_linear import MAX_KERNEL_ROWS, Int8LinearMethod
from nanoinfer.quantization.linear_method import LinearMethod
from tests.control.test_weight_control import EMBEDDING, HEAD, Q_PROJ, generate, pair

__all__ = ["pair"]
DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 1e-5 if expected.dtype == torch.float32 else 0.02
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [130, cpu_products.MANY_INPUTS])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
def test_a_product_by_a_packed_weight_is_that_by_the_plain_one(
    dtype: torch.dtype, num_rows: int, num_inputs: int
) -> None:
    weight, bias = randn(33, num_inputs, dtype=dtype), randn(33, dtype=dtype)
    x = randn(num_rows, 2 * num_inputs, dtype=dtype)[:, ::2]  # not contiguous
    expected, plain = [F.linear(x, weight, bias), F.linear(x, weight)], weight.clone()
    packed = OnednnWeight(weight)
    for _ in range(2):
        for given, wanted in zip((bias, None), expected, strict=True):
            if num_rows:
                assert_near(packed.product(x, given), wanted)
            else:
                assert packed.product(x, given).shape == wanted.shape
        assert weight.untyped_storage().nbytes() == 0, "a weight takes memory once"
        weights.restore_plain(weight)
        assert torch.equal(weight, plain)


def test_a_weight_that_others_read_is_kept_plain() -> None:
    weight = randn(16, 32)
    packed = OnednnWeight(weight, keeps_plain=True)
    packed.product(randn(2, 32))
    weight.mul_(2)
    weights.restore_plain(weight)
    assert_near(packed.product(randn(2, 32)), F.linear(randn(2, 32), weight))


def test_no_value_is_lost_where_memory_is_too_short_for_a_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(16, 32), randn(2, 32)
    packed, expected = OnednnWeight(weight), F.linear(x, weight)
    packed.product(x)

    def fail(_: Tensor) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(packed, "_values", fail)
        with pytest.raises(MemoryError):
            weights.restore_plain(weight)
    assert_near(packed.product(x), expected)
    weights.restore_plain(weight)
    assert_near(F.linear(x, weight), expected)


@pytest.mark.skipif(not has_fast_kernels(), reason="weights are packed where kernels are fast")
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}], ids=["", "tied"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_an_engine_whose_weights_are_packed_takes_new_ones_and_sleeps(
    quantization: str | None, overrides: dict[str, Any], pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "quantization": quantization}
    new = [[(name, x) for name, x in iterate_weights(folder) if name != HEAD or not overrides] for folder in pair]
    expected = []
    for folder in pair:
        with LLM(folder, hf_overrides=overrides, load_format="dummy", **options) as llm:
            llm.update_weights(new[pair.index(folder)])
            expected.append(generate(llm))
    monkeypatch.setattr(cpu_products, "MIN_PACKED_VALUES", 1)
    with LLM(pair[0], hf_overrides=overrides, load_format="dummy", **options) as llm:
        model = llm.engine.runner.model  # type: ignore[union-attr]
        is_packed = [type(getattr(part, "quant_method", None)) is not LinearMethod for part in model.modules()]
        assert all(is_packed)
        assert "forward" in vars(model.lm_head)
        llm.update_weights(new[0])
        assert generate(llm) == expected[0]
        o_proj = model.model.layers[0].self_attn.o_proj
        assert o_proj.weight.untyped_storage().nbytes() == 0 != model.lm_head.weight.untyped_storage().nbytes()
        llm.update_weights(new[1])
        assert generate(llm) == expected[1]
        llm.update_weights(pair_ for pair_ in new[0] if pair_[0] not in (HEAD, EMBEDDING))
        llm.update_weights(pair_ for pair_ in new[0] if pair_[0] in (HEAD, EMBEDDING))
        assert generate(llm) == expected[0]
        llm.sleep(1)
        llm.wake_up()
        assert generate(llm) == expected[0]
        llm.sleep(2)
        assert not any(param.untyped_storage().nbytes() for param in model.parameters())
        llm.wake_up()
        llm.update_weights(new[1])
        assert generate(llm) == expected[1]


def test_small_weights_stay_plain() -> None:
    with LLM("tiny", device="cpu") as llm:
        parts = [*llm.engine.runner.model.modules()]  # type: ignore[union-attr]
        assert {type(part.quant_method) for part in parts if hasattr(part, "quant_method")} == {LinearMethod}


# --- 4 bits ---


def int4(num_outputs: int, num_inputs: int, group_size: int | None, has_zeros: bool) -> PackedWeight:
    numbers = torch.randint(0, 16, (num_outputs, num_inputs), generator=torch.Generator().manual_seed(1))
    shape = (num_outputs,) if group_size is None else (num_outputs, num_inputs // group_size)
    zeros = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return PackedWeight(pack(numbers, block_size(num_inputs)), randn(*shape).abs() + 0.1, zeros if has_zeros else None)


@pytest.mark.parametrize("has_zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize("group_size", [None, 16, 32, 64, 128])
@pytest.mark.parametrize("num_outputs", [40, 48, 1040])
def test_weights_in_4_bits_are_widened_and_come_back(
    num_outputs: int, group_size: int | None, has_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_int4, "WIDENED_AT_ONCE", 7 * 384)
    weight = int4(num_outputs, 384, group_size, has_zeros)
    words = weight.numbers.clone()
    held = PrepackedInt4(*weight[:3], block_size(384), torch.bfloat16)  # type: ignore[arg-type]
    wide_before = widen.__wrapped__(*weight[:3], torch.float32)  # type: ignore[attr-defined]
    for dtype in DTYPES:
        wide = held.prepacked().widen(dtype)
        assert weight.numbers.untyped_storage().nbytes() == 0
        assert torch.equal(wide, widen.__wrapped__(words, *weight[1:3], dtype))  # type: ignore[attr-defined]
    is_served = num_outputs % 16 == 0 and group_size != 16 and has_fast_kernels()
    assert (held.prepacked().for_kernel is not None) == is_served
    for tensor in weight[1:3]:
        if tensor is not None:
            held.prepacked()
            weights.restore_plain(tensor)  # as if it changed
            assert torch.equal(weight.numbers, words)
    weight.scales.mul_(2)
    assert torch.equal(held.prepacked().widen(torch.float32), 2 * wide_before)


@pytest.mark.parametrize("has_zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize("group_size", [None, 16, 32, 128])
@pytest.mark.parametrize("num_rows", [0, 1, 5, cpu_int4.MAX_KERNEL_ROWS, cpu_int4.MAX_KERNEL_ROWS + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_in_4_bits_are_those_of_the_wide_weight(
    dtype: torch.dtype, num_rows: int, group_size: int | None, has_zeros: bool
) -> None:
    """More outputs than are packed at a time, and no multiple of the kernel's blocks."""
    weight = int4(1072, 384, group_size, has_zeros)
    config = Int4Config(checkpoint_format="gptq", group_size=group_size, has_zeros=has_zeros)
    layer: Any = SimpleNamespace(weight=torch.empty(1072, 384, dtype=dtype), full_shape=(1072, 384))
    method = CpuInt4LinearMethod(config, layer)
    for name, values in zip(("weight", "weight_scale", "weight_zero_point"), weight[:3], strict=True):
        if values is not None:
            getattr(layer, name).copy_(values)
    x, bias = randn(num_rows, 768, dtype=dtype)[:, ::2], randn(1072, dtype=dtype)
    for given in (bias, None):
        expected = F.linear(x.float(), dequantize(weight), None if given is None else given.float()).to(dtype)
        actual = method.apply(layer, x, given)
        assert actual.shape == expected.shape
        if num_rows:
            assert_near(actual, expected)


# --- 8 bits ---


def int8_layer(dtype: torch.dtype, weight: Tensor) -> Any:
    layer: Any = SimpleNamespace(weight=torch.empty(weight.shape, dtype=dtype), full_shape=tuple(weight.shape))
    layer.register_buffer = partial(setattr, layer)
    layer.quant_method = Int8LinearMethod(layer)
    for place, values in layer.quant_method.prepare(layer, layer.weight, weight, None):
        place.copy_(values)
    return layer


@pytest.mark.parametrize("num_rows", [0, 1, 7, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1])
@pytest.mark.parametrize("num_inputs", [128, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_in_8_bits_are_those_of_the_wide_weight(dtype: torch.dtype, num_inputs: int, num_rows: int) -> None:
    weight, bias = randn(40, num_inputs), randn(40, dtype=dtype)
    x = randn(num_rows, 2 * num_inputs, dtype=dtype)[:, ::2]  # not contiguous
    layer = int8_layer(dtype, weight)
    steps = weight / layer.weight_scale.unsqueeze(1)
    assert (layer.weight - steps).abs().max() < 0.51
    wide = layer.weight.float() * layer.weight_scale.unsqueeze(1)
    for given in (bias, None):
        expected = F.linear(x.float(), wide, None if given is None else given.float()).to(dtype)
        actual = layer.quant_method.apply(layer, x, given)
        assert actual.shape == expected.shape
        if num_rows:
            assert_near(actual, expected)


def test_in_8_bits_zeros_stay_zeros_and_nan_and_infinity_spoil_their_own_output() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [torch.inf, 1.0], [-127.0, 1.0]])
    layer = int8_layer(torch.float32, weight)
    wide = layer.quant_method.wide_weight(layer)
    assert wide[[0, 3]].tolist() == [[0.0, 0.0], [-127.0, 1.0]]
    assert wide[1:3].isnan().all()


def test_8_bits_on_a_gpu_are_refused_by_name() -> None:
    layer = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda")))
    with pytest.raises(
        ConfigError, match=r"quantization='int8' is for CPUs, .*; use 'fp8' \(or 'int4'\) there, or dev"
    ):
        Int8LinearMethod(layer)


def test_an_engine_in_8_bits_takes_new_weights(pair: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "quantization": "int8"}
    with LLM(pair[1], **options) as llm:
        expected = generate(llm)
    with LLM(pair[0], **options) as llm:
        assert generate(llm) != expected
        with pytest.raises(ModelError, match=r"it has torch\.int8, and what is rounded to 8 bits has 16 or 32"):
            llm.update_weights({Q_PROJ: torch.zeros(128, 128, dtype=torch.int8)})
        llm.update_weights(iterate_weights(pair[1]))
        assert generate(llm) == expected


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_the_log_says_in_which_dtype_fewer_bits_are_faster(
    quantization: str, pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nanoinfer")
    for dtype, is_logged in (("bfloat16", False), ("float32", True)):
        with LLM(pair[0], device="cpu", dtype=dtype, quantization=quantization):
            assert ("few sequences are faster with dtype='bfloat16'" in caplog.text) == is_logged


def test_two_ranks_say_in_8_bits_what_one_says(pair: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"device": "cpu", "kvcache_block_size": 16, "quantization": "int8"}
    answers = []
    for num_ranks in (1, 2):
        with LLM(pair[0], tensor_parallel_size=num_ranks, **options) as llm:
            answers.append(generate(llm))
    assert answers[0] == answers[1]
