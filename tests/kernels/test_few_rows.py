"""The kernels for steps of few rows in Triton's interpreter, on the CPU, against their twins.

On a GPU: tests/gpu/test_few_rows_gpu.py.
"""

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from nanoinfer.layers import few_rows
from nanoinfer.layers.attention import layer

triton = pytest.importorskip("triton")

from nanoinfer.kernels import few_rows_attention, few_rows_product  # noqa: E402
from nanoinfer.kernels.few_rows_product import Tiling  # noqa: E402
from tests.kernels.helpers import loops_are_interpreted  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
]

TILINGS = [
    Tiling(8, 4, 16, ahead=2, stages=3, warps=4),  # warps share out K; what is not read ahead goes through the pipeline
    Tiling(32, 2, 32, ahead=99, stages=3, warps=2),  # all of the weight is read ahead
    Tiling(16, 1, 32, ahead=0, stages=3, warps=4),  # warps share out columns, and nothing is read ahead
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=TILINGS, ids=["sliced", "ahead", "whole"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tiling:
    monkeypatch.setattr(few_rows_product, "choose_tiling", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize(
    ("twin", "kernels"),
    [(few_rows.few_rows_product, few_rows_product), (layer.few_rows_attention, few_rows_attention)],
)
def test_on_cuda_the_kernel_of_a_twins_name_runs_with_its_parameters(
    twin: Callable[..., object], kernels: ModuleType
) -> None:
    kernel = getattr(kernels, twin.__name__)
    assert inspect.getclosurevars(twin).nonlocals["on_cuda"]() is kernel
    assert inspect.signature(kernel) == inspect.signature(twin)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64])
@pytest.mark.parametrize(("num_outputs", "size"), [(64, 128), (40, 96), (33, 200)])
def test_a_product_equals_its_twin(num_rows: int, num_outputs: int, size: int, tiling: Tiling) -> None:
    x, weight = randn(num_rows, size), randn(num_outputs, size, seed=1)
    result = few_rows_product.few_rows_product(x, weight)
    torch.testing.assert_close(result, few_rows.few_rows_product(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_what_is_fused_equals_separate_layers(
    has_bias: bool, gated: bool, has_residual: bool, has_norm: bool, tiling: Tiling
) -> None:
    num_rows, num_outputs, size = 5, 44, 144
    num_lines = 2 * num_outputs if gated else num_outputs
    x, weight = 3 * randn(num_rows, size + 8)[:, :size], randn(num_lines, size, seed=1) / 12  # rows out of wider ones
    options = {
        "bias": randn(num_lines, seed=2) if has_bias else None,
        "norm": (randn(size, seed=3), 1e-5) if has_norm else None,
        "residual": randn(num_rows, num_outputs, seed=4) if has_residual else None,
        "gated": gated,
    }
    result = few_rows_product.few_rows_product(x, weight, **options)
    torch.testing.assert_close(result, few_rows.few_rows_product(x, weight, **options), rtol=1e-5, atol=1e-5)


def test_a_row_of_nan_or_of_zeros_leaves_the_others_alone(tiling: Tiling) -> None:
    x, weight, norm = randn(4, 96), randn(24, 96, seed=1), (randn(96, seed=2), 1e-6)
    expected = few_rows.few_rows_product(x, weight, norm=norm)
    x[1], x[2, 5] = 0.0, float("nan")
    result = few_rows_product.few_rows_product(x, weight, norm=norm)
    torch.testing.assert_close(result[[0, 3]], expected[[0, 3]], rtol=1e-5, atol=1e-4)
    assert (result[1] == 0).all()
    assert result[2].isnan().all()


def test_16_bits_are_rounded_about_as_often_as_by_separate_layers(tiling: Tiling) -> None:
    x, weight, norm = randn(3, 128).half(), (randn(128, 128, seed=1) / 11).half(), randn(128, seed=2).half()
    result = few_rows_product.few_rows_product(x, weight, norm=(norm, 1e-6), gated=True)
    assert result.dtype == torch.float16
    exact = few_rows.few_rows_product(x.float(), weight.float(), norm=(norm.float(), 1e-6), gated=True)
    twin = few_rows.few_rows_product(x, weight, norm=(norm, 1e-6), gated=True)
    assert (result.float() - exact).norm() < 1.5 * (twin.float() - exact).norm()


def test_no_rows_give_no_rows() -> None:
    assert few_rows_product.few_rows_product(randn(0, 64), randn(32, 64)).shape == (0, 32)


# --- attention ---


def attention_inputs(
    context_lens: list[int],
    group_size: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 64,
    has_norms: bool = True,
    block_size: int = 16,
) -> dict[str, object]:
    """Rows of so many tokens, of which the newest is not in the cache yet; the cache is NaN wherever no token is."""
    num_rows, max_blocks = len(context_lens), max(1, -(-max(context_lens) // block_size))
    tables = torch.randperm(num_rows * max_blocks, generator=torch.Generator().manual_seed(1)).view(num_rows, -1)
    cache = torch.full((2, num_rows * max_blocks, num_kv_heads, block_size, head_dim), float("nan"))
    slots = []
    for row, length in enumerate(context_lens):
        for token in range(length - 1):
            block = tables[row, token // block_size]
            cache[:, block, :, token % block_size] = randn(2, num_kv_heads, head_dim, seed=1000 * row + token)
        last = length - 1
        slots.append(int(tables[row, last // block_size]) * block_size + last % block_size if length else -1)
    angles = randn(max(context_lens) + 1, rotary_dim // 2, seed=2)
    return {
        "qkv": 2 * randn(num_rows, (group_size + 2) * num_kv_heads * head_dim + 8)[:, :-8],
        "norm_weights": (randn(head_dim, seed=3), randn(head_dim, seed=4)) if has_norms else None,
        "eps": 1e-6,
        "positions": torch.tensor([max(0, length - 1) for length in context_lens]),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=1),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "slot_mapping": torch.tensor(slots),
        "context_lens": torch.tensor(context_lens, dtype=torch.int32),
        "block_tables": tables.int(),
        "scale": 0.2,
    }


def assert_attends_like_its_twin(inputs: dict[str, object]) -> None:
    """The outputs of all rows with a context, and the cache afterwards."""
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    result = few_rows_attention.few_rows_attention(**inputs)
    expected = layer.few_rows_attention(*copies.values())
    has_context = inputs["context_lens"] > 0
    torch.testing.assert_close(result[has_context], expected[has_context], rtol=1e-5, atol=2e-5)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(inputs[name], copies[name], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("num_multiprocessors", [1, 2, 9])
@pytest.mark.parametrize("context_lens", [[1], [70], [16, 17, 0, 33], [200, 1, 2, 50, 64, 65]])
def test_attention_equals_its_twin(
    context_lens: list[int], num_multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows_attention, "num_multiprocessors", lambda _: num_multiprocessors)
    assert_attends_like_its_twin(attention_inputs(context_lens))


@pytest.mark.parametrize(
    "options",
    [
        {"has_norms": False},
        {"head_dim": 80, "rotary_dim": 80},
        {"rotary_dim": 32},
        {"head_dim": 128, "rotary_dim": 128, "group_size": 1},
        {"group_size": 7, "num_kv_heads": 1},
        {"group_size": 20, "block_size": 64},
        {"block_size": 48},
    ],
)
def test_attention_equals_its_twin_in_other_shapes(options: dict[str, int]) -> None:
    assert_attends_like_its_twin(attention_inputs([100, 3, 130], **options))


@pytest.mark.parametrize("num_rows", [16, 17, 64])
def test_attention_of_more_rows_equals_its_twin(num_rows: int) -> None:
    assert_attends_like_its_twin(attention_inputs([(7 * row) % 40 for row in range(num_rows)], num_kv_heads=1))


def test_a_row_whose_values_are_nan_leaves_the_others_alone() -> None:
    inputs = attention_inputs([30, 30])
    inputs["v_cache"][inputs["block_tables"][0].long()] = float("nan")
    expected = layer.few_rows_attention(*attention_inputs([30, 30]).values())
    result = few_rows_attention.few_rows_attention(**inputs)
    assert result[0].isnan().all()
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=2e-5)
