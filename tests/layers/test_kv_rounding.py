"""Keys and values in 8 bits: the numbers, as the specification of the kernel defines them."""

import pytest
import torch
from torch import Tensor

from nanoinfer.caches.block_layout import BlockLayout, select_kv_cache_dtype
from nanoinfer.errors import ConfigError
from nanoinfer.ops.kv_cache.spec import LARGEST, LayerCache, quantize_vectors, store_keys_values

INT8, FP8 = torch.int8, torch.float8_e4m3fn
FORMATS = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    values, scales = quantize_vectors(x, dtype)
    return values.float() * scales.unsqueeze(-1)


def most_error(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a step: of int8 it is the same everywhere; e4m3 has 3 bits after the first one, and from 2**-6 on fewer."""
    steps = torch.full_like(x, 0.5) if dtype == INT8 else (x.abs() / scales.unsqueeze(-1)).clamp(min=2**-6) * 2**-4
    return steps * scales.unsqueeze(-1) * (1 + 1e-5)


@FORMATS
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_each_vector_takes_all_of_the_format_and_errs_by_half_a_step(
    dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    x = (randn(50, 3, 64) * torch.logspace(-6, 6, 50).view(50, 1, 1)).to(input_dtype)
    values, scales = quantize_vectors(x, dtype)
    assert (values.dtype, values.shape) == (dtype, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, x.shape[:-1])
    assert (values.float().abs().amax(dim=-1) == LARGEST[dtype]).all()
    assert ((widened(x, dtype) - x.float()).abs() <= most_error(x.float(), scales, dtype)).all()


def test_values_by_hand() -> None:
    values, scales = quantize_vectors(torch.tensor([[254.0, -254.0, 1.0, -1.0, 3.0, 100.2]]), INT8)
    assert values.tolist() == [[127, -127, 1, 0, 2, 50]], "halves go up"
    assert scales.tolist() == [2.0]
    values, scales = quantize_vectors(torch.tensor([[896.0, -448.0, 2.2, 0.0]]), FP8)
    assert values.float().tolist() == [[448.0, -224.0, 1.125, 0.0]]
    assert scales.tolist() == [2.0]


@FORMATS
def test_zeros_stay_zeros_and_so_does_what_is_too_small_for_a_scale(dtype: torch.dtype) -> None:
    values, scales = quantize_vectors(torch.tensor([[0.0, -0.0], [1e-40, -3e-45]]), dtype)
    assert not values.float().any()
    assert not scales[0]
    assert not (values.float() * scales.unsqueeze(-1)).any()


@FORMATS
def test_the_largest_numbers_do_not_overflow(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.3e38, -3.3e38, 1e38]])
    assert ((widened(x, dtype) / x - 1).abs() < 0.07).all()


@FORMATS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_spoil_all_of_their_own_vector_and_no_other(dtype: torch.dtype, bad: float) -> None:
    x = randn(3, 2, 16)
    expected = widened(x, dtype)
    x[1, 0, 5] = bad
    actual = widened(x, dtype)
    assert actual[1, 0].isnan().all()
    actual[1, 0] = expected[1, 0]
    assert torch.equal(actual, expected)


@FORMATS
def test_a_channel_a_thousand_times_as_large_as_the_rest_errs_by_half_a_step_of_its_own_vector(
    dtype: torch.dtype,
) -> None:
    """In e4m3 the others keep their digits; in int8 they fall to a few steps. Other vectors do not notice."""
    x = randn(4, 2, 64)
    x[1, 1, 7] = 1000.0
    values, scales = quantize_vectors(x, dtype)
    error = (widened(x, dtype) - x).abs()
    assert (error <= most_error(x, scales, dtype)).all()
    rest = torch.arange(64) != 7
    assert (error[1, 1, rest] <= (x[1, 1, rest].abs() / 16 + 0.01 if dtype == FP8 else 1000 / 254 + 1e-3)).all()
    assert torch.equal(quantize_vectors(x[0], dtype)[0], values[0])


@FORMATS
def test_tokens_without_a_slot_are_not_written(dtype: torch.dtype) -> None:
    k, v = randn(3, 2, 8), -2 * randn(3, 2, 8)
    k_cache, v_cache = torch.zeros(2, 2, 4, 8, dtype=dtype), torch.zeros(2, 2, 4, 8, dtype=dtype)
    k_scales, v_scales = torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)
    store_keys_values(k, v, LayerCache(k_cache, v_cache, k_scales, v_scales), torch.tensor([5, -1, 2]))
    for token, (block, offset) in {0: (1, 1), 2: (0, 2)}.items():
        for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
            values, own_scales = quantize_vectors(x[token], dtype)
            assert torch.equal(cache[block, :, offset].float(), values.float())
            assert torch.equal(scales[block, :, offset], own_scales)
    assert k_scales.count_nonzero() == v_scales.count_nonzero() == 2 * 2


def test_a_cache_in_8_bits_holds_1_94_times_the_tokens() -> None:
    layout, shape = BlockLayout.of_kv(num_heads=8, head_dim=128), (8, 256, 128)
    assert layout.tensors(256, torch.bfloat16) == [(shape, torch.bfloat16)] * 2
    assert layout.tensors(256, INT8) == [(shape, INT8)] * 2 + [(shape[:-1], torch.float32)] * 2
    num_values = 8 * 256 * 128
    wide, int8, fp8 = (layout.num_bytes(256, dtype) for dtype in (torch.bfloat16, INT8, FP8))
    assert wide == 2 * num_values * 2
    assert int8 == fp8 == 2 * num_values * (1 + 4 / 128)
    assert wide / fp8 == pytest.approx(1.94, abs=0.001)


def test_fp8_is_e4m3_and_is_refused_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    names = {"auto": torch.float32, "int8": INT8, "fp8": FP8, "fp8_e4m3": FP8}
    assert {name: select_kv_cache_dtype(name, torch.float32, cpu) for name in names} == names
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert select_kv_cache_dtype("int8", torch.bfloat16, cuda) == INT8
    message = "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or more, and an A100 has less; use kv_cache_"
    with pytest.raises(ConfigError, match=message):
        select_kv_cache_dtype("fp8", torch.bfloat16, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert select_kv_cache_dtype("fp8", torch.bfloat16, cuda) == FP8
